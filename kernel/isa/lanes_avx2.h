#pragma once

// Packed values to lanes and back to columns, AVX2: see lanes_kernel.h.

#include "isa/vector_avx2.h"

namespace fxsparse {
namespace avx2 {

constexpr int kRegisters = 16;

template <class V>
inline void keep(V& x) {
  asm("" : "+x"(x.v));
}

// For each mask where a lane's value comes from; the sign bit marks lanes that are not in the mask.
struct ExpandTables {
  alignas(64) int32_t eight[256][8];
  alignas(64) int32_t four[16][8];  // of 64 bits, as pairs

  constexpr ExpandTables() : eight{}, four{} {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, next = 0; lane < 8; ++lane) {
        const bool set = mask >> lane & 1;
        eight[mask][lane] = set ? next++ : -1;
      }
    for (int mask = 0; mask < 16; ++mask)
      for (int lane = 0, next = 0; lane < 4; ++lane) {
        const bool set = mask >> lane & 1;
        for (int half = 0; half < 2; ++half)
          four[mask][2 * lane + half] = set ? 2 * next + half : -1;
        next += set;
      }
  }
};
constexpr ExpandTables kExpand;

// Lanes without the mask's bit are cleared by two cheap operations: a blend by sign bits is three
// on Golden Cove.
inline __m256 expand_words(__m256 packed, const int32_t* from) {
  const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  const __m256 lanes = _mm256_permutevar8x32_ps(packed, places);
  return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srai_epi32(places, 31)), lanes);
}
inline F32 expand(F32 packed, unsigned mask) {
  return {expand_words(packed.v, kExpand.eight[mask])};
}
inline F64 expand(F64 packed, unsigned mask) {
  return {_mm256_castps_pd(expand_words(_mm256_castpd_ps(packed.v), kExpand.four[mask]))};
}

// The lowest bit that is set, or 64.
inline uint64_t lowest_bit(uint64_t bits) { return _tzcnt_u64(bits); }

// Bit c of rows[r] <- bit r of the c-th of 64 masks.
inline void transpose_masks(const uint8_t* masks, uint64_t* rows) {
  for (int r = 0; r < 16; ++r) rows[r] = 0;
  for (int c = 0; c < 64; c += 32) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(masks + c * 2));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(masks + c * 2 + 32));
    const __m256i low = _mm256_set1_epi16(0xff);
    const __m256i bytes[2] = {
        _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low)),
        _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8))};
    for (int half = 0; half < 2; ++half) {
      __m256i column = _mm256_permute4x64_epi64(bytes[half], 0xd8);
#pragma GCC unroll 8
      for (int bit = 7; bit >= 0; --bit) {
        const uint32_t top = static_cast<uint32_t>(_mm256_movemask_epi8(column));
        rows[half * 8 + bit] |= static_cast<uint64_t>(top) << c;
        column = _mm256_add_epi8(column, column);
      }
    }
  }
}

// The columns of a vector of packed entries, within a tile of 32; upper bits are anything.
template <class V>
struct Columns;
template <>
struct Columns<F32> {
  __m256i v;
};
template <>
struct Columns<F64> {
  uint8_t i[4];
};
inline void load_columns(const uint8_t* indices, Columns<F32>* columns) {
  columns->v = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(indices)));
}
inline void load_columns(const uint8_t* indices, Columns<F64>* columns) {
  for (int i = 0; i < 4; ++i) columns->i[i] = indices[i] & 31;
}

// x[column] of 32 values: four permutations of 8, selected by bits 3 and 4 moved to the sign.
inline F32 look_up(const float* x, Columns<F32> columns) {
  const auto eight = [&](int i) __attribute__((always_inline)) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), columns.v);
  };
  const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(columns.v, 28));
  const __m256 bit4 = _mm256_castsi256_ps(_mm256_slli_epi32(columns.v, 27));
  return {_mm256_blendv_ps(_mm256_blendv_ps(eight(0), eight(8), bit3),
                           _mm256_blendv_ps(eight(16), eight(24), bit3), bit4)};
}
inline F64 look_up(const double* x, Columns<F64> columns) { return F64::gather(x, columns.i); }
constexpr bool kLooksUp = false;

// out[lane] <- (column + first) * bytes for the lanes of `mask`, from packed indices; 16 indices
// are read, upper bits of the first are dropped.
inline void expand_places(unsigned mask, const uint8_t* indices, int first, int bytes,
                          int32_t* out) {
  const auto eight = [&](unsigned bits, const uint8_t* from, int32_t* to)
      __attribute__((always_inline)) {
    const __m256i packed =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m256i place = _mm256_load_si256(reinterpret_cast<const __m256i*>(kExpand.eight[bits]));
    const __m256i column =
        _mm256_and_si256(_mm256_permutevar8x32_epi32(packed, place), _mm256_set1_epi32(31));
    // Both factors are below 2^15: a multiply-add of 16-bit halves, not a slow 32-bit product.
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_madd_epi16(_mm256_add_epi32(column, _mm256_set1_epi32(first)),
                                          _mm256_set1_epi32(bytes)));
  };
  eight(mask & 0xff, indices, out);
  eight(mask >> 8, indices + __builtin_popcount(mask & 0xff), out + 8);
}

}  // namespace avx2
}  // namespace fxsparse
