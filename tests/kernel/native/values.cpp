#include "values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace native {
namespace {

using fxsparse::ValueType;

// A 16-bit float: a sign, so many bits of exponent, the rest of mantissa.
struct Small {
  int exponent_bits;
  int mantissa_bits() const { return 15 - exponent_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int top() const { return (1 << exponent_bits) - 1; }
};
Small small(const Type& type) { return {type.value == ValueType::kBFloat16 ? 8 : 5}; }

double widen(Small f, uint16_t bits) {
  const int mantissa = bits & ((1 << f.mantissa_bits()) - 1);
  const int exponent = bits >> f.mantissa_bits() & f.top();
  double value;
  if (exponent == f.top())
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
  else if (exponent == 0)
    value = std::ldexp(mantissa, 1 - f.bias() - f.mantissa_bits());
  else
    value =
        std::ldexp(mantissa + (1 << f.mantissa_bits()), exponent - f.bias() - f.mantissa_bits());
  return bits >> 15 ? -value : value;
}

// Of every pattern: most of what the tests do is loading.
const double* widened(const Type& type) {
  static const auto make = [](Small f) {
    std::vector<double> values(65536);
    for (int i = 0; i < 65536; ++i) values[i] = widen(f, static_cast<uint16_t>(i));
    return values;
  };
  static const std::vector<double> bfloat16 = make({8}), float16 = make({5});
  return (type.value == ValueType::kBFloat16 ? bfloat16 : float16).data();
}

uint16_t narrow(Small f, double value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) << 15);
  const int infinity = f.top() << f.mantissa_bits();
  if (std::isnan(value)) return static_cast<uint16_t>(sign | (infinity + 1));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (value == 0) return sign;
  int exponent;
  std::frexp(value, &exponent);  // value = fraction * 2^exponent, fraction in [.5, 1)
  exponent = std::max(exponent - 1, 1 - f.bias());
  // In units of the last place; a carry out of the mantissa raises the exponent by itself.
  const double units = std::nearbyint(std::ldexp(std::fabs(value), f.mantissa_bits() - exponent));
  const double bits = units + std::ldexp(exponent + f.bias() - 1, f.mantissa_bits());
  return static_cast<uint16_t>(sign | static_cast<int>(std::fmin(bits, infinity)));
}

}  // namespace

double load(const Type& type, const uint8_t* stored, int64_t i) {
  const uint8_t* p = stored + i * type.bytes;
  if (type.value == ValueType::kFloat64) {
    double value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  if (type.value == ValueType::kFloat32) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return widened(type)[bits];
}

void store(const Type& type, double value, uint8_t* stored, int64_t i) {
  uint8_t* p = stored + i * type.bytes;
  if (type.value == ValueType::kFloat64) {
    std::memcpy(p, &value, sizeof value);
  } else if (type.value == ValueType::kFloat32) {
    const auto single = static_cast<float>(value);
    std::memcpy(p, &single, sizeof single);
  } else {
    const uint16_t bits = narrow(small(type), value);
    std::memcpy(p, &bits, sizeof bits);
  }
}

}  // namespace native
