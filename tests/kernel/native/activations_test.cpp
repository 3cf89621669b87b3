// The activations against the C library's functions in 64 bits, and what joins y.

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "op/epilogue.h"
#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::VectorOps;

double largest(const Type& type) {
  switch (type.value) {
    case fxsparse::ValueType::kFloat64:
      return std::numeric_limits<double>::max();
    case fxsparse::ValueType::kFloat16:
      return 65504;
    case fxsparse::ValueType::kBFloat16:
      return 0x1.fep127;
    default:
      return std::numeric_limits<float>::max();
  }
}

double rounded_to(const Type& type, double x) {
  uint8_t bytes[8];
  store(type, x, bytes, 0);
  return load(type, bytes, 0);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double reference(const Type& type, const std::string& name, double x) {
  const auto rounded = [&](double value) { return rounded_to(type, value); };
  if (name == "relu") return x < 0 ? 0 : x;
  if (name == "relu6") return x < 0 ? 0 : x > 6 ? 6 : x;
  if (name == "relu_squared") return x < 0 ? 0 : x * x;
  // In 32 bits the product may be infinite, as torch's is.
  if (name == "hardswish") {
    const double product = x * (x + 3 < 0 ? 0 : x + 3 > 6 ? 6 : x + 3);
    return (type.bytes < 8 ? static_cast<float>(product) : product) / 6;
  }
  if (name == "gelu") return x * 0.5 * std::erfc(-x * std::sqrt(0.5));
  if (name == "gelu_tanh") return x * sigmoid(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  if (name == "quick_gelu") return x * rounded(sigmoid(rounded(1.702 * x)));
  if (name == "silu") return x * sigmoid(x);
  if (name == "sigmoid") return sigmoid(x);
  if (name == "tanh") return std::tanh(x);
  expect(false, "no reference for %s", name.c_str());
  return 0;
}

// Within two units in the last place of the computing type, and rounding to the stored one. Where a
// result is much smaller than x (gelu of -3), of a value nearer to x: torch's error is larger
// there.
bool close(const Type& type, const std::string& name, double got, double right, double x) {
  if (std::isnan(right)) return std::isnan(got);
  if (got == right) return std::signbit(got) == std::signbit(right) || right == 0;
  const double scale = std::fmax(std::fabs(right), std::fmin(std::fabs(x), 1) * 0x1p-3);
  // A step that falls to the other side of a rounding boundary.
  const double steps = name == "quick_gelu" && type.bytes == 2 ? 3 : 1;
  const double bound =
      2.5 * type.compute_eps * scale + 1.01 * steps * type.half_ulp * std::fabs(right) + type.tiny;
  if (std::isinf(got)) return std::fabs(right) * (1 + 2 * type.half_ulp) > largest(type);
  return std::fabs(got - right) <= bound;
}

// All values of 16 bits; of the others some of every exponent, more of the usual ones.
std::vector<double> arguments(const Type& type, Random& random) {
  std::vector<double> list = {0.0,    -0.0,  HUGE_VAL,      -HUGE_VAL,     std::nan(""),
                              -100.0, 100.0, largest(type), -largest(type)};
  if (type.bytes == 2) {
    for (int i = 0; i < 65536; ++i)
      list.push_back(load(type, reinterpret_cast<const uint8_t*>(&i), 0));
    return list;
  }
  for (int exponent = -140; exponent < 128; ++exponent)
    for (int i = 0; i < (exponent > -8 && exponent < 8 ? 400 : 4); ++i)
      list.push_back(std::ldexp((chance(random, .5) ? 1 : -1) * (1 + uniform(random)), exponent));
  return list;
}

Memory stored(const Type& type, const std::vector<double>& values) {
  const auto n = static_cast<int64_t>(values.size());
  Memory memory(n * type.bytes);
  for (int64_t i = 0; i < n; ++i) store(type, values[i], memory.data(), i);
  return memory;
}

void test_activation(const VectorOps& ops, const Type& type, const std::string& name, int place,
                     Random& random) {
  const Scope scope("%s", name.c_str());
  const std::vector<double> list = arguments(type, random);
  const auto n = static_cast<int64_t>(list.size());
  const Memory x = stored(type, list);
  Memory y = stored(type, list);
  ops.activate[place](y.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    const double from = load(type, x.data(), i), got = load(type, y.data(), i);
    const double right = reference(type, name, from);
    if (!expect(close(type, name, got, right, from), "of %a: expected %a, got %a", from, right,
                got))
      return;
  }
  // Wherever a value is, its result is the same.
  for (int64_t length : {1, 3, 15, 17, 63, 65, 130}) {
    const int64_t first = below(random, n - length);
    Memory part(length * type.bytes);
    std::memcpy(part.data(), x.data() + first * type.bytes, length * type.bytes);
    ops.activate[place](part.data(), length);
    expect(part.intact(), "wrote beside %lld values", static_cast<long long>(length));
    bool same = true;
    for (int64_t i = 0; i < length; ++i) {
      const double alone = load(type, part.data(), i), among = load(type, y.data(), first + i);
      same &= alone == among || (std::isnan(alone) && std::isnan(among));
    }
    expect(same, "%lld values from %lld on give other results than all",
           static_cast<long long>(length), static_cast<long long>(first));
  }
}

void test_joins(const VectorOps& ops, const Type& type, Random& random) {
  for (int64_t n : {1, 7, 16, 33, 100}) {
    std::vector<double> a(n), b(n);
    for (int64_t i = 0; i < n; ++i) {
      a[i] = rounded_to(type, plain(random));
      b[i] = rounded_to(type, plain(random));
    }
    const Memory other = stored(type, b);
    Memory sum = stored(type, a), product = stored(type, a);
    ops.add(sum.data(), other.data(), n);
    ops.multiply(product.data(), other.data(), n);
    expect(sum.intact() && product.intact(), "wrote beside %lld values", static_cast<long long>(n));
    for (int64_t i = 0; i < n; ++i) {
      expect(load(type, sum.data(), i) == rounded_to(type, a[i] + b[i]), "%a + %a", a[i], b[i]);
      expect(load(type, product.data(), i) == rounded_to(type, a[i] * b[i]), "%a * %a", a[i], b[i]);
    }
  }
}

}  // namespace

void test_activations(const VectorOps& ops, const Type& type) {
  Random random(1);
  const std::vector<const char*> names = fxsparse::activation_names();
  for (size_t i = 0; i < names.size(); ++i)
    test_activation(ops, type, names[i], static_cast<int>(i), random);
  test_joins(ops, type, random);
}

}  // namespace native
