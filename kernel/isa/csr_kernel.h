// The CSR micro-kernels, once for all instruction sets and value types. A csr_<isa>.cpp defines
// FXSPARSE_ISA_NAMESPACE and includes its vector wrapper (F32, F64) before this. Everything lives
// in that namespace and no inline function of the standard library is used: two objects compiled
// for different instruction sets must not define the same symbol, or the linker keeps one of them
// and a CPU without AVX-512 runs into its code.

#include "isa/kernel.h"
#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

template <class S, class Index>
struct Csr {
  const uint8_t* offsets;
  const Index* indices;
  const S* values;
  bool wide;

  explicit Csr(const PackedView& w)
      : offsets(w.section[0]),
        indices(reinterpret_cast<const Index*>(w.section[1])),
        values(reinterpret_cast<const S*>(w.section[2])),
        wide(w.offset_width == Width::k64) {}

  int64_t offset(int64_t row) const {
    if (wide) return static_cast<int64_t>(read(reinterpret_cast<const uint64_t*>(offsets) + row));
    return read(reinterpret_cast<const uint32_t*>(offsets) + row);
  }
};

// ---- forward ------------------------------------------------------------------------------------

// `vectors` accumulators times the unrolling over nonzeros: 8 independent chains hide the latency
// of 4 cycles at two FMAs a cycle.
constexpr int unroll_of(int vectors) { return vectors == 1 ? 8 : vectors == 2 ? 4 : 2; }

template <class S, class Index, int kVectors>
void multiply_rows(const PackedView& w, const void* panel_, int64_t rows, const void* bias_,
                   void* y_, int64_t y_stride, int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  constexpr int U = unroll_of(kVectors);
  const Csr<S, Index> csr(w);
  const Scalar* panel = static_cast<const Scalar*>(panel_);
  const S* bias = static_cast<const S*>(bias_);
  S* y = static_cast<S*>(y_);
  alignas(64) Scalar tile[kRowGroup * kLanes];

  int64_t i = csr.offset(begin);
  for (int64_t group = begin; group < end; group += kRowGroup) {
    const int n = end - group < kRowGroup ? static_cast<int>(end - group) : kRowGroup;
    for (int r = 0; r < n; ++r) {
      const int64_t last = csr.offset(group + r + 1);
      V acc[U][kVectors];
      for (int u = 0; u < U; ++u)
        for (int v = 0; v < kVectors; ++v) acc[u][v] = V::zero();
      const auto step = [&](V * a, int64_t at) __attribute__((always_inline)) {
        const V weight = V::broadcast(widen(read(csr.values + at)));
        const Scalar* x = panel + static_cast<uint64_t>(read(csr.indices + at)) * kLanes;
        for (int v = 0; v < kVectors; ++v) a[v] = V::fma(weight, V::load(x + v * L), a[v]);
      };
      for (; i + U <= last; i += U)
        for (int u = 0; u < U; ++u) step(acc[u], i + u);
      for (; i < last; ++i) step(acc[0], i);
      const Scalar b = bias ? widen(bias[group + r]) : 0;
      for (int v = 0; v < kVectors; ++v) {
        for (int half = U / 2; half > 0; half /= 2)
          for (int u = 0; u < half; ++u) acc[u][v] = V::add(acc[u][v], acc[u + half][v]);
        V::add(acc[0][v], V::broadcast(b)).store(tile + r * kLanes + v * L);
      }
    }
    store_tile<S, V>(tile, n, kLanes, rows, y + group, y_stride);
  }
}

template <class S, class Index>
void multiply_indexed(const PackedView& w, const void* panel, int64_t rows, int vectors,
                      const void* bias, void* y, int64_t y_stride, int64_t begin, int64_t end) {
  switch (vectors) {
    case 1:
      return multiply_rows<S, Index, 1>(w, panel, rows, bias, y, y_stride, begin, end);
    case 2:
      return multiply_rows<S, Index, 2>(w, panel, rows, bias, y, y_stride, begin, end);
    case 3:
      return multiply_rows<S, Index, 3>(w, panel, rows, bias, y, y_stride, begin, end);
    default:
      return multiply_rows<S, Index, 4>(w, panel, rows, bias, y, y_stride, begin, end);
  }
}

