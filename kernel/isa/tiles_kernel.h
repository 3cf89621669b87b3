// The kernels of the tiles format, once for all instruction sets and value types; included after
// lanes_<isa>.h.

#include "isa/lanes_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {
namespace tiles {

constexpr int kTileCols = 32;
constexpr int kAdvanceShift = 5;  // of a step's first index

template <class S>
struct Tiles {
  const uint8_t* groups;
  const uint16_t* masks;
  const uint8_t* indices;
  const S* values;
  int64_t steps;
  int64_t entries;
  Width offset_width;
  int64_t cols;

  explicit Tiles(const PackedView& w)
      : groups(w.section[0]),
        masks(reinterpret_cast<const uint16_t*>(w.section[1])),
        indices(w.section[2]),
        values(reinterpret_cast<const S*>(w.section[3])),
        steps(w.extent[0]),
        entries(w.extent[1]),
        offset_width(w.offset_width),
        cols(w.cols) {}

  int64_t entry(int64_t group) const { return read_offset(groups, offset_width, 2 * group); }
  int64_t step(int64_t group) const { return read_offset(groups, offset_width, 2 * group + 1); }
};

// ---- a few batch rows ---------------------------------------------------------------------------

// More than one row at a time pays only where x can be looked up in registers.
template <class V>
constexpr int few_width(int64_t rows) {
  return kLooksUp ? few_shape<V>(rows).width : 1;
}

// a[b][part] += one step times x[b][32]. A single batch row is multiplied before its products are
// moved to their lanes, which saves moving the columns too.
template <class S, class V, int kWidth>
__attribute__((always_inline)) inline void multiply_step(unsigned mask, const S* value,
                                                         const uint8_t* index,
                                                         const typename V::Scalar* x,
                                                         V (&a)[kWidth][kParts<V>]) {
  for_parts<V>(
      mask, [&](int p, unsigned bits, int before) __attribute__((always_inline)) {
        Columns<V> columns;
        load_columns(index + before, &columns);
        const V packed = V::load(value + before);
        if constexpr (kWidth == 1) {
          const V products = V::fma(packed, look_up(x, columns), V::zero());
          a[0][p] = V::add(a[0][p], expand(products, bits));
        } else if constexpr (kLooksUp) {
          const V lanes = expand(packed, bits);
          columns = expand(columns, bits);
#pragma GCC unroll 16
          for (int b = 0; b < kWidth; ++b)
            a[b][p] = V::fma(lanes, look_up(x + b * kTileCols, columns), a[b][p]);
        }
      });
}

// The sums of a group times x[tile][b][column], b < kRows, and the step they have got to. Every
// second step is added to sums of its own where there are registers for them.
template <class S, class V, int kRows>
class GroupSums {
  using Scalar = typename V::Scalar;
  static constexpr int P = kParts<V>;
  static constexpr int U = kRows * P <= 4 ? 2 : 1;

 public:
  static constexpr int kWidth = kRows;
  static constexpr int kUnroll = U;
  static constexpr int kVectors = U * kWidth * P;

  GroupSums(const Tiles<S>& w, int64_t group, const Scalar* x)
      : mask_(w.masks + w.step(group)),
        last_mask_(w.masks + w.step(group + 1)),
        value_(w.values + w.entry(group)),
        values_end_(w.values + w.entries),
        index_(w.indices + w.entry(group)),
        x_(x) {
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 16
      for (int b = 0; b < kWidth; ++b)
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) acc_[u][b][p] = V::zero();
  }

  int64_t left() const { return last_mask_ - mask_; }

  // Of the steps that are left, those that are surely in bounds, in whole units.
  int64_t units() const {
    const int64_t most = (values_end_ - value_) / kGroup;
    return (left() < most ? left() : most) / U;
  }

