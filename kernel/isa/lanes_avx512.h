#pragma once

// Packed values to lanes and back to columns, AVX-512: see lanes_kernel.h.

#include "isa/vector_avx512.h"

namespace fxsparse {
namespace avx512 {

constexpr int kRegisters = 32;

// Keeps a value that was loaded in its register: g++ folds a load that is used twice into two
// memory operands, and memory is the limit.
#ifdef FXSPARSE_AVX512_HEADER
template <class V>
inline void keep(V&) {}
#else
template <class V>
inline void keep(V& x) {
  asm("" : "+v"(x.v));
}
#endif

// Merged into a register that was zeroed: zeroing by the mask waits for the register's old value on
// Zen 5 (5 cycles instead of 1).
inline F32 expand(F32 packed, unsigned mask) {
  F32 lanes = F32::zero();
  keep(lanes);
  return {_mm512_mask_expand_ps(lanes.v, static_cast<__mmask16>(mask), packed.v)};
}
inline F64 expand(F64 packed, unsigned mask) {
  F64 lanes = F64::zero();
  keep(lanes);
  return {_mm512_mask_expand_pd(lanes.v, static_cast<__mmask8>(mask), packed.v)};
}

// The lowest bit that is set, or 64.
inline uint64_t lowest_bit(uint64_t bits) { return _tzcnt_u64(bits); }

// Bit c of rows[r] <- bit r of the c-th of 64 masks.
inline void transpose_masks(const uint8_t* masks, uint64_t* rows) {
  const __m512i a = _mm512_loadu_si512(masks), b = _mm512_loadu_si512(masks + 64);
  const __m512i low = _mm512_set1_epi16(0xff);
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const __m512i bytes[2] = {_mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)),
                            _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8))};
  for (int half = 0; half < 2; ++half) {
    const __m512i column = _mm512_permutexvar_epi64(order, bytes[half]);
#pragma GCC unroll 8
    for (int bit = 0; bit < 8; ++bit)
      rows[half * 8 + bit] =
          _mm512_test_epi8_mask(column, _mm512_set1_epi8(static_cast<char>(1 << bit)));
  }
}

// The columns of a vector of packed entries, within a tile of 32; upper bits are anything.
template <class V>
struct Columns {
  __m512i v;
};
inline void load_columns(const uint8_t* indices, Columns<F32>* columns) {
  columns->v = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices)));
}
inline void load_columns(const uint8_t* indices, Columns<F64>* columns) {
  columns->v = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices)));
}
inline Columns<F32> expand(Columns<F32> packed, unsigned mask) {
  return {_mm512_maskz_expand_epi32(static_cast<__mmask16>(mask), packed.v)};
}
inline Columns<F64> expand(Columns<F64> packed, unsigned mask) {
  return {_mm512_maskz_expand_epi64(static_cast<__mmask8>(mask), packed.v)};
}

// x[column] of 32 values.
inline F32 look_up(const float* x, Columns<F32> columns) {
  return {_mm512_permutex2var_ps(_mm512_loadu_ps(x), columns.v, _mm512_loadu_ps(x + 16))};
}
inline F64 look_up(const double* x, Columns<F64> columns) {
  const __m512d low = _mm512_permutex2var_pd(_mm512_loadu_pd(x), columns.v, _mm512_loadu_pd(x + 8));
  const __m512d high =
      _mm512_permutex2var_pd(_mm512_loadu_pd(x + 16), columns.v, _mm512_loadu_pd(x + 24));
  const __mmask8 upper = _mm512_test_epi64_mask(columns.v, _mm512_set1_epi64(16));
  return {_mm512_mask_blend_pd(upper, low, high)};
}
// Whether a look-up is cheap enough to be made for each batch row.
constexpr bool kLooksUp = true;

// out[lane] <- (column + first) * bytes for the lanes of `mask`, from packed indices; 16 indices
// are read, upper bits of the first are dropped.
inline void expand_places(unsigned mask, const uint8_t* indices, int first, int bytes,
                          int32_t* out) {
  const __m512i packed =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices)));
  const __m512i column = _mm512_and_si512(
      _mm512_maskz_expand_epi32(static_cast<__mmask16>(mask), packed), _mm512_set1_epi32(31));
  // Both factors are below 2^15: one multiply-add of 16-bit halves instead of a slow 32-bit
  // product.
  _mm512_storeu_si512(out, _mm512_madd_epi16(_mm512_add_epi32(column, _mm512_set1_epi32(first)),
                                             _mm512_set1_epi32(bytes)));
}

}  // namespace avx512
}  // namespace fxsparse
