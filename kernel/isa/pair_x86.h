#pragma once

// The two rows of a pair as one vector, for a single batch row. Included after a vector wrapper.

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

// Two sums, or what is multiplied for them.
struct TwoF32 {
  __m128 v;

  static TwoF32 zero() { return {_mm_setzero_ps()}; }
  static TwoF32 load(const float* p) {
    return {_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  static TwoF32 load(const BFloat16* p) {
    int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_cvtsi32_si128(bits)))};
  }
  static TwoF32 load(const Float16* p) {
    int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return {_mm_cvtph_ps(_mm_cvtsi32_si128(bits))};
  }
  static TwoF32 both(const float* p) { return {_mm_set1_ps(*p)}; }
  static TwoF32 of(const float* a, const float* b) {
    return {_mm_insert_ps(_mm_load_ss(a), _mm_load_ss(b), 0x10)};
  }
  void store(float* a, float* b) const {
    _mm_store_ss(a, v);
    _mm_store_ss(b, _mm_movehdup_ps(v));
  }
  static TwoF32 add(TwoF32 a, TwoF32 b) { return {_mm_add_ps(a.v, b.v)}; }
  static TwoF32 fma(TwoF32 a, TwoF32 b, TwoF32 c) { return {_mm_fmadd_ps(a.v, b.v, c.v)}; }
};

struct TwoF64 {
  __m128d v;

  static TwoF64 zero() { return {_mm_setzero_pd()}; }
  static TwoF64 load(const double* p) { return {_mm_loadu_pd(p)}; }
  static TwoF64 both(const double* p) { return {_mm_set1_pd(*p)}; }
  static TwoF64 of(const double* a, const double* b) { return {_mm_loadh_pd(_mm_load_sd(a), b)}; }
  void store(double* a, double* b) const {
    _mm_storel_pd(a, v);
    _mm_storeh_pd(b, v);
  }
  static TwoF64 add(TwoF64 a, TwoF64 b) { return {_mm_add_pd(a.v, b.v)}; }
  static TwoF64 fma(TwoF64 a, TwoF64 b, TwoF64 c) { return {_mm_fmadd_pd(a.v, b.v, c.v)}; }
};

template <class Scalar>
struct TwoOf {
  using Type = TwoF32;
};
template <>
struct TwoOf<double> {
  using Type = TwoF64;
};

}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
