// Conversions of the 16-bit types in portable code, one value at a time. Included inside the
// namespace of an instruction set (see csr_kernel.h), never on its own.

inline float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen_portable(BFloat16 value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

// Round to nearest even; NaN stays NaN.
inline BFloat16 narrow_portable_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

inline float widen_portable(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return bits_to_float(sign | ((magnitude << 13) + (112u << 23)));
  // A denormal is an integer times 2^-24, which is exact in float.
  const float value_abs = static_cast<float>(magnitude) * 0x1p-24f;
  return bits_to_float(sign | float_to_bits(value_abs));
}

// Round to nearest even, to denormals and to infinity where they are nearest; NaN stays NaN.
inline Float16 narrow_portable_f16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520
  if (magnitude < 0x38800000u) {
    // Below the smallest normal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | (rounded - (112u << 23)) >> 13)};
}
