// What lanes_<isa>.h needs in portable code. Included inside the namespace of an instruction set,
// never on its own.

template <class V>
inline void keep(V&) {}

// The lowest bit that is set, or 64.
inline uint64_t lowest_bit(uint64_t bits) {
  return bits != 0 ? static_cast<uint64_t>(__builtin_ctzll(bits)) : 64;
}

// Bit c of rows[r] <- bit r of the c-th of 64 masks: 16 x 16 bits at a time, swapping ever smaller
// squares off the diagonal.
inline void transpose_masks(const uint8_t* masks, uint64_t* rows) {
  for (int r = 0; r < 16; ++r) rows[r] = 0;
  for (int c = 0; c < 64; c += 16) {
    uint16_t square[16];
    __builtin_memcpy(square, masks + c * 2, sizeof square);
    uint16_t low = 0x00ff;
    for (int size = 8; size > 0; size /= 2, low = static_cast<uint16_t>(low ^ low << size))
      for (int i = 0; i < 16; i = (i + size + 1) & ~size) {
        const uint16_t t = (square[i] >> size ^ square[i + size]) & low;
        square[i + size] ^= t;
        square[i] ^= static_cast<uint16_t>(t << size);
      }
    for (int r = 0; r < 16; ++r) rows[r] |= static_cast<uint64_t>(square[r]) << c;
  }
}

template <class V>
struct Columns {
  uint8_t i[V::kLanes];
};
template <class V>
inline void load_columns(const uint8_t* indices, Columns<V>* columns) {
  for (int i = 0; i < V::kLanes; ++i) columns->i[i] = indices[i] & 31;
}
template <class V>
inline V look_up(const typename V::Scalar* x, Columns<V> columns) {
  return V::gather(x, columns.i);
}
constexpr bool kLooksUp = false;

inline void expand_places(unsigned mask, const uint8_t* indices, int first, int bytes,
                          int32_t* out) {
  for (; mask != 0; mask &= mask - 1)
    out[__builtin_ctz(mask)] = ((*indices++ & 31) + first) * bytes;
}
