#pragma once

// Vectors of the compiler's own, 128 bits wide: any CPU of the architecture runs them. Also the
// oracle the other instruction sets are compared with.

#include "isa/kernel.h"

namespace fxsparse {
namespace generic {

// x86-64's smallest L2 of the last decade; measured together with the AVX2 value.
constexpr int64_t kPanelBytes = 256 << 10;

// Of rows in pairs: 2 x 4 sums, 2 weights and a few values of x fill the registers.
constexpr int kPairVectors = 4;
constexpr int64_t kPairPanelBytes = 4 << 20;

#include "isa/half.h"

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return widen_portable(x); }
inline float widen(Float16 x) { return widen_portable(x); }
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, BFloat16* out) { *out = narrow_portable_bf16(x); }
inline void narrow(float x, Float16* out) { *out = narrow_portable_f16(x); }

template <class T, int N>
struct Vec {
  using Scalar = T;
  static constexpr int kLanes = N;
  typedef T Raw __attribute__((vector_size(N * sizeof(T))));
  Raw v;

  static Vec zero() { return {Raw{}}; }
  static Vec broadcast(T x) { return {Raw{} + x}; }
  static Vec load(const T* p) {
    Vec r;
    __builtin_memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  template <class S>
  static Vec load(const S* p) {
    Vec r;
    for (int i = 0; i < N; ++i) {
      S stored;
      __builtin_memcpy(&stored, p + i, sizeof stored);
      r.v[i] = widen(stored);
    }
    return r;
  }
  void store(T* p) const { __builtin_memcpy(p, &v, sizeof v); }
  template <class S>
  void store(S* p) const {
    for (int i = 0; i < N; ++i) narrow(v[i], p + i);
  }
  void pin() {}
  static Vec add(Vec a, Vec b) { return {a.v + b.v}; }
  static Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
  static Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
  static Vec div(Vec a, Vec b) { return {a.v / b.v}; }
  // b where one is NaN or both are zero.
  static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
  static Vec abs(Vec a) {
    for (int i = 0; i < N; ++i) a.v[i] = bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffu);
    return a;
  }
  // a where x < 0, else b.
  static Vec where_negative(Vec x, Vec a, Vec b) { return {x.v < Raw{} ? a.v : b.v}; }
  // 2^n for the integer n of -127 (which gives 0) to 128 (infinity) in the low bits of x.
  static Vec power_of_two(Vec x) {
    for (int i = 0; i < N; ++i)
      x.v[i] = bits_to_float((float_to_bits(x.v[i]) << 23) + (127u << 23));
    return x;
  }
  static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
  static T fma(T a, T b, T c) { return a * b + c; }
  T sum() const {
    T total = v[0];
    for (int i = 1; i < N; ++i) total += v[i];
    return total;
  }
  template <class Index>
  static Vec gather(const T* x, const Index* indices) {
    Vec r;
    for (int i = 0; i < N; ++i) {
      Index index;
      __builtin_memcpy(&index, indices + i, sizeof index);
      r.v[i] = x[index];
    }
    return r;
  }
  static void transpose(Vec* r) {
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < i; ++j) {
        const T t = r[i].v[j];
        r[i].v[j] = r[j].v[i];
        r[j].v[i] = t;
      }
  }
};

using F32 = Vec<float, 4>;
using F64 = Vec<double, 2>;

}  // namespace generic
}  // namespace fxsparse