  // U steps.
  __attribute__((always_inline)) inline void add_unit() {
    prefetch_ahead(value_, U * kGroup);
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) add_step(u);
    mask_ += U;
  }

  // sums[b][row] <- the sums, with all the steps that are left.
  __attribute__((always_inline)) inline void finish(Scalar (*sums)[kGroup]) {
    S value_tail[(U + 1) * kGroup];
    uint8_t index_tail[(U + 1) * kGroup];
    while (left() > 0) {
      int64_t n = units();
      const bool last = n == 0;
      if (last) {
        if (const int64_t entries = values_end_ - value_; entries < U * kGroup) {
          copy_entries(value_, entries, value_tail);
          copy_entries(index_, entries, index_tail);
          value_ = value_tail;
          index_ = index_tail;
        }
        n = left() / U;
      }
      for (; n > 0; --n) add_unit();
      if (last && left() > 0) {
        add_step(0);
        ++mask_;
      }
    }
#pragma GCC unroll 16
    for (int b = 0; b < kWidth; ++b)
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) {
        const V sum = U == 2 ? V::add(acc_[0][b][p], acc_[U - 1][b][p]) : acc_[0][b][p];
        sum.store(sums[b] + p * V::kLanes);
      }
  }

 private:
  __attribute__((always_inline)) inline void add_step(int u) {
    const unsigned bits = read_mask(mask_ + u);
    x_ += static_cast<int64_t>(*index_ >> kAdvanceShift) * kTileCols * kWidth;
    multiply_step<S, V, kWidth>(bits, value_, index_, x_, acc_[u]);
    const int n = __builtin_popcount(bits);
    value_ += n;
    index_ += n;
  }

  const uint16_t* mask_;
  const uint16_t* last_mask_;
  const S* value_;
  const S* values_end_;
  const uint8_t* index_;
  const Scalar* x_;
  V acc_[U][kWidth][P];
};

template <class S, int kWidth>
__attribute__((noinline)) void multiply_width(const PackedView& view, const void* x_, int64_t rows,
                                              const S* bias, S* y, int64_t y_stride, int64_t begin,
                                              int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Sums = GroupSums<S, V, kWidth>;
  const Tiles<S> w(view);
  const auto* x = static_cast<const typename V::Scalar*>(x_);
  const int64_t padded_cols = (w.cols + kTileCols - 1) / kTileCols * kTileCols;
  multiply_groups<Sums>(
      rows, bias, y, y_stride, begin,
      end, [&](int64_t group, int64_t b) __attribute__((always_inline)) {
        return Sums(w, group, x + b * padded_cols);
      });
}

// x in tiles, [pass][tile][batch row][column], zero beyond the last column.
template <class S>
int64_t few_bytes(int64_t rows, int64_t cols) {
  using V = typename ComputeOf<S>::Vector;
  if (rows == 1 && sizeof(S) == sizeof(typename V::Scalar) && cols % kTileCols == 0) return 0;
  const int64_t width = few_width<V>(rows);
  return (rows + width - 1) / width * width * ((cols + kTileCols - 1) / kTileCols) * kTileCols *
         static_cast<int64_t>(sizeof(typename V::Scalar));
}

template <class S>
void prepare_few(const void* x_, int64_t stride, int64_t rows, int64_t cols, void* out_) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int L = V::kLanes;
  const S* x = static_cast<const S*>(x_);
  auto* out = static_cast<typename V::Scalar*>(out_);
  const int64_t width = few_width<V>(rows);
  for (int64_t b0 = 0; b0 < rows; b0 += width)
    for (int64_t k0 = 0; k0 < cols; k0 += kTileCols)
      for (int64_t b = b0; b < b0 + width; ++b, out += kTileCols) {
        const S* from = x + b * stride + k0;
        const int64_t n = b < rows ? cols - k0 : 0;
        if (n >= kTileCols) {
          for (int i = 0; i < kTileCols; i += L) V::load(from + i).store(out + i);
        } else {
          for (int i = 0; i < kTileCols; ++i) out[i] = i < n ? widen(from[i]) : 0;
        }
      }
}

template <class S>
void multiply_few(const PackedView& w, const void* x, int64_t rows, const void* bias, void* y,
                  int64_t y_stride, int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  with_width<V>(few_width<V>(rows), [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    if constexpr (kLooksUp || kWidth == 1)
      multiply_width<S, kWidth>(w, x, rows, static_cast<const S*>(bias), static_cast<S*>(y),
                                y_stride, begin, end);
  });
}

