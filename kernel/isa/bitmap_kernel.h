// The kernels of the bitmap format, once for all instruction sets and value types; included after
// lanes_<isa>.h.

#include "isa/lanes_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {
namespace bitmap {

template <class S>
struct Bitmap {
  const uint8_t* groups;
  const uint16_t* masks;
  const S* values;
  const S* values_end;
  Width offset_width;
  int64_t cols;

  explicit Bitmap(const PackedView& w)
      : groups(w.section[0]),
        masks(reinterpret_cast<const uint16_t*>(w.section[1])),
        values(reinterpret_cast<const S*>(w.section[2])),
        values_end(values + w.nonzeros),
        offset_width(w.offset_width),
        cols(w.cols) {}

  const S* group_values(int64_t group) const {
    return values + read_offset(groups, offset_width, group);
  }
};

// ---- a few batch rows ---------------------------------------------------------------------------

// Independent sums a batch row, to hide the latency of the multiply-add.
template <class V, int kWidth>
constexpr int unroll_of() {
  constexpr int kChains = kWidth * kParts<V>;
  return kChains >= 5 ? 1 : kChains >= 3 ? 2 : kChains == 2 ? 4 : 8;
}

// The sums of a group times x[k * stride + b], b < kRows, and the column they have got to. The
// order of the sums depends on kRows alone.
template <class S, class V, int kRows>
class GroupSums {
  using Scalar = typename V::Scalar;
  static constexpr int P = kParts<V>;
  static constexpr int U = unroll_of<V, kRows>();

 public:
  static constexpr int kWidth = kRows;
  static constexpr int kUnroll = U;
  static constexpr int kVectors = U * kWidth * P;

  GroupSums(const Bitmap<S>& w, int64_t group, const Scalar* x, int64_t stride)
      : mask_(w.masks + group * w.cols),
        value_(w.group_values(group)),
        values_end_(w.values_end),
        x_(x),
        stride_(stride),
        left_(w.cols) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u)
#pragma GCC unroll 16
      for (int b = 0; b < kWidth; ++b)
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p) acc_[u][b][p] = V::zero();
  }

  // Of the columns that are left, those that are surely in bounds, in units of U.
  int64_t units() const {
    const int64_t most = (values_end_ - value_) / kGroup;
    return (left_ < most ? left_ : most) / U;
  }

  __attribute__((always_inline)) inline void add_unit() {
    prefetch_ahead(value_, U * kGroup / 2);
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) add_column(u);
    advance(U);
  }

  // sums[b][row] <- the sums, with all the columns that are left.
  __attribute__((always_inline)) inline void finish(Scalar (*sums)[kGroup]) {
    S tail[(U + 1) * kGroup];
    while (left_ > 0) {
      int64_t n = units();
      const bool last = n == 0;
      if (last) {
        if (const int64_t entries = values_end_ - value_; entries < U * kGroup) {
          copy_entries(value_, entries, tail);
          value_ = tail;
        }
        n = left_ / U;
      }
      for (; n > 0; --n) add_unit();
      for (; last && left_ > 0; advance(1)) add_column(0);
    }
#pragma GCC unroll 4
    for (int half = U / 2; half > 0; half /= 2)
#pragma GCC unroll 8
      for (int u = 0; u < half; ++u)
#pragma GCC unroll 16
        for (int b = 0; b < kWidth; ++b)
#pragma GCC unroll 16
          for (int p = 0; p < P; ++p) acc_[u][b][p] = V::add(acc_[u][b][p], acc_[u + half][b][p]);
#pragma GCC unroll 16
    for (int b = 0; b < kWidth; ++b)
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc_[0][b][p].store(sums[b] + p * V::kLanes);
  }

 private:
  __attribute__((always_inline)) inline void add_column(int u) {
    const unsigned bits = read_mask(mask_ + u);
    V lanes[P];
    expand_group(bits, value_, lanes);
    value_ += __builtin_popcount(bits);
#pragma GCC unroll 16
    for (int b = 0; b < kWidth; ++b) {
      const V factor = V::broadcast(x_[u * stride_ + b]);
#pragma GCC unroll 16
      for (int p = 0; p < P; ++p) acc_[u][b][p] = V::fma(lanes[p], factor, acc_[u][b][p]);
    }
  }
  __attribute__((always_inline)) inline void advance(int64_t columns) {
    mask_ += columns;
    x_ += columns * stride_;
    left_ -= columns;
  }

  const uint16_t* mask_;
  const S* value_;
  const S* values_end_;
  const Scalar* x_;
  const int64_t stride_;
  int64_t left_;
  V acc_[U][kWidth][P];
};