// One row of x: whole vectors of entries, x gathered lane by lane. A masked last vector instead of
// the scalar tail was 5-15 % slower (AVX2, 77 entries a row).
template <class S, class Index>
void multiply_one_indexed(const PackedView& w, const void* x_, const void* bias_, void* y_,
                          int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  const Csr<S, Index> csr(w);
  const Scalar* x = static_cast<const Scalar*>(x_);
  const S* bias = static_cast<const S*>(bias_);
  S* y = static_cast<S*>(y_);
  int64_t i = csr.offset(begin);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t last = csr.offset(row + 1);
    V acc0 = V::zero(), acc1 = V::zero();
    for (; i + 2 * L <= last; i += 2 * L) {
      acc0 = V::fma(V::load(csr.values + i), V::gather(x, csr.indices + i), acc0);
      acc1 = V::fma(V::load(csr.values + i + L), V::gather(x, csr.indices + i + L), acc1);
    }
    if (i + L <= last) {
      acc0 = V::fma(V::load(csr.values + i), V::gather(x, csr.indices + i), acc0);
      i += L;
    }
    Scalar tail = 0;
    for (; i < last; ++i)
      tail = V::fma(widen(read(csr.values + i)), x[read(csr.indices + i)], tail);
    const Scalar b = bias ? widen(bias[row]) : 0;
    narrow(V::add(acc0, acc1).sum() + tail + b, y + row);
  }
}

// ---- transposed ---------------------------------------------------------------------------------

// The first entry of a row in [first, last) whose column is not below `column`. Columns are spread
// evenly often enough that a guess and a few steps beat a binary search, whose jumps over the row
// made two threads 10x slower than one at 4096 x 4096.
template <class Index>
inline int64_t seek(const Index* indices, int64_t first, int64_t last, int64_t column,
                    int64_t cols) {
  int64_t i = first + static_cast<int64_t>(static_cast<double>(last - first) * column / cols);
  while (i > first && static_cast<int64_t>(read(indices + i - 1)) >= column) --i;
  while (i < last && static_cast<int64_t>(read(indices + i)) < column) ++i;
  return i;
}

// Calls f(row, first entry, last entry) for every row's entries within the columns [begin, end).
template <class S, class Index, class F>
inline void for_entries(const PackedView& w, const Csr<S, Index>& csr, int64_t begin, int64_t end,
                        F&& f) {
  int64_t next = csr.offset(0);
  for (int64_t row = 0; row < w.rows; ++row) {
    const int64_t row_begin = next, row_end = next = csr.offset(row + 1);
    int64_t first = row_begin, last = row_end;
    if (begin > 0) first = seek(csr.indices, row_begin, row_end, begin, w.cols);
    if (end < w.cols) last = seek(csr.indices, row_begin, row_end, end, w.cols);
    f(row, first, last);
  }
}

template <class S, class Index, int kVectors>
void scatter_rows(const PackedView& w, const void* panel_, void* out_, int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  const Csr<S, Index> csr(w);
  const Scalar* panel = static_cast<const Scalar*>(panel_);
  Scalar* out = static_cast<Scalar*>(out_);
  for (int64_t i = 0; i < (end - begin) * kLanes; ++i) out[i] = 0;
  for_entries(w, csr, begin, end, [&](int64_t row, int64_t first, int64_t last) {
    V g[kVectors];
    for (int v = 0; v < kVectors; ++v) g[v] = V::load(panel + row * kLanes + v * L);
    for (int64_t i = first; i < last; ++i) {
      const V weight = V::broadcast(widen(read(csr.values + i)));
      Scalar* o = out + (static_cast<int64_t>(read(csr.indices + i)) - begin) * kLanes;
      for (int v = 0; v < kVectors; ++v) V::fma(weight, g[v], V::load(o + v * L)).store(o + v * L);
    }
  });
}

