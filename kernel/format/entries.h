#pragma once

// A few rows of any packed weight as plain compressed rows: what everything but the kernels works
// on (the way back to dense, gradients, the exact treatment of Inf and NaN).

#include <vector>

#include "format/types.h"

namespace fxsparse {

struct Packed;

struct Entries {
  int64_t first_row = 0;
  int64_t rows = 0;
  std::vector<int64_t> offsets;   // rows + 1, from 0
  std::vector<uint32_t> columns;  // increasing within a row
  std::vector<uint8_t> values;    // the weight's bits; no zeros

  int64_t count() const { return offsets[rows]; }
  // As a CSR weight of `rows` rows, to read as long as this is not changed.
  PackedView view(const PackedView& of) const;
};

// Calls f(entries) for the units of rows that cover [begin, end), in order.
template <class F>
void for_units(const Packed& packed, int64_t begin, int64_t end, Entries& entries, F&& f);

// Writes zeros (+0.0) and values, bit for bit.
void unpack_entries(const Packed& packed, void* out, int64_t row_stride, int64_t col_stride);

}  // namespace fxsparse
