// What the kernels of every format need besides their own multiplication. Included like
// csr_kernel.h, after a vector wrapper.

#pragma once

#include "isa/kernel.h"

#define FXSPARSE_JOIN2(a, b) a##b
#define FXSPARSE_JOIN(a, b) FXSPARSE_JOIN2(a, b)

namespace fxsparse {

// In the order of ValueType, as every table of kernels.
extern const VectorOps FXSPARSE_JOIN(vector_ops_, FXSPARSE_ISA_NAMESPACE)[kValueTypes];

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
void widen_all(const void* x, int64_t n, void* out) {
  using V = typename ComputeOf<S>::Vector;
  const S* from = static_cast<const S*>(x);
  auto* to = static_cast<typename V::Scalar*>(out);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::load(from + i).store(to + i);
  for (; i < n; ++i) to[i] = widen(from[i]);
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