template <class S, class Index>
void scatter_indexed(const PackedView& w, const void* panel, int vectors, void* out, int64_t begin,
                     int64_t end) {
  switch (vectors) {
    case 1:
      return scatter_rows<S, Index, 1>(w, panel, out, begin, end);
    case 2:
      return scatter_rows<S, Index, 2>(w, panel, out, begin, end);
    case 3:
      return scatter_rows<S, Index, 3>(w, panel, out, begin, end);
    default:
      return scatter_rows<S, Index, 4>(w, panel, out, begin, end);
  }
}

template <class S, class Index>
void scatter_one_indexed(const PackedView& w, const void* g_, void* out_, int64_t begin,
                         int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  const Csr<S, Index> csr(w);
  const Scalar* g = static_cast<const Scalar*>(g_);
  Scalar* out = static_cast<Scalar*>(out_);
  for (int64_t i = 0; i < end - begin; ++i) out[i] = 0;
  for_entries(w, csr, begin, end, [&](int64_t row, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Scalar* o = out + (static_cast<int64_t>(read(csr.indices + i)) - begin);
      *o = V::fma(widen(read(csr.values + i)), g[row], *o);
    }
  });
}

// ---- the table entries --------------------------------------------------------------------------

// Picks the instantiation for the blob's index width.
#define FXSPARSE_BY_INDEX(function, w, ...)           \
  switch ((w).index_width) {                          \
    case Width::k8:                                   \
      return function<S, uint8_t>((w), __VA_ARGS__);  \
    case Width::k16:                                  \
      return function<S, uint16_t>((w), __VA_ARGS__); \
    default:                                          \
      return function<S, uint32_t>((w), __VA_ARGS__); \
  }

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end) {
  FXSPARSE_BY_INDEX(multiply_indexed, w, panel, rows, vectors, bias, y, y_stride, begin, end)
}

template <class S>
void multiply_one(const PackedView& w, const void* x, const void* bias, void* y, int64_t begin,
                  int64_t end) {
  FXSPARSE_BY_INDEX(multiply_one_indexed, w, x, bias, y, begin, end)
}

template <class S>
void multiply_transposed(const PackedView& w, const void* panel, int vectors, void* out,
                         int64_t begin, int64_t end) {
  FXSPARSE_BY_INDEX(scatter_indexed, w, panel, vectors, out, begin, end)
}

template <class S>
void multiply_transposed_one(const PackedView& w, const void* g, void* out, int64_t begin,
                             int64_t end) {
  FXSPARSE_BY_INDEX(scatter_one_indexed, w, g, out, begin, end)
}

#undef FXSPARSE_BY_INDEX

template <class S, class Bits, Bits kExponent>
constexpr Kernel make_kernel() {
  using V = typename ComputeOf<S>::Vector;
  return {V::kLanes,
          sizeof(typename V::Scalar),
          kPanelBytes,
          pack<S>,
          unpack<S>,
          all_finite<Bits, kExponent>,
          multiply<S>,
          multiply_one<S>,
          multiply_transposed<S>,
          multiply_transposed_one<S>,
          widen_all<S>,
          narrow_all<S>};
}

}  // namespace FXSPARSE_ISA_NAMESPACE

// In the order of ValueType. A constant: no code of this file runs before dispatch chose it.
#define FXSPARSE_JOIN2(a, b) a##b
#define FXSPARSE_JOIN(a, b) FXSPARSE_JOIN2(a, b)
extern const Kernel FXSPARSE_JOIN(csr_, FXSPARSE_ISA_NAMESPACE)[kValueTypes];
constexpr Kernel FXSPARSE_JOIN(csr_, FXSPARSE_ISA_NAMESPACE)[kValueTypes] = {
    FXSPARSE_ISA_NAMESPACE::make_kernel<float, uint32_t, 0x7f800000u>(),
    FXSPARSE_ISA_NAMESPACE::make_kernel<double, uint64_t, 0x7ff0000000000000u>(),
    FXSPARSE_ISA_NAMESPACE::make_kernel<BFloat16, uint16_t, 0x7f80u>(),
    FXSPARSE_ISA_NAMESPACE::make_kernel<Float16, uint16_t, 0x7c00u>(),
};

}  // namespace fxsparse
