// The CSR micro-kernels, once for all instruction sets and value types. A csr_<isa>.cpp defines
// FXSPARSE_ISA_NAMESPACE and includes its vector wrapper (F32, F64) before this. Everything lives
// in that namespace and no inline function of the standard library is used: two objects compiled
// for different instruction sets must not define the same symbol, or the linker keeps one of them
// and a CPU without AVX-512 runs into its code.

#include "isa/csr_rows.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {
namespace csr {

constexpr int kMostVectors = 4;  // of two accumulators each; 8 leave too few registers

// ---- forward ------------------------------------------------------------------------------------

// `vectors` accumulators times the unrolling over nonzeros: 8 independent chains hide the latency
// of 4 cycles at two FMAs a cycle.
constexpr int unroll_of(int vectors) { return vectors == 1 ? 8 : vectors == 2 ? 4 : 2; }

template <class S, class Index, int kVectors>
__attribute__((noinline)) void multiply_rows(const PackedView& w, const void* panel_, int64_t rows,
                                             const void* bias_, void* y_, int64_t y_stride,
                                             int64_t begin, int64_t end) {
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
  with_vectors<kMostVectors>(vectors, [&](auto constant) {
    multiply_rows<S, Index, decltype(constant)::value>(w, panel, rows, bias, y, y_stride, begin,
                                                       end);
  });
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

// ---- the table entries --------------------------------------------------------------------------

inline int64_t scratch_bytes(const PackedView&, int) { return 0; }

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end, void*) {
  FXSPARSE_BY_INDEX(multiply_indexed, w, panel, rows, vectors, bias, y, y_stride, begin, end)
}

template <class S>
void multiply_few(const PackedView& w, const void* x, int64_t, const void* bias, void* y, int64_t,
                  int64_t begin, int64_t end) {
  FXSPARSE_BY_INDEX(multiply_one_indexed, w, x, bias, y, begin, end)
}

template <class S>
constexpr Kernel make_kernel(const VectorOps* ops) {
  return {ops,
          kMostVectors,
          kPanelBytes,
          1,
          1,
          widened_bytes<S>,
          prepare_widened<S>,
          multiply_few<S>,
          scratch_bytes,
          multiply<S>};
}

}  // namespace csr
}  // namespace FXSPARSE_ISA_NAMESPACE

FXSPARSE_DEFINE_KERNELS(csr)

}  // namespace fxsparse
