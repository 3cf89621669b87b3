#pragma once

// 512-bit vectors: AVX-512 F, BW, DQ, VL.

// The tests run this file on CPUs without AVX-512 by naming a header that emulates the intrinsics.
#ifdef FXSPARSE_AVX512_HEADER
#include FXSPARSE_AVX512_HEADER
// An emulated vector fits no register.
#define FXSPARSE_PIN(v)
#else
#include <immintrin.h>
#define FXSPARSE_PIN(v) asm("" : "+v"(v))
#endif

#include "isa/kernel.h"

namespace fxsparse {
namespace avx512 {

// Not measured (no such CPU at hand): half of the 512 KB of L2 that Zen 4 and Skylake-X exceed.
constexpr int64_t kPanelBytes = 256 << 10;

// Of rows in pairs: 2 x 8 sums, 2 weights and a few values of x fill the registers.
constexpr int kPairVectors = 8;
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

struct F32 {
  using Scalar = float;
  static constexpr int kLanes = 16;
  __m512 v;

  static F32 zero() { return {_mm512_setzero_ps()}; }
  static F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F32 load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  static F32 load(const Float16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(BFloat16* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(top, _mm512_set1_epi32(0x40));
    const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(even, 16), nan, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
  void store(Float16* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Keeps the value in a register: the compiler would rather load it again for each use.
  void pin() { FXSPARSE_PIN(v); }
  static F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
  static F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
  // b where one is NaN or both are zero.
  static F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static F32 abs(F32 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    return {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)))};
  }
  // a where x < 0, else b.
  static F32 where_negative(F32 x, F32 a, F32 b) {
    const __mmask16 negative = _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_LT_OQ);
    return {_mm512_mask_mov_ps(b.v, negative, a.v)};
  }
  // 2^n for the integer n of -127 (which gives 0) to 128 (infinity) in the low bits of x.
  static F32 power_of_two(F32 x) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(x.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)))};
  }
  static F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  // Halves are added until one lane is left; spelled out because the compiler's own reduction is a
  // function of its headers, not of this namespace.
  float sum() const {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), high);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  template <class Index>
  static F32 gather(const float* x, const Index* indices) {
    Index i[16];
    __builtin_memcpy(i, indices, sizeof i);
    const auto four = [x](const Index* j) __attribute__((always_inline)) {
      __m128 r = _mm_load_ss(x + j[0]);
      r = _mm_insert_ps(r, _mm_load_ss(x + j[1]), 0x10);
      r = _mm_insert_ps(r, _mm_load_ss(x + j[2]), 0x20);
      return _mm_insert_ps(r, _mm_load_ss(x + j[3]), 0x30);
    };
    __m512 r = _mm512_castps128_ps512(four(i));
    r = _mm512_insertf32x4(r, four(i + 4), 1);
    r = _mm512_insertf32x4(r, four(i + 8), 2);
    return {_mm512_insertf32x4(r, four(i + 12), 3)};
  }
  // 16 x 16: pairs and quads within 128 bits, then 128-bit blocks across.
  static void transpose(F32* r) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
      a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
      a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
      b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
      b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      const __m512 c0 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
      const __m512 c1 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
      const __m512 c2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
      const __m512 c3 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
      r[i].v = _mm512_shuffle_f32x4(c0, c2, 0x88);
      r[i + 4].v = _mm512_shuffle_f32x4(c1, c3, 0x88);
      r[i + 8].v = _mm512_shuffle_f32x4(c0, c2, 0xdd);
      r[i + 12].v = _mm512_shuffle_f32x4(c1, c3, 0xdd);
    }
  }
};

// Two neighbouring values, each in all lanes.
inline void broadcast_two(const BFloat16* p, F32& a, F32& b) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const __m512i both = _mm512_set1_epi32(bits);
  a.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  b.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(~0xffff)));
}
inline void broadcast_two(const Float16* p, F32& a, F32& b) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const __m512 both = _mm512_cvtph_ps(_mm256_set1_epi32(bits));
  a.v = _mm512_shuffle_ps(both, both, 0xa0);
  b.v = _mm512_shuffle_ps(both, both, 0xf5);
}

struct F64 {
  using Scalar = double;
  static constexpr int kLanes = 8;
  __m512d v;

  static F64 zero() { return {_mm512_setzero_pd()}; }
  static F64 broadcast(double x) { return {_mm512_set1_pd(x)}; }
  static F64 load(const double* p) { return {_mm512_loadu_pd(p)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void pin() { FXSPARSE_PIN(v); }
  static F64 add(F64 a, F64 b) { return {_mm512_add_pd(a.v, b.v)}; }
  static F64 mul(F64 a, F64 b) { return {_mm512_mul_pd(a.v, b.v)}; }
  static F64 fma(F64 a, F64 b, F64 c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  static double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  double sum() const {
    const __m256d h = _mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1));
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
  }
  template <class Index>
  static F64 gather(const double* x, const Index* indices) {
    Index i[8];
    __builtin_memcpy(i, indices, sizeof i);
    const auto four = [x](const Index* j) __attribute__((always_inline)) {
      const __m128d low = _mm_loadh_pd(_mm_load_sd(x + j[0]), x + j[1]);
      const __m128d high = _mm_loadh_pd(_mm_load_sd(x + j[2]), x + j[3]);
      return _mm256_insertf128_pd(_mm256_castpd128_pd256(low), high, 1);
    };
    return {_mm512_insertf64x4(_mm512_castpd256_pd512(four(i)), four(i + 4), 1)};
  }
  static void transpose(F64* r) {
    __m512d a[8];
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm512_unpacklo_pd(r[i].v, r[i + 1].v);
      a[i + 1] = _mm512_unpackhi_pd(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 2; ++i) {
      const __m512d c0 = _mm512_shuffle_f64x2(a[i], a[i + 2], 0x88);
      const __m512d c1 = _mm512_shuffle_f64x2(a[i], a[i + 2], 0xdd);
      const __m512d c2 = _mm512_shuffle_f64x2(a[i + 4], a[i + 6], 0x88);
      const __m512d c3 = _mm512_shuffle_f64x2(a[i + 4], a[i + 6], 0xdd);
      r[i].v = _mm512_shuffle_f64x2(c0, c2, 0x88);
      r[i + 2].v = _mm512_shuffle_f64x2(c1, c3, 0x88);
      r[i + 4].v = _mm512_shuffle_f64x2(c0, c2, 0xdd);
      r[i + 6].v = _mm512_shuffle_f64x2(c1, c3, 0xdd);
    }
  }
};

}  // namespace avx512
}  // namespace fxsparse