// ---- panels -------------------------------------------------------------------------------------

// Where a group's next step is.
struct Cursor {
  int64_t step, last_step;
  int64_t entry;
  int64_t tile;  // of the step before
};

// Expands steps until the tile `end`, at most kSteps. Places are in bytes from the first column of
// the tile `begin`. Returns whether the last of these tiles may have more.
template <class S, class V>
bool expand_steps(const Tiles<S>& w, Cursor& cursor, int64_t begin, int64_t end, int lane_bytes,
                  Expanded<typename V::Scalar>* out) {
  constexpr int L = V::kLanes;
  const uint16_t* masks = w.masks + cursor.step;
  const S* value = w.values + cursor.entry;
  const uint8_t* index = w.indices + cursor.entry;
  uint16_t mask_tail[kSteps];
  S value_tail[(kSteps + 1) * kGroup];
  uint8_t index_tail[(kSteps + 1) * kGroup];
  if (w.steps - cursor.step < kSteps) {
    __builtin_memset(mask_tail, 0, sizeof mask_tail);
    __builtin_memcpy(mask_tail, masks, (w.steps - cursor.step) * sizeof *masks);
    masks = mask_tail;
  }
  if (const int64_t left = w.entries - cursor.entry; left < kSteps * kGroup) {
    copy_entries(value, left, value_tail);
    copy_entries(index, left, index_tail);
    value = value_tail;
    index = index_tail;
  }
  const int64_t left = cursor.last_step - cursor.step;
  const int most = left < kSteps ? static_cast<int>(left) : kSteps;
  const uint8_t* const first = index;
  int64_t tile = cursor.tile;
  int t = 0;
  for (; t < most; ++t) {
    const int64_t next = tile + (*index >> kAdvanceShift);
    if (next >= end) break;
    tile = next;
    const unsigned mask = read_mask(masks + t);
    V lanes[kParts<V>];
    expand_group(mask, value, lanes);
#pragma GCC unroll 16
    for (int p = 0; p < kParts<V>; ++p) lanes[p].store(out->values + t * kGroup + p * L);
    expand_places(mask, index, static_cast<int>(tile - begin) * kTileCols, lane_bytes,
                  out->places + t * kGroup);
    const int n = __builtin_popcount(mask);
    value += n;
    index += n;
  }
  cursor.step += t;
  cursor.entry += index - first;
  cursor.tile = tile;
  transpose_masks(reinterpret_cast<const uint8_t*>(masks), out->rows);
  if (t < kSteps)
    for (int r = 0; r < kGroup; ++r) out->rows[r] &= (uint64_t{1} << t) - 1;
  return t == kSteps;
}

