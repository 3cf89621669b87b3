// What the kernels of every format need besides their own multiplication: x to panels and back, and
// tiles of results to rows of y. Included like csr_kernel.h, after a vector wrapper.

#include "isa/kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

// The vector type a stored type is computed in.
template <class S>
struct ComputeOf {
  using Vector = F32;
};
template <>
struct ComputeOf<double> {
  using Vector = F64;
};

// Sections of a blob may start at any address.
template <class T>
inline T read(const T* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

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
void widen_all(const void* x, int64_t n, void* out) {
  using V = typename ComputeOf<S>::Vector;
  const S* from = static_cast<const S*>(x);
  auto* to = static_cast<typename V::Scalar*>(out);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::load(from + i).store(to + i);
  for (; i < n; ++i) to[i] = widen(from[i]);
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

// tile[r][lane] of up to kRowGroup rows of W, transposed into rows of y. The arithmetic is over:
// whole and partial tiles move the same bits.
template <class S, class V>
inline void store_tile(const typename V::Scalar* tile, int n, int64_t lanes, int64_t rows, S* y,
                       int64_t y_stride) {
  constexpr int L = V::kLanes;
  for (int64_t lane0 = 0; lane0 < rows; lane0 += L) {
    const int b_end = rows - lane0 < L ? static_cast<int>(rows - lane0) : L;
    int r = 0;
    for (; r + L <= n; r += L) {
      V t[L];
      for (int i = 0; i < L; ++i) t[i] = V::load(tile + (r + i) * lanes + lane0);
      V::transpose(t);
      for (int b = 0; b < L; ++b)
        if (b < b_end) t[b].store(y + (lane0 + b) * y_stride + r);
    }
    for (; r < n; ++r)
      for (int b = 0; b < b_end; ++b)
        narrow(tile[r * lanes + lane0 + b], y + (lane0 + b) * y_stride + r);
  }
}

}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
