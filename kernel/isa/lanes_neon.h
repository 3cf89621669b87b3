#pragma once

// Packed values to lanes and back to columns, NEON: see lanes_kernel.h.

#include "isa/vector_neon.h"

namespace fxsparse {
namespace neon {

constexpr int kRegisters = 32;

#include "isa/lanes_portable.h"

// For each mask the bytes that tbl takes; out of range gives zero.
struct ExpandTables {
  alignas(16) uint8_t four[16][16];
  alignas(16) uint8_t two[4][16];

  constexpr ExpandTables() : four{}, two{} {
    for (int mask = 0; mask < 16; ++mask)
      for (int lane = 0, next = 0; lane < 4; ++lane) {
        const bool set = mask >> lane & 1;
        for (int b = 0; b < 4; ++b)
          four[mask][lane * 4 + b] = static_cast<uint8_t>(set ? next * 4 + b : 0xff);
        next += set;
      }
    for (int mask = 0; mask < 4; ++mask)
      for (int lane = 0, next = 0; lane < 2; ++lane) {
        const bool set = mask >> lane & 1;
        for (int b = 0; b < 8; ++b)
          two[mask][lane * 8 + b] = static_cast<uint8_t>(set ? next * 8 + b : 0xff);
        next += set;
      }
  }
};
constexpr ExpandTables kExpand;

inline F32 expand(F32 packed, unsigned mask) {
  const uint8x16_t bytes = vreinterpretq_u8_f32(packed.v);
  return {vreinterpretq_f32_u8(vqtbl1q_u8(bytes, vld1q_u8(kExpand.four[mask])))};
}
inline F64 expand(F64 packed, unsigned mask) {
  const uint8x16_t bytes = vreinterpretq_u8_f64(packed.v);
  return {vreinterpretq_f64_u8(vqtbl1q_u8(bytes, vld1q_u8(kExpand.two[mask])))};
}

}  // namespace neon
}  // namespace fxsparse
