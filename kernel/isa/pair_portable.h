#pragma once

// The two rows of a pair, for a single batch row. Included after a vector wrapper.

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

// Two sums, or what is multiplied for them.
template <class V>
struct TwoScalars {
  using Scalar = typename V::Scalar;
  Scalar a, b;

  static TwoScalars zero() { return {0, 0}; }
  template <class S>
  static TwoScalars load(const S* p) {
    S stored[2];
    __builtin_memcpy(stored, p, sizeof stored);
    return {widen(stored[0]), widen(stored[1])};
  }
  static TwoScalars both(const Scalar* p) { return {*p, *p}; }
  static TwoScalars of(const Scalar* a, const Scalar* b) { return {*a, *b}; }
  void store(Scalar* to_a, Scalar* to_b) const {
    *to_a = a;
    *to_b = b;
  }
  static TwoScalars add(TwoScalars a, TwoScalars b) { return {a.a + b.a, a.b + b.b}; }
  static TwoScalars fma(TwoScalars a, TwoScalars b, TwoScalars c) {
    return {V::fma(a.a, b.a, c.a), V::fma(a.b, b.b, c.b)};
  }
};

template <class Scalar>
struct TwoOf {
  using Type = TwoScalars<F32>;
};
template <>
struct TwoOf<double> {
  using Type = TwoScalars<F64>;
};

}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
