// SIMDe's emulation of AVX-512, and from Intel's pseudo-code what SIMDe 0.7 lacks of it.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <stdint.h>
#include <string.h>

#define __mmask8 simde__mmask8
#define __mmask16 simde__mmask16

// Part of AVX2's BMI.
static inline uint64_t _tzcnt_u64(uint64_t a) { return a ? __builtin_ctzll(a) : 64; }

static inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  uint16_t in[16];
  uint32_t out[16];
  memcpy(in, &a, sizeof in);
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  __m512i r;
  memcpy(&r, out, sizeof r);
  return r;
}

static inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  uint32_t in[16];
  uint16_t out[16];
  memcpy(in, &a, sizeof in);
  for (int i = 0; i < 16; ++i) out[i] = (uint16_t)in[i];
  __m256i r;
  memcpy(&r, out, sizeof r);
  return r;
}

static inline __m512 _mm512_cvtph_ps(__m256i a) {
  const __m256 low = simde_mm256_cvtph_ps(simde_mm256_castsi256_si128(a));
  const __m256 high = simde_mm256_cvtph_ps(simde_mm256_extractf128_si256(a, 1));
  __m512 r;
  memcpy(&r, &low, sizeof low);
  memcpy((char*)&r + sizeof low, &high, sizeof high);
  return r;
}

static inline __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  (void)rounding;  // to nearest, the only one that is used
  __m256 half[2];
  memcpy(half, &a, sizeof half);
  __m128i out[2];
  for (int i = 0; i < 2; ++i) out[i] = simde_mm256_cvtps_ph(half[i], 0);
  __m256i r;
  memcpy(&r, out, sizeof r);
  return r;
}

// 128-bit blocks: two of a, then two of b, chosen by two bits each.
static inline void shuffle_blocks(const void* a, const void* b, int choice, void* out) {
  for (int i = 0; i < 4; ++i)
    memcpy((char*)out + 16 * i, (const char*)(i < 2 ? a : b) + 16 * (choice >> 2 * i & 3), 16);
}

static inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int choice) {
  __m512 r;
  shuffle_blocks(&a, &b, choice, &r);
  return r;
}

static inline __m512d _mm512_shuffle_f64x2(__m512d a, __m512d b, int choice) {
  __m512d r;
  shuffle_blocks(&a, &b, choice, &r);
  return r;
}

// Lanes of `bytes` each: the next of a for every bit of the mask, or else as they were.
static inline void expand_lanes(uint32_t mask, const void* a, int bytes, void* lanes) {
  int next = 0;
  for (int lane = 0; lane < 64 / bytes; ++lane)
    if (mask >> lane & 1)
      memcpy((char*)lanes + lane * bytes, (const char*)a + bytes * next++, bytes);
}

static inline __m512 _mm512_mask_expand_ps(__m512 lanes, __mmask16 mask, __m512 a) {
  expand_lanes(mask, &a, 4, &lanes);
  return lanes;
}

static inline __m512d _mm512_mask_expand_pd(__m512d lanes, __mmask8 mask, __m512d a) {
  expand_lanes(mask, &a, 8, &lanes);
  return lanes;
}

static inline __m512 _mm512_maskz_expand_ps(__mmask16 mask, __m512 a) {
  return _mm512_mask_expand_ps(_mm512_setzero_ps(), mask, a);
}

static inline __m512d _mm512_maskz_expand_pd(__mmask8 mask, __m512d a) {
  return _mm512_mask_expand_pd(_mm512_setzero_pd(), mask, a);
}

static inline __m512i _mm512_maskz_expand_epi32(__mmask16 mask, __m512i a) {
  __m512i r = _mm512_setzero_si512();
  expand_lanes(mask, &a, 4, &r);
  return r;
}

static inline __m512i _mm512_maskz_expand_epi64(__mmask8 mask, __m512i a) {
  __m512i r = _mm512_setzero_si512();
  expand_lanes(mask, &a, 8, &r);
  return r;
}

static inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  uint8_t in[16];
  uint32_t out[16];
  memcpy(in, &a, sizeof in);
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  __m512i r;
  memcpy(&r, out, sizeof r);
  return r;
}

static inline __m512i _mm512_cvtepu8_epi64(__m128i a) {
  uint8_t in[16];
  uint64_t out[8];
  memcpy(in, &a, sizeof in);
  for (int i = 0; i < 8; ++i) out[i] = in[i];
  __m512i r;
  memcpy(&r, out, sizeof r);
  return r;
}

// SIMDe's alias takes the arguments of another intrinsic.
#undef _mm512_madd_epi16
static inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  int16_t x[32], y[32];
  int32_t out[16];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  for (int i = 0; i < 16; ++i) out[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  __m512i r;
  memcpy(&r, out, sizeof r);
  return r;
}
