#pragma once

// 128-bit vectors of every 64-bit ARM: NEON with its conversions of half precision.

#include <arm_neon.h>

#include "isa/kernel.h"

namespace fxsparse {
namespace neon {

// Not measured (only emulated so far): half of the 512 KB of L2 a Cortex-A76 or Neoverse has.
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
  static constexpr int kLanes = 4;
  float32x4_t v;

  static F32 zero() { return {vdupq_n_f32(0)}; }
  static F32 broadcast(float x) { return {vdupq_n_f32(x)}; }
  static F32 load(const float* p) { return {vld1q_f32(p)}; }
  static F32 load(const BFloat16* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))};
  }
  static F32 load(const Float16* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))};
  }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(BFloat16* p) const {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t even = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(&p->bits, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), even, quiet), 16));
  }
  void store(Float16* p) const { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  // Keeps the value in a register: the compiler would rather load it again for each use.
  void pin() { asm("" : "+w"(v)); }
  static F32 add(F32 a, F32 b) { return {vaddq_f32(a.v, b.v)}; }
  static F32 sub(F32 a, F32 b) { return {vsubq_f32(a.v, b.v)}; }
  static F32 mul(F32 a, F32 b) { return {vmulq_f32(a.v, b.v)}; }
  static F32 div(F32 a, F32 b) { return {vdivq_f32(a.v, b.v)}; }
  // b where one is NaN or both are zero.
  static F32 min(F32 a, F32 b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
  static F32 max(F32 a, F32 b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
  static F32 abs(F32 a) { return {vabsq_f32(a.v)}; }
  // a where x < 0, else b.
  static F32 where_negative(F32 x, F32 a, F32 b) { return {vbslq_f32(vcltzq_f32(x.v), a.v, b.v)}; }
  // 2^n for the integer n of -127 (which gives 0) to 128 (infinity) in the low bits of x.
  static F32 power_of_two(F32 x) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(x.v), 23);
    return {vreinterpretq_f32_s32(vaddq_s32(n, vdupq_n_s32(127 << 23)))};
  }
  static F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  float sum() const { return vaddvq_f32(v); }
  template <class Index>
  static F32 gather(const float* x, const Index* indices) {
    Index i[4];
    __builtin_memcpy(i, indices, sizeof i);
    float32x4_t r = vld1q_dup_f32(x + i[0]);
    r = vld1q_lane_f32(x + i[1], r, 1);
    r = vld1q_lane_f32(x + i[2], r, 2);
    return {vld1q_lane_f32(x + i[3], r, 3)};
  }
  static void transpose(F32* r) {
    const float32x4x2_t a = vtrnq_f32(r[0].v, r[1].v), b = vtrnq_f32(r[2].v, r[3].v);
    r[0].v = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1].v = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2].v = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3].v = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
  }
};

struct F64 {
  using Scalar = double;
  static constexpr int kLanes = 2;
  float64x2_t v;

  static F64 zero() { return {vdupq_n_f64(0)}; }
  static F64 broadcast(double x) { return {vdupq_n_f64(x)}; }
  static F64 load(const double* p) { return {vld1q_f64(p)}; }
  void store(double* p) const { vst1q_f64(p, v); }
  void pin() { asm("" : "+w"(v)); }
  static F64 add(F64 a, F64 b) { return {vaddq_f64(a.v, b.v)}; }
  static F64 mul(F64 a, F64 b) { return {vmulq_f64(a.v, b.v)}; }
  static F64 fma(F64 a, F64 b, F64 c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
  static double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
  double sum() const { return vaddvq_f64(v); }
  template <class Index>
  static F64 gather(const double* x, const Index* indices) {
    Index i[2];
    __builtin_memcpy(i, indices, sizeof i);
    return {vld1q_lane_f64(x + i[1], vld1q_dup_f64(x + i[0]), 1)};
  }
  static void transpose(F64* r) {
    const float64x2_t low = vzip1q_f64(r[0].v, r[1].v);
    r[1].v = vzip2q_f64(r[0].v, r[1].v);
    r[0].v = low;
  }
};

}  // namespace neon
}  // namespace fxsparse