// sums[lane] += one row's entries times x: two at a time, in sums of their own.
template <class V, int kVectors>
__attribute__((always_inline)) inline void multiply_row(uint64_t bits, int pairs,
                                                        const typename V::Scalar* values,
                                                        const int32_t* places, const char* x,
                                                        typename V::Scalar* sums) {
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  V a[kVectors], b[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    a[v] = V::load(sums + v * L);
    b[v] = V::zero();
  }
  for (; pairs > 0; --pairs) {
    const uint64_t t = take_step(bits), u = take_step(bits);
    const V wa = V::broadcast(values[t * kGroup]), wb = V::broadcast(values[u * kGroup]);
    const auto* xa = reinterpret_cast<const Scalar*>(x + places[t * kGroup]);
    const auto* xb = reinterpret_cast<const Scalar*>(x + places[u * kGroup]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) a[v] = V::fma(wa, V::load(xa + v * L), a[v]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) b[v] = V::fma(wb, V::load(xb + v * L), b[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) V::add(a[v], b[v]).store(sums + v * L);
}

// The same code for all stored types that are computed in V: never inlined.
template <class V, int kVectors>
__attribute__((noinline)) void multiply_slice(const Expanded<typename V::Scalar>& slice,
                                              const char* x, typename V::Scalar* sums) {
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  int pairs[kGroup];
  for (int r = 0; r < kGroup; ++r) pairs[r] = (__builtin_popcountll(slice.rows[r]) + 1) / 2;
  for (int r = 0; r < kGroup; ++r)
    multiply_row<V, kVectors>(slice.rows[r], pairs[r], slice.values + r, slice.places + r, x,
                              sums + r * kLanes);
}

// Columns of a slice: so that it stays in L1, but not so few that rows have next to no entries.
template <class V>
int64_t slice_tiles(const PackedView& w, int vectors) {
  const double size = static_cast<double>(w.rows) * static_cast<double>(w.cols);
  const double density = static_cast<double>(w.nonzeros) / (size > 0 ? size : 1);
  const int wide = vectors >= 5;
  if (density >= 0.15) return wide ? 2 : 4;
  if (density >= 0.08) return wide ? 4 : 8;
  return 8;
}

template <class S, int kVectors>
__attribute__((noinline)) void multiply_panel(const PackedView& view, const void* panel_,
                                              int64_t rows, const S* bias, S* y, int64_t y_stride,
                                              int64_t begin, int64_t end, void* scratch) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  constexpr int kLaneBytes = static_cast<int>(kLanes * sizeof(Scalar));
  const Tiles<S> w(view);
  const char* panel = static_cast<const char*>(panel_);
  Scalar* sums = static_cast<Scalar*>(scratch);
  auto* slice =
      reinterpret_cast<Expanded<Scalar>*>(static_cast<char*>(scratch) + block_bytes<V>(kVectors));
  for (int r = 0; r < kGroup; ++r) {
    slice->values[kSteps * kGroup + r] = 0;
    slice->places[kSteps * kGroup + r] = 0;
  }
  const int64_t tiles = (w.cols + kTileCols - 1) / kTileCols;
  const int64_t width = slice_tiles<V>(view, kVectors);
  for_blocks<S, kVectors>(
      rows, bias, y, y_stride, begin, end, sums,
      [&](int64_t first_group, int64_t groups, Scalar* block_sums) {
        Cursor cursors[kBlockRows / kGroup];
        for (int64_t g = 0; g < groups; ++g)
          cursors[g] = {w.step(first_group + g), w.step(first_group + g + 1),
                        w.entry(first_group + g), 0};
        for (int64_t tile = 0; tile < tiles; tile += width) {
          const int64_t tile_end = tile + width < tiles ? tile + width : tiles;
          const char* x = panel + tile * kTileCols * kLaneBytes;
          for (int64_t g = 0; g < groups; ++g) {
            bool more = true;
            while (more) {
              more = expand_steps<S, V>(w, cursors[g], tile, tile_end, kLaneBytes, slice);
              multiply_slice<V, kVectors>(*slice, x, block_sums + g * kGroup * kLanes);
            }
          }
        }
      });
}

template <class S>
int64_t scratch_bytes(const PackedView&, int vectors) {
  using V = typename ComputeOf<S>::Vector;
  return block_bytes<V>(vectors) + static_cast<int64_t>(sizeof(Expanded<typename V::Scalar>));
}

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end, void* scratch) {
  with_vectors<kMostVectors>(vectors, [&](auto constant) {
    multiply_panel<S, decltype(constant)::value>(w, panel, rows, static_cast<const S*>(bias),
                                                 static_cast<S*>(y), y_stride, begin, end, scratch);
  });
}

template <class S>
constexpr Kernel make_kernel(const VectorOps* ops) {
  constexpr int kFew = kLooksUp ? kMaxFew : 1;
  return {ops,
          kMostVectors,
          kPanelMemory,
          kFew,
          kFew,
          few_bytes<S>,
          prepare_few<S>,
          multiply_few<S>,
          scratch_bytes<S>,
          multiply<S>};
}

}  // namespace tiles
}  // namespace FXSPARSE_ISA_NAMESPACE

FXSPARSE_DEFINE_KERNELS(tiles)

}  // namespace fxsparse
