#pragma once

// Stored values as doubles, converted without any of the kernels' code.

#include <cstdint>

#include "format/types.h"

namespace native {

// SplitMix64: the same numbers everywhere, and cheap to start, which a case does often.
class Random {
 public:
  explicit Random(int64_t seed) : state_(static_cast<uint64_t>(seed)) {}
  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }

 private:
  uint64_t state_;
};

// In [0, n).
inline int64_t below(Random& random, int64_t n) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}
inline double uniform(Random& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }
inline bool chance(Random& random, double probability) { return uniform(random) < probability; }

struct Type {
  fxsparse::ValueType value;
  const char* name;
  int bytes;
  double half_ulp;     // relative error of storing a value
  double compute_eps;  // of the type that is computed in
  double tiny;         // smallest normal value
};
constexpr Type kTypes[fxsparse::kValueTypes] = {
    {fxsparse::ValueType::kFloat32, "float32", 4, 0x1p-24, 0x1p-23, 0x1p-126},
    {fxsparse::ValueType::kFloat64, "float64", 8, 0x1p-53, 0x1p-52, 0x1p-1022},
    {fxsparse::ValueType::kBFloat16, "bfloat16", 2, 0x1p-8, 0x1p-23, 0x1p-126},
    {fxsparse::ValueType::kFloat16, "float16", 2, 0x1p-11, 0x1p-23, 0x1p-14},
};

double load(const Type& type, const uint8_t* stored, int64_t i);
void store(const Type& type, double value, uint8_t* stored, int64_t i);  // to nearest, ties to even

// A value of no special kind, that every type holds without rounding to zero.
inline double plain(Random& random) {
  return (chance(random, .5) ? 1 : -1) * (0.25 + uniform(random));
}

}  // namespace native
