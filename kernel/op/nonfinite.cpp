#include "op/nonfinite.h"

#include <memory>

#include "format/dense.h"

namespace fxsparse {
namespace {

uint64_t exponent_bits(ValueType value) {
  switch (value) {
    case ValueType::kFloat32:
      return 0x7f800000u;
    case ValueType::kFloat64:
      return 0x7ff0000000000000u;
    case ValueType::kBFloat16:
      return 0x7f80u;
    default:
      return 0x7c00u;
  }
}

// The exponent's bits and the highest one of the mantissa.
uint64_t quiet_nan(ValueType value) {
  const uint64_t exponent = exponent_bits(value);
  return exponent | (exponent & ~(exponent << 1)) >> 1;
}

}  // namespace

void mark_nonfinite(ValueType value, const void* x, int64_t length, int bit, uint64_t* bad) {
  with_bits(value, [&](auto type) {
    using Bits = decltype(type);
    const Bits exponent = static_cast<Bits>(exponent_bits(value));
    const Bits* in = static_cast<const Bits*>(x);
    for (int64_t i = 0; i < length; ++i)
      bad[i] |= static_cast<uint64_t>((in[i] & exponent) == exponent) << bit;
  });
}

void restore_dropped_nans(const PackedView& view, Missing missing, const uint64_t* bad, void* y,
                          int64_t y_stride, int64_t begin, int64_t end) {
  const auto lost = std::make_unique<uint64_t[]>(end - begin);
  missing(view, bad, begin, end, lost.get());
  with_bits(view.value, [&](auto type) {
    using Bits = decltype(type);
    Bits* out = static_cast<Bits*>(y);
    for (int64_t i = begin; i < end; ++i)
      for (uint64_t rows = lost[i - begin]; rows != 0; rows &= rows - 1)
        out[__builtin_ctzll(rows) * y_stride + i] = static_cast<Bits>(quiet_nan(view.value));
  });
}

}  // namespace fxsparse
