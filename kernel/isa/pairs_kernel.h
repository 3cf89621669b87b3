// The micro-kernels of rows in pairs (format/pairs.h), once for all instruction sets and value
// types. Included like csr_kernel.h, after a vector wrapper and one of pair_*.h.
//
// A row of a panel is loaded once for both rows of a pair where they share its column: loads, not
// multiplications, are what limits a product with one row at a time. Sums of a block of rows lie in
// scratch memory, rows of a panel as wide; they are carried from tile to tile in registers.

#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

// The weights of a slot, each in all lanes. A vector wrapper may know better.
template <class S, class V>
inline void broadcast_two(const S* p, V& a, V& b) {
  a = V::broadcast(widen(read(p)));
  b = V::broadcast(widen(read(p + 1)));
}

namespace pairs {

constexpr int64_t kHeaderBytes = 6;
constexpr int64_t kMostTileRows = 256;

// Where the pairs, indices and values of the next tile are.
template <class S>
struct Place {
  const uint8_t* headers;
  const uint8_t* indices;
  const S* values;

  // Of the first tile of a block; the others follow.
  Place(const PackedView& w, int64_t first_row, int64_t tiles_of_block) {
    const int64_t tile = (first_row >> w.tile_rows_log2) * tiles_of_block;
    headers = w.section[1] + (tile << w.tile_rows_log2) / 2 * kHeaderBytes;
    values = reinterpret_cast<const S*>(w.section[3]) +
             read_offset(w.section[0], w.offset_width, 2 * tile);
    indices = w.section[2] + read_offset(w.section[0], w.offset_width, 2 * tile + 1);
  }
};

// Calls f(place, n, rows from `block` on) for each block of rows; f goes through its tiles by
// for_tiles.
template <class S, class F>
inline void for_blocks(const PackedView& w, int64_t begin, int64_t end, F&& f) {
  const int64_t tile_rows = int64_t{1} << w.tile_rows_log2;
  const int64_t tiles = (w.cols + (int64_t{1} << w.tile_cols_log2) - 1) >> w.tile_cols_log2;
  Place<S> place(w, begin, tiles);
  for (int64_t block = begin; block < end; block += tile_rows)
    f(place, tiles, block, end - block < tile_rows ? end - block : tile_rows);
}

// ---- panels -------------------------------------------------------------------------------------

// A pair's sums of few vectors are too few to hide the latency of a multiplication: every second
// step has sums of its own, as far as there are registers. (AVX-512: about 10 % faster for one
// vector, 10-25 % for two, 0-10 % for four. Four chains for one vector took 10-15 % longer than two
// from 90 % zeros on, and were -3 to 10 % faster at half.)
constexpr int chains_of(int vectors) { return 2 * vectors <= kPairVectors ? 2 : 1; }

// sums[row] += the tile's part, for `count` pairs.
template <class S, class V, int kVectors>
inline void multiply_tile(Place<S>& place, int64_t count, const typename V::Scalar* x,
                          typename V::Scalar* sums) {
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  constexpr int U = chains_of(kVectors);
  const uint8_t* headers = place.headers;
  const uint8_t* indices = place.indices;
  const S* values = place.values;
  for (; count > 0; --count, headers += kHeaderBytes) {
    int shared = read(reinterpret_cast<const uint16_t*>(headers + 2));
    int single = read(reinterpret_cast<const uint16_t*>(headers + 4));
    Scalar* sum_a = sums + headers[0] * kLanes;
    Scalar* sum_b = sums + headers[1] * kLanes;
    V a[U][kVectors], b[U][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      a[0][v] = V::load(sum_a + v * L);
      b[0][v] = V::load(sum_b + v * L);
      for (int u = 1; u < U; ++u) a[u][v] = b[u][v] = V::zero();
    }

    const auto both = [&](V * to_a, V * to_b, int i) __attribute__((always_inline)) {
      const Scalar* column = x + indices[i] * kLanes;
      V weight_a, weight_b;
      broadcast_two(values + 2 * i, weight_a, weight_b);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        V value = V::load(column + v * L);
        value.pin();
        to_a[v] = V::fma(weight_a, value, to_a[v]);
        to_b[v] = V::fma(weight_b, value, to_b[v]);
      }
    };
    for (; shared >= U; shared -= U, indices += U, values += 2 * U)
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) both(a[u], b[u], u);
    for (; shared > 0; --shared, ++indices, values += 2) both(a[0], b[0], 0);