// x: batch rows, kWidth of them `stride` elements of a column apart; the next ones `next` further.
template <class S, int kWidth>
__attribute__((noinline)) void multiply_width(const PackedView& view, const void* x_,
                                              int64_t stride, int64_t next, int64_t rows,
                                              const S* bias, S* y, int64_t y_stride, int64_t begin,
                                              int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Sums = GroupSums<S, V, kWidth>;
  const Bitmap<S> w(view);
  const auto* x = static_cast<const typename V::Scalar*>(x_);
  multiply_groups<Sums>(
      rows, bias, y, y_stride, begin,
      end, [&](int64_t group, int64_t b) __attribute__((always_inline)) {
        return Sums(w, group, x + b / kWidth * next, stride);
      });
}

// x transposed, [pass][column][batch row].
template <class S>
int64_t few_bytes(int64_t rows, int64_t cols) {
  using V = typename ComputeOf<S>::Vector;
  if (rows == 1 && sizeof(S) == sizeof(typename V::Scalar)) return 0;
  const FewShape shape = few_shape<V>(rows);
  return shape.passes * shape.width * cols * static_cast<int64_t>(sizeof(typename V::Scalar));
}

template <class S, int kWidth>
void transpose_few(const S* x, int64_t stride, int64_t rows, int64_t cols,
                   typename ComputeOf<S>::Vector::Scalar* out) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int L = V::kLanes;
  int64_t k = 0;
  if constexpr (kWidth % L == 0) {
    for (; k + L <= cols; k += L)
      for (int lane0 = 0; lane0 < kWidth; lane0 += L) {
        V r[L];
        for (int i = 0; i < L; ++i)
          r[i] = lane0 + i < rows ? V::load(x + (lane0 + i) * stride + k) : V::zero();
        V::transpose(r);
        for (int i = 0; i < L; ++i) r[i].store(out + (k + i) * kWidth + lane0);
      }
  }
  if (rows == kWidth) {
    for (; k < cols; ++k)
#pragma GCC unroll 16
      for (int b = 0; b < kWidth; ++b) out[k * kWidth + b] = widen(x[b * stride + k]);
  } else {
    for (; k < cols; ++k)
      for (int b = 0; b < kWidth; ++b)
        out[k * kWidth + b] = b < rows ? widen(x[b * stride + k]) : 0;
  }
}

template <class S>
void prepare_few(const void* x_, int64_t stride, int64_t rows, int64_t cols, void* out_) {
  using V = typename ComputeOf<S>::Vector;
  const FewShape shape = few_shape<V>(rows);
  const S* x = static_cast<const S*>(x_);
  auto* out = static_cast<typename V::Scalar*>(out_);
  with_width<V>(shape.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    for (int64_t pass = 0; pass < shape.passes; ++pass) {
      const int64_t left = rows - pass * kWidth;
      transpose_few<S, kWidth>(x + pass * kWidth * stride, stride,
                               left < 0        ? 0
                               : left < kWidth ? left
                                               : kWidth,
                               cols, out + pass * kWidth * cols);
    }
  });
}

