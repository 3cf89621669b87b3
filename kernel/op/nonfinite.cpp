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

void restore_dropped_nans(const PackedView& view, Missing missing, const void* x, int64_t length,
                          void* y, int64_t begin, int64_t end) {
  const auto mask = std::make_unique<uint8_t[]>(length);
  const auto lost = std::make_unique<uint8_t[]>(end - begin);
  with_bits(view.value, [&](auto type) {
    using Bits = decltype(type);
    const Bits exponent = static_cast<Bits>(exponent_bits(view.value));
    const Bits* in = static_cast<const Bits*>(x);
    int64_t marked = 0;
    for (int64_t i = 0; i < length; ++i) {
      mask[i] = (in[i] & exponent) == exponent;
      marked += mask[i];
    }
    missing(view, mask.get(), marked, begin, end, lost.get());
    Bits* out = static_cast<Bits*>(y);
    for (int64_t i = begin; i < end; ++i)
      if (lost[i - begin]) out[i] = static_cast<Bits>(quiet_nan(view.value));
  });
}

}  // namespace fxsparse
