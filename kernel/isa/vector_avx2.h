#pragma once

// 256-bit vectors: AVX2, FMA and F16C.

#include <immintrin.h>

#include "isa/kernel.h"

namespace fxsparse {
namespace avx2 {

// Half of Zen 3's L2. With 768 columns a panel of 4 vectors (98 KB) beats one of 1 or 2 by 5-40 %,
// with 4096 columns 2 vectors (256 KB) beat 1 by 30 % and 4 (512 KB) by up to 20 %.
constexpr int64_t kPanelBytes = 256 << 10;

// Of rows in pairs: 2 x 6 sums, 2 weights and a few values of x fill the registers.
constexpr int kPairVectors = 6;
constexpr int64_t kPairPanelBytes = 4 << 20;

#include "isa/half.h"

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return widen_portable(x); }
inline float widen(Float16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, BFloat16* out) { *out = narrow_portable_bf16(x); }
inline void narrow(float x, Float16* out) {
  out->bits = static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
}

struct F32 {
  using Scalar = float;
  static constexpr int kLanes = 8;
  __m256 v;

  static F32 zero() { return {_mm256_setzero_ps()}; }
  static F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static F32 load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  static F32 load(const Float16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(BFloat16* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(even, 16), quiet, nan);
    const __m128i low = _mm256_castsi256_si128(rounded);
    const __m128i high = _mm256_extracti128_si256(rounded, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
  }
  void store(Float16* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  // Keeps the value in a register: the compiler would rather load it again for each use.
  void pin() { asm("" : "+x"(v)); }
  static F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
  static F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
  // b where one is NaN or both are zero.
  static F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
  static F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
  static F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  // a where x < 0, else b.
  static F32 where_negative(F32 x, F32 a, F32 b) {
    return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, _mm256_setzero_ps(), _CMP_LT_OQ))};
  }
  // 2^n for the integer n of -127 (which gives 0) to 128 (infinity) in the low bits of x.
  static F32 power_of_two(F32 x) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(x.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23)))};
  }
  static F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  float sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  // Eight scalar loads: vgatherdps takes 1.8x as long on Zen 3.
  template <class Index>
  static F32 gather(const float* x, const Index* indices) {
    Index i[8];
    __builtin_memcpy(i, indices, sizeof i);
    const auto four = [x](const Index* j) __attribute__((always_inline)) {
      __m128 r = _mm_load_ss(x + j[0]);
      r = _mm_insert_ps(r, _mm_load_ss(x + j[1]), 0x10);
      r = _mm_insert_ps(r, _mm_load_ss(x + j[2]), 0x20);
      return _mm_insert_ps(r, _mm_load_ss(x + j[3]), 0x30);
    };
    return {_mm256_insertf128_ps(_mm256_castps128_ps256(four(i)), four(i + 4), 1)};
  }
  // 8 x 8: pairs, then quads within 128 bits, then across.
  static void transpose(F32* r) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
      a[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
      b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
      b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
      b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      r[i].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
      r[i + 4].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
  }
};

// Two neighbouring values, each in all lanes.
inline void broadcast_two(const BFloat16* p, F32& a, F32& b) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const __m256i both = _mm256_set1_epi32(bits);
  a.v = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  b.v = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(~0xffff)));
}
inline void broadcast_two(const Float16* p, F32& a, F32& b) {
  int bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const __m256 both = _mm256_cvtph_ps(_mm_set1_epi32(bits));
  a.v = _mm256_shuffle_ps(both, both, 0xa0);
  b.v = _mm256_shuffle_ps(both, both, 0xf5);
}

struct F64 {
  using Scalar = double;
  static constexpr int kLanes = 4;
  __m256d v;

  static F64 zero() { return {_mm256_setzero_pd()}; }
  static F64 broadcast(double x) { return {_mm256_set1_pd(x)}; }
  static F64 load(const double* p) { return {_mm256_loadu_pd(p)}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void pin() { asm("" : "+x"(v)); }
  static F64 add(F64 a, F64 b) { return {_mm256_add_pd(a.v, b.v)}; }
  static F64 mul(F64 a, F64 b) { return {_mm256_mul_pd(a.v, b.v)}; }
  static F64 fma(F64 a, F64 b, F64 c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  static double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  double sum() const {
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
  }
  template <class Index>
  static F64 gather(const double* x, const Index* indices) {
    Index i[4];
    __builtin_memcpy(i, indices, sizeof i);
    const __m128d low = _mm_loadh_pd(_mm_load_sd(x + i[0]), x + i[1]);
    const __m128d high = _mm_loadh_pd(_mm_load_sd(x + i[2]), x + i[3]);
    return {_mm256_insertf128_pd(_mm256_castpd128_pd256(low), high, 1)};
  }
  static void transpose(F64* r) {
    const __m256d a = _mm256_unpacklo_pd(r[0].v, r[1].v), b = _mm256_unpackhi_pd(r[0].v, r[1].v);
    const __m256d c = _mm256_unpacklo_pd(r[2].v, r[3].v), d = _mm256_unpackhi_pd(r[2].v, r[3].v);
    r[0].v = _mm256_permute2f128_pd(a, c, 0x20);
    r[1].v = _mm256_permute2f128_pd(b, d, 0x20);
    r[2].v = _mm256_permute2f128_pd(a, c, 0x31);
    r[3].v = _mm256_permute2f128_pd(b, d, 0x31);
  }
};

}  // namespace avx2
}  // namespace fxsparse
