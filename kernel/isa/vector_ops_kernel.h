// The VectorOps of an instruction set: x to panels and back, conversions, the transposed product,
// activations.
// Included like csr_kernel.h, after a vector wrapper.

#include "isa/activations_kernel.h"
#include "isa/csr_rows.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

template <class S>
void pack(const void* x_, int64_t stride, int64_t rows, int64_t cols, int vectors, void* panel_) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int L = V::kLanes;
  const int64_t lanes = static_cast<int64_t>(vectors) * L;
  for (int v = 0; v < vectors; ++v) {
    const int64_t lane0 = static_cast<int64_t>(v) * L;
    const int64_t left = rows - lane0;
    const int n = left < 0 ? 0 : left < L ? static_cast<int>(left) : L;
    const S* x = static_cast<const S*>(x_) + lane0 * stride;
    auto* panel = static_cast<typename V::Scalar*>(panel_) + lane0;
    int64_t k = 0;
    for (; k + L <= cols; k += L) {
      V r[L];
      for (int i = 0; i < L; ++i) r[i] = i < n ? V::load(x + i * stride + k) : V::zero();
      V::transpose(r);
      for (int i = 0; i < L; ++i) r[i].store(panel + (k + i) * lanes);
    }
    for (; k < cols; ++k)
      for (int i = 0; i < L; ++i) panel[k * lanes + i] = i < n ? widen(x[i * stride + k]) : 0;
  }
}

template <class S>
void unpack(const void* panel_, int64_t rows, int64_t cols, int vectors, void* y_, int64_t stride) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int L = V::kLanes;
  const int64_t lanes = static_cast<int64_t>(vectors) * L;
  for (int64_t lane0 = 0; lane0 < rows; lane0 += L) {
    const int n = rows - lane0 < L ? static_cast<int>(rows - lane0) : L;
    S* y = static_cast<S*>(y_) + lane0 * stride;
    const auto* panel = static_cast<const typename V::Scalar*>(panel_) + lane0;
    int64_t k = 0;
    for (; k + L <= cols; k += L) {
      V r[L];
      for (int i = 0; i < L; ++i) r[i] = V::load(panel + (k + i) * lanes);
      V::transpose(r);
      for (int i = 0; i < L; ++i)
        if (i < n) r[i].store(y + i * stride + k);
    }
    for (; k < cols; ++k)
      for (int i = 0; i < n; ++i) narrow(panel[k * lanes + i], y + i * stride + k);
  }
}

template <class S>
void narrow_all(const void* x, int64_t n, void* out) {
  using V = typename ComputeOf<S>::Vector;
  const auto* from = static_cast<const typename V::Scalar*>(x);
  S* to = static_cast<S*>(out);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::load(from + i).store(to + i);
  for (; i < n; ++i) narrow(from[i], to + i);
}

// An exponent of all ones is Inf or NaN. Compared as integers: no flag is raised, no mode matters.
template <class Bits, Bits kExponent>
bool all_finite(const void* x, int64_t n) {
  const Bits* bits = static_cast<const Bits*>(x);
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (bits[i] & kExponent) == kExponent;
  return bad == 0;
}

// ---- the transposed product ---------------------------------------------------------------------

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
__attribute__((noinline)) void scatter_rows(const PackedView& w, const void* panel_, void* out_,
                                            int64_t begin, int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  const Csr<S, Index> csr(w);
  const Scalar* panel = static_cast<const Scalar*>(panel_);
  Scalar* out = static_cast<Scalar*>(out_);
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
  with_vectors<kScatterVectors>(vectors, [&](auto constant) {
    scatter_rows<S, Index, decltype(constant)::value>(w, panel, out, begin, end);
  });
}

template <class S, class Index>
void scatter_one_indexed(const PackedView& w, const void* g_, void* out_, int64_t begin,
                         int64_t end) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  const Csr<S, Index> csr(w);
  const Scalar* g = static_cast<const Scalar*>(g_);
  Scalar* out = static_cast<Scalar*>(out_);
  for_entries(w, csr, begin, end, [&](int64_t row, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Scalar* o = out + (static_cast<int64_t>(read(csr.indices + i)) - begin);
      *o = V::fma(widen(read(csr.values + i)), g[row], *o);
    }
  });
}

// ---- the table ----------------------------------------------------------------------------------

template <class S>
void scatter(const PackedView& w, const void* panel, int vectors, void* out, int64_t begin,
             int64_t end) {
  FXSPARSE_BY_INDEX(scatter_indexed, w, panel, vectors, out, begin, end)
}

template <class S>
void scatter_one(const PackedView& w, const void* g, void* out, int64_t begin, int64_t end) {
  FXSPARSE_BY_INDEX(scatter_one_indexed, w, g, out, begin, end)
}

template <class S, class Bits, Bits kExponent>
constexpr VectorOps make_ops() {
  using V = typename ComputeOf<S>::Vector;
  return {V::kLanes,
          sizeof(typename V::Scalar),
          pack<S>,
          unpack<S>,
          all_finite<Bits, kExponent>,
          widen_all<S>,
          narrow_all<S>,
          scatter<S>,
          scatter_one<S>,
#define FXSPARSE_ACTIVATION(name) activations::activate<S, activations::name>,
          {
#include "isa/activations.inc"
          },
#undef FXSPARSE_ACTIVATION
          activations::add<S>,
          activations::multiply<S>};
}

}  // namespace FXSPARSE_ISA_NAMESPACE

// A constant: no code of this file runs before dispatch chose it.
constexpr VectorOps FXSPARSE_JOIN(vector_ops_, FXSPARSE_ISA_NAMESPACE)[kValueTypes] = {
    FXSPARSE_ISA_NAMESPACE::make_ops<float, uint32_t, 0x7f800000u>(),
    FXSPARSE_ISA_NAMESPACE::make_ops<double, uint64_t, 0x7ff0000000000000u>(),
    FXSPARSE_ISA_NAMESPACE::make_ops<BFloat16, uint16_t, 0x7f80u>(),
    FXSPARSE_ISA_NAMESPACE::make_ops<Float16, uint16_t, 0x7c00u>(),
};

}  // namespace fxsparse
