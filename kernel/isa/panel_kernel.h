// What the kernels of every format need besides their own multiplication. Included like
// csr_kernel.h, after a vector wrapper.

#pragma once

#include "isa/kernel.h"

#define FXSPARSE_JOIN2(a, b) a##b
#define FXSPARSE_JOIN(a, b) FXSPARSE_JOIN2(a, b)

// Defines the kernels of a format, one a value type, from make_kernel<S>(ops) of its namespace: in
// the namespace fxsparse, at the end of a file. A constant: no code of the file runs before
// dispatch chose it.
#define FXSPARSE_OPS FXSPARSE_JOIN(vector_ops_, FXSPARSE_ISA_NAMESPACE)
#define FXSPARSE_DEFINE_KERNELS(format)                                              \
  extern const Kernel FXSPARSE_JOIN(format##_, FXSPARSE_ISA_NAMESPACE)[kValueTypes]; \
  constexpr Kernel FXSPARSE_JOIN(format##_, FXSPARSE_ISA_NAMESPACE)[kValueTypes] = { \
      FXSPARSE_ISA_NAMESPACE::format::make_kernel<float>(&FXSPARSE_OPS[0]),          \
      FXSPARSE_ISA_NAMESPACE::format::make_kernel<double>(&FXSPARSE_OPS[1]),         \
      FXSPARSE_ISA_NAMESPACE::format::make_kernel<BFloat16>(&FXSPARSE_OPS[2]),       \
      FXSPARSE_ISA_NAMESPACE::format::make_kernel<Float16>(&FXSPARSE_OPS[3]),        \
  };

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

// multiply_few of a format that takes a single row of x, widened.
template <class S>
int64_t widened_bytes(int64_t, int64_t cols) {
  using Scalar = typename ComputeOf<S>::Vector::Scalar;
  return sizeof(S) == sizeof(Scalar) ? 0 : cols * static_cast<int64_t>(sizeof(Scalar));
}

template <class S>
void prepare_widened(const void* x, int64_t, int64_t, int64_t cols, void* out) {
  widen_all<S>(x, cols, out);
}

inline int64_t read_offset(const uint8_t* section, Width width, int64_t i) {
  if (width == Width::k64)
    return static_cast<int64_t>(read(reinterpret_cast<const uint64_t*>(section) + i));
  return read(reinterpret_cast<const uint32_t*>(section) + i);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};
// Calls f(constant of vectors) with the instantiation for a panel of at most kMost vectors. What f
// calls must not be inlined: among its siblings it gets fewer registers (pairs: 1.1x the time).
template <int kMost, class F>
inline void with_vectors(int vectors, F&& f) {
  const auto call = [&](auto constant) {
    if constexpr (constant.value <= kMost) f(constant);
  };
  switch (vectors) {
    case 1:
      return call(Constant<1>());
    case 2:
      return call(Constant<2>());
    case 3:
      return call(Constant<3>());
    case 4:
      return call(Constant<4>());
    case 5:
      return call(Constant<5>());
    case 6:
      return call(Constant<6>());
    case 7:
      return call(Constant<7>());
    default:
      return call(Constant<8>());
  }
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