template <class S>
void multiply_few(const PackedView& w, const void* x, int64_t rows, const void* bias, void* y,
                  int64_t y_stride, int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  const FewShape shape = few_shape<V>(rows);
  with_width<V>(shape.width, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    multiply_width<S, kWidth>(w, x, kWidth, kWidth * w.cols, rows, static_cast<const S*>(bias),
                              static_cast<S*>(y), y_stride, begin, end);
  });
}

// ---- panels -------------------------------------------------------------------------------------

// The columns of two rows: those both use are loaded once.
struct Pair {
  uint64_t shared, longer, shorter;
  int shared_count, both_count, rest_count;  // of rest_count only the longer row has a column
  int longer_row, shorter_row;
};

template <class S, class V>
void expand_slice(const Bitmap<S>& w, const uint16_t* masks, int n, const S*& value,
                  Expanded<typename V::Scalar>* out) {
  constexpr int L = V::kLanes;
  uint16_t bits[kSteps];
  S tail[(kSteps + 1) * kGroup];
  const uint16_t* const next_masks = masks + n;
  if (n < kSteps) {
    __builtin_memset(bits, 0, sizeof bits);
    __builtin_memcpy(bits, masks, n * sizeof *masks);
    masks = bits;
  }
  const S* from = value;
  if (w.values_end - value < kSteps * kGroup) {
    copy_entries(value, w.values_end - value, tail);
    from = tail;
  }
  const S* const first = from;
  for (int k = 0; k < n; ++k) {
    const unsigned mask = read_mask(masks + k);
    V lanes[kParts<V>];
    expand_group(mask, from, lanes);
#pragma GCC unroll 16
    for (int p = 0; p < kParts<V>; ++p) lanes[p].store(out->values + k * kGroup + p * L);
    from += __builtin_popcount(mask);
  }
  value += from - first;
  prefetch(value, (from - first) * static_cast<int64_t>(sizeof(S)));
  prefetch(next_masks, kSteps * static_cast<int64_t>(sizeof(uint16_t)));
  transpose_masks(reinterpret_cast<const uint8_t*>(masks), out->rows);
}

inline void make_pairs(const uint64_t* rows, Pair* pairs) {
  for (int p = 0; p < kGroup / 2; ++p) {
    const uint64_t a = rows[2 * p], b = rows[2 * p + 1];
    const uint64_t shared = a & b, only_a = a & ~b, only_b = b & ~a;
    const int count_a = __builtin_popcountll(only_a), count_b = __builtin_popcountll(only_b);
    const bool swap = count_a < count_b;
    pairs[p] = {shared,
                swap ? only_b : only_a,
                swap ? only_a : only_b,
                __builtin_popcountll(shared),
                swap ? count_a : count_b,
                swap ? count_b - count_a : count_a - count_b,
                2 * p + swap,
                2 * p + !swap};
  }
}

// Few vectors: the columns that either row uses, one loop with one end to mispredict, two columns a
// time in sums of their own. Zeros cost less than the loops of multiply_pair.
constexpr int kUnionVectors = 3;

template <class V, int kVectors>
__attribute__((always_inline)) inline void multiply_union(uint64_t columns, int pairs,
                                                          const typename V::Scalar* values,
                                                          const typename V::Scalar* x,
                                                          typename V::Scalar* sums) {
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  V acc[2][2][kVectors];  // [column][row]
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      acc[0][r][v] = V::load(sums + r * kLanes + v * L);
      acc[1][r][v] = V::zero();
    }
  }
  const auto column = [&](V(&a)[2][kVectors], uint64_t k, const typename V::Scalar* xk)
      __attribute__((always_inline)) {
    const V w0 = V::broadcast(values[k * kGroup]), w1 = V::broadcast(values[k * kGroup + 1]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      V xv = V::load(xk + v * L);
      keep(xv);
      a[0][v] = V::fma(w0, xv, a[0][v]);
      a[1][v] = V::fma(w1, xv, a[1][v]);
    }
  };
  for (; pairs > 0; --pairs) {
    const uint64_t k = take_step(columns), l = take_step(columns);
    column(acc[0], k, x + k * kLanes);
    column(acc[1], l, x + l % kSteps * kLanes);  // there is no row kSteps of x
  }
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      V::add(acc[0][r][v], acc[1][r][v]).store(sums + r * kLanes + v * L);
}