    const auto each = [&](V * to_a, V * to_b, int i) __attribute__((always_inline)) {
      const Scalar* column_a = x + indices[2 * i] * kLanes;
      const Scalar* column_b = x + indices[2 * i + 1] * kLanes;
      V weight_a, weight_b;
      broadcast_two(values + 2 * i, weight_a, weight_b);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        to_a[v] = V::fma(weight_a, V::load(column_a + v * L), to_a[v]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        to_b[v] = V::fma(weight_b, V::load(column_b + v * L), to_b[v]);
    };
    for (; single >= U; single -= U, indices += 2 * U, values += 2 * U)
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) each(a[u], b[u], u);
    for (; single > 0; --single, indices += 2, values += 2) each(a[0], b[0], 0);

#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      for (int u = 1; u < U; ++u) {
        a[0][v] = V::add(a[0][v], a[u][v]);
        b[0][v] = V::add(b[0][v], b[u][v]);
      }
      a[0][v].store(sum_a + v * L);
      b[0][v].store(sum_b + v * L);
    }
  }
  place.headers = headers;
  place.indices = indices;
  place.values = values;
}

// sums <- the sums of `n` rows from `block` on, and of the row that an odd one is paired with.
template <class S, class V, int kVectors>
inline void multiply_block(const PackedView& w, Place<S>& place, int64_t tiles,
                           const typename V::Scalar* panel, const S* bias, int64_t block, int64_t n,
                           typename V::Scalar* sums) {
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  for (int64_t r = 0; r < n; ++r) {
    const V start = V::broadcast(bias ? widen(read(bias + block + r)) : 0);
    for (int v = 0; v < kVectors; ++v) start.store(sums + r * kLanes + v * L);
  }
  for (int v = 0; n % 2 == 1 && v < kVectors; ++v) V::zero().store(sums + n * kLanes + v * L);
  for (int64_t tile = 0; tile < tiles; ++tile)
    multiply_tile<S, V, kVectors>(place, (n + 1) / 2, panel + (tile << w.tile_cols_log2) * kLanes,
                                  sums);
}

template <class S, int kVectors>
__attribute__((noinline)) void multiply_panel(const PackedView& w, const void* panel, int64_t rows,
                                              const void* bias, void* y_, int64_t y_stride,
                                              int64_t begin, int64_t end, void* scratch) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  S* y = static_cast<S*>(y_);
  Scalar* sums = static_cast<Scalar*>(scratch);
  for_blocks<S>(w, begin, end, [&](Place<S>& place, int64_t tiles, int64_t block, int64_t n) {
    multiply_block<S, V, kVectors>(w, place, tiles, static_cast<const Scalar*>(panel),
                                   static_cast<const S*>(bias), block, n, sums);
    // A vector of batch rows at a time across the block: all of the panel's at once would keep as
    // many lines of y open, which compete for the same places of the cache where rows of y are a
    // multiple of 4 KB apart.
    for (int64_t lane = 0; lane < rows; lane += L)
      store_tile<S, V>(sums + lane, static_cast<int>(n), kLanes, rows - lane < L ? rows - lane : L,
                       y + lane * y_stride + block, y_stride);
  });
}

// The sums are the rows of the panel themselves.
template <class S, int kVectors>
__attribute__((noinline)) void multiply_panel_to_panel(const PackedView& w, const void* panel,
                                                       const void* bias, void* out, int64_t begin,
                                                       int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  for_blocks<S>(w, begin, end, [&](Place<S>& place, int64_t tiles, int64_t block, int64_t n) {
    multiply_block<S, V, kVectors>(w, place, tiles, static_cast<const Scalar*>(panel),
                                   static_cast<const S*>(bias), block, n,
                                   static_cast<Scalar*>(out) + block * kLanes);
  });
}

template <class S>
int64_t scratch_bytes(const PackedView& w, int vectors) {
  using V = typename ComputeOf<S>::Vector;
  return ((int64_t{1} << w.tile_rows_log2) + 1) * vectors * V::kLanes *
         static_cast<int64_t>(sizeof(typename V::Scalar));
}

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end, void* scratch) {
  with_vectors<kPairVectors>(vectors, [&](auto constant) {
    multiply_panel<S, decltype(constant)::value>(w, panel, rows, bias, y, y_stride, begin, end,
                                                 scratch);
  });
}

