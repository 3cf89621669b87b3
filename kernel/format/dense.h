#pragma once

// Reading dense weights by their bits: zero is +0.0 or -0.0, whatever the type, so the width of a
// value is all that matters.

#include <cstdint>

#include "format/types.h"

namespace fxsparse {

template <class Bits>
constexpr bool is_nonzero(Bits bits) {
  return static_cast<Bits>(bits << 1) != 0;  // drops the sign, which every type has on top
}

// Calls f(Bits{}) with the unsigned integer as wide as a value.
template <class F>
auto with_bits(ValueType value, F&& f) {
  switch (value) {
    case ValueType::kFloat64:
      return f(uint64_t{});
    case ValueType::kFloat32:
      return f(uint32_t{});
    default:
      return f(uint16_t{});
  }
}

// Walking down a column of a row-major matrix would fetch a cache line a value; matrices whose
// columns are the contiguous direction are read in strips of this many rows, one line of floats
// wide (a 64-wide strip measured no better and spills the cursors).
constexpr int64_t kStripRows = 16;

inline bool columns_are_contiguous(const DenseView& dense) {
  return dense.row_stride < dense.col_stride;
}

// How many threads a pass over this many bytes deserves: the memory bus, not the CPU, is the limit.
int threads_for_bytes(int64_t bytes);

}  // namespace fxsparse