// sums[row] += the pair's rows times x[k][lane], values[k][row].
template <class V, int kVectors>
__attribute__((always_inline)) inline void multiply_pair(const Pair& pair,
                                                         const typename V::Scalar* values,
                                                         const typename V::Scalar* x,
                                                         typename V::Scalar* sums) {
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  const auto* value_a = values + pair.longer_row;
  const auto* value_b = values + pair.shorter_row;
  V a[kVectors], b[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) a[v] = b[v] = V::zero();
  uint64_t shared = pair.shared, longer = pair.longer, shorter = pair.shorter;
  for (int n = pair.shared_count; n > 0; --n) {
    const uint64_t k = take_step(shared);
    const V wa = V::broadcast(value_a[k * kGroup]), wb = V::broadcast(value_b[k * kGroup]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      V xv = V::load(x + k * kLanes + v * L);
      keep(xv);
      a[v] = V::fma(wa, xv, a[v]);
      b[v] = V::fma(wb, xv, b[v]);
    }
  }
  for (int n = pair.both_count; n > 0; --n) {
    const uint64_t k = take_step(longer), l = take_step(shorter);
    const V wa = V::broadcast(value_a[k * kGroup]), wb = V::broadcast(value_b[l * kGroup]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) a[v] = V::fma(wa, V::load(x + k * kLanes + v * L), a[v]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) b[v] = V::fma(wb, V::load(x + l * kLanes + v * L), b[v]);
  }
  for (int n = pair.rest_count; n > 0; --n) {
    const uint64_t k = take_step(longer);
    const V wa = V::broadcast(value_a[k * kGroup]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) a[v] = V::fma(wa, V::load(x + k * kLanes + v * L), a[v]);
  }
  auto* sum_a = sums + pair.longer_row * kLanes;
  auto* sum_b = sums + pair.shorter_row * kLanes;
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) V::add(a[v], V::load(sum_a + v * L)).store(sum_a + v * L);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) V::add(b[v], V::load(sum_b + v * L)).store(sum_b + v * L);
}

// The same code for all stored types that are computed in V: never inlined.
template <class V, int kVectors>
__attribute__((noinline)) void multiply_slice(const Expanded<typename V::Scalar>& slice,
                                              const typename V::Scalar* x,
                                              typename V::Scalar* sums) {
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  if constexpr (kVectors <= kUnionVectors) {
    uint64_t columns[kGroup / 2];
    int pairs[kGroup / 2];
    for (int p = 0; p < kGroup / 2; ++p) {
      columns[p] = slice.rows[2 * p] | slice.rows[2 * p + 1];
      pairs[p] = (__builtin_popcountll(columns[p]) + 1) / 2;
    }
    for (int p = 0; p < kGroup / 2; ++p)
      multiply_union<V, kVectors>(columns[p], pairs[p], slice.values + 2 * p, x,
                                  sums + 2 * p * kLanes);
  } else {
    Pair pairs[kGroup / 2];
    make_pairs(slice.rows, pairs);
    for (const Pair& pair : pairs) multiply_pair<V, kVectors>(pair, slice.values, x, sums);
  }
}