template <class S>
void multiply_to_panel(const PackedView& w, const void* panel, int vectors, const void* bias,
                       void* out, int64_t begin, int64_t end) {
  with_vectors<kPairVectors>(vectors, [&](auto constant) {
    multiply_panel_to_panel<S, decltype(constant)::value>(w, panel, bias, out, begin, end);
  });
}

// The columns of a tile are read in no order: that part of the panel is to stay in the first cache.
template <class S>
int vectors_for(const PackedView& w) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int64_t kTileBytes = 32 << 10;
  const int64_t vector_bytes = static_cast<int64_t>(V::kLanes * sizeof(typename V::Scalar))
                               << w.tile_cols_log2;
  const int64_t most = kTileBytes / vector_bytes;
  return most < 3 ? 3 : most < kPairVectors ? static_cast<int>(most) : kPairVectors;
}

// ---- a single batch row -------------------------------------------------------------------------

// Both rows of a pair are one vector. More batch rows gain nothing from vectors narrower than the
// instruction set's own (4 or 8 lanes of 16: -7 to 8 %).
template <class S>
void multiply_few(const PackedView& w, const void* x_, int64_t, const void* bias_, void* y_,
                  int64_t, int64_t begin, int64_t end) {
  using Scalar = typename ComputeOf<S>::Vector::Scalar;
  using Two = typename TwoOf<Scalar>::Type;
  constexpr int U = 4;
  const S* bias = static_cast<const S*>(bias_);
  S* y = static_cast<S*>(y_);
  Scalar sums[kMostTileRows + 1];
  for_blocks<S>(w, begin, end, [&](Place<S>& place, int64_t tiles, int64_t block, int64_t n) {
    for (int64_t r = 0; r < n; ++r) sums[r] = bias ? widen(read(bias + block + r)) : 0;
    sums[n] = 0;
    const uint8_t* headers = place.headers;
    const uint8_t* indices = place.indices;
    const S* values = place.values;
    const Scalar* x = static_cast<const Scalar*>(x_);
    for (int64_t tile = 0; tile < tiles; ++tile, x += int64_t{1} << w.tile_cols_log2) {
      for (const uint8_t* last = headers + (n + 1) / 2 * kHeaderBytes; headers != last;
           headers += kHeaderBytes) {
        int shared = read(reinterpret_cast<const uint16_t*>(headers + 2));
        int single = read(reinterpret_cast<const uint16_t*>(headers + 4));
        Scalar* sum_a = sums + headers[0];
        Scalar* sum_b = sums + headers[1];
        Two sum[U] = {Two::of(sum_a, sum_b)};
        for (int u = 1; u < U; ++u) sum[u] = Two::zero();
        const auto both = [&](Two & to, int i) __attribute__((always_inline)) {
          to = Two::fma(Two::load(values + 2 * i), Two::both(x + indices[i]), to);
        };
        for (; shared >= U; shared -= U, indices += U, values += 2 * U)
#pragma GCC unroll 4
          for (int u = 0; u < U; ++u) both(sum[u], u);
        for (; shared > 0; --shared, ++indices, values += 2) both(sum[0], 0);
        const auto each = [&](Two & to, int i) __attribute__((always_inline)) {
          const Two value = Two::of(x + indices[2 * i], x + indices[2 * i + 1]);
          to = Two::fma(Two::load(values + 2 * i), value, to);
        };
        for (; single >= U; single -= U, indices += 2 * U, values += 2 * U)
#pragma GCC unroll 4
          for (int u = 0; u < U; ++u) each(sum[u], u);
        for (; single > 0; --single, indices += 2, values += 2) each(sum[0], 0);
        Two::add(Two::add(sum[0], sum[1]), Two::add(sum[2], sum[3])).store(sum_a, sum_b);
      }
    }
    place.headers = headers;
    place.indices = indices;
    place.values = values;
    for (int64_t r = 0; r < n; ++r) narrow(sums[r], y + block + r);
  });
}

// ---- the table ----------------------------------------------------------------------------------

template <class S>
constexpr Kernel make_kernel(const VectorOps* ops) {
  return {ops,
          kPairVectors,
          kPairPanelBytes,
          1,
          1,
          widened_bytes<S>,
          prepare_widened<S>,
          multiply_few<S>,
          scratch_bytes<S>,
          multiply<S>,
          vectors_for<S>,
          multiply_to_panel<S>};
}

}  // namespace pairs
}  // namespace FXSPARSE_ISA_NAMESPACE

FXSPARSE_DEFINE_KERNELS(pairs)

}  // namespace fxsparse
