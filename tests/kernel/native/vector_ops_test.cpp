// The conversions between stored and computed values, and the search for Inf and NaN.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::VectorOps;

// Every 16-bit pattern widens to what it means, and every float near a rounding boundary narrows
// to the nearest; NaNs may differ in payload.
void test_small_types(const VectorOps& ops, const Type& type) {
  Memory all(65536 * 2);
  for (int i = 0; i < 65536; ++i) std::memcpy(all.data() + 2 * i, &i, 2);
  Memory wide(65536 * 4);
  ops.widen(all.data(), 65536, wide.data());
  std::vector<float> values;
  for (int i = 0; i < 65536; ++i) {
    float got;
    std::memcpy(&got, wide.data() + 4 * i, sizeof got);
    const auto right = static_cast<float>(load(type, all.data(), i));
    const bool same = std::isnan(right) ? std::isnan(got)
                                        : got == right && std::signbit(got) == std::signbit(right);
    expect(same, "widen(%#x)", i);
    for (int step = -1; step <= 1; ++step) {
      // Half way to the next value, and its neighbours.
      uint32_t bits;
      std::memcpy(&bits, &right, sizeof bits);
      bits += (type.value == fxsparse::ValueType::kBFloat16 ? 0x8000 : 0x1000) + step;
      float near;
      std::memcpy(&near, &bits, sizeof near);
      values.push_back(near);
    }
  }
  const auto n = static_cast<int64_t>(values.size());
  Memory from(n * 4), narrow(n * 2), right(n * 2);
  std::memcpy(from.data(), values.data(), n * 4);
  ops.narrow(from.data(), n, narrow.data());
  for (int64_t i = 0; i < n; ++i) {
    store(type, values[i], right.data(), i);
    const bool same = std::isnan(values[i])
                          ? std::isnan(load(type, narrow.data(), i))
                          : std::memcmp(narrow.data() + 2 * i, right.data() + 2 * i, 2) == 0;
    expect(same, "narrow(%a)", values[i]);
  }
}

void test_all_finite(const VectorOps& ops, const Type& type, Random& random) {
  for (int64_t n : {0, 1, 7, 15, 16, 17, 33, 100, 257}) {
    Memory memory(n * type.bytes);
    for (int64_t i = 0; i < n; ++i) store(type, plain(random), memory.data(), i);
    expect(ops.all_finite(memory.data(), n), "all_finite of %lld", static_cast<long long>(n));
    for (int64_t i = 0; i < n; ++i)
      for (double bad : {HUGE_VAL, -HUGE_VAL, std::numeric_limits<double>::quiet_NaN()}) {
        const double before = load(type, memory.data(), i);
        store(type, bad, memory.data(), i);
        expect(!ops.all_finite(memory.data(), n), "all_finite: %g at %lld of %lld", bad,
               static_cast<long long>(i), static_cast<long long>(n));
        store(type, before, memory.data(), i);
      }
  }
}

}  // namespace

void test_vector_ops(const VectorOps& ops, const Type& type) {
  Random random(1);
  expect(ops.compute_bytes == (type.bytes == 8 ? 8 : 4), "compute_bytes");
  test_all_finite(ops, type, random);
  if (type.bytes == 2) test_small_types(ops, type);
}

}  // namespace native