template <class S, int kVectors>
__attribute__((noinline)) void multiply_panel(const PackedView& view, const void* panel_,
                                              int64_t rows, const S* bias, S* y, int64_t y_stride,
                                              int64_t begin, int64_t end, void* scratch) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  const Bitmap<S> w(view);
  const Scalar* panel = static_cast<const Scalar*>(panel_);
  Scalar* sums = static_cast<Scalar*>(scratch);
  auto* slice =
      reinterpret_cast<Expanded<Scalar>*>(static_cast<char*>(scratch) + block_bytes<V>(kVectors));
  for (int r = 0; r < kGroup; ++r) slice->values[kSteps * kGroup + r] = 0;
  for_blocks<S, kVectors>(
      rows, bias, y, y_stride, begin, end, sums,
      [&](int64_t first_group, int64_t groups, Scalar* block_sums) {
        const S* value[kBlockRows / kGroup];
        for (int64_t g = 0; g < groups; ++g) value[g] = w.group_values(first_group + g);
        for (int64_t k0 = 0; k0 < w.cols; k0 += kSteps) {
          const int n = w.cols - k0 < kSteps ? static_cast<int>(w.cols - k0) : kSteps;
          for (int64_t g = 0; g < groups; ++g) {
            expand_slice<S, V>(w, w.masks + (first_group + g) * w.cols + k0, n, value[g], slice);
            multiply_slice<V, kVectors>(*slice, panel + k0 * kLanes,
                                        block_sums + g * kGroup * kLanes);
          }
        }
      });
}

template <class S>
int64_t scratch_bytes(const PackedView&, int vectors) {
  using V = typename ComputeOf<S>::Vector;
  return block_bytes<V>(vectors) + static_cast<int64_t>(sizeof(Expanded<typename V::Scalar>));
}

// Where few of the weights are zero, up to two vectors are multiplied as small batches are, with
// whole passes of the widest kind and one for what is left. With 60 % zeros 17 rows take 0.73 of
// the time (AVX-512); with few registers passes are narrow, and it pays later.
constexpr double kDense = kRegisters == 32 ? 0.28 : 0.45;

template <class S>
void multiply_dense(const PackedView& w, const void* panel_, int64_t rows, int64_t lanes,
                    const S* bias, S* y, int64_t y_stride, int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  const auto* panel = static_cast<const typename V::Scalar*>(panel_);
  int64_t b = 0;
  while (b < rows) {
    const int64_t left = rows - b;
    const int width = left < most_width<V>() ? few_shape<V>(left).width : most_width<V>();
    // Columns are `lanes` apart: a pass that is wider than what is left would read the next one's.
    const int64_t fits = lanes - b < width ? lanes - b : width;
    with_width<V>(fits < width ? 1 : width, [&](auto constant) {
      constexpr int kWidth = decltype(constant)::value;
      multiply_width<S, kWidth>(w, panel + b, lanes, kWidth, left < kWidth ? left : kWidth, bias,
                                y + b * y_stride, y_stride, begin, end);
      b += kWidth;
    });
  }
}

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end, void* scratch) {
  using V = typename ComputeOf<S>::Vector;
  const double size = static_cast<double>(w.rows) * static_cast<double>(w.cols);
  if (vectors <= 2 && static_cast<double>(w.nonzeros) > kDense * size)
    return multiply_dense<S>(w, panel, rows, static_cast<int64_t>(vectors) * V::kLanes,
                             static_cast<const S*>(bias), static_cast<S*>(y), y_stride, begin, end);
  with_vectors<kMostVectors>(vectors, [&](auto constant) {
    multiply_panel<S, decltype(constant)::value>(w, panel, rows, static_cast<const S*>(bias),
                                                 static_cast<S*>(y), y_stride, begin, end, scratch);
  });
}

template <class S>
constexpr Kernel make_kernel(const VectorOps* ops) {
  // With 16 registers two vectors of a panel are faster than so many passes over the weight (AVX2,
  // 16 rows: 1.3x at 70 % zeros, 2x at 90 %).
  constexpr int kFew = kRegisters == 32 ? kMaxFew : 8;
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

}  // namespace bitmap
}  // namespace FXSPARSE_ISA_NAMESPACE

FXSPARSE_DEFINE_KERNELS(bitmap)

}  // namespace fxsparse
