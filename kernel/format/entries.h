#pragma once

// A few rows of any packed weight as plain compressed rows: what everything but the kernels works
// on (the way back to dense, gradients, the exact treatment of Inf and NaN).

#include <vector>

#include "export.h"
#include "format/types.h"

namespace fxsparse {

struct Packed;

struct Entries {
  int64_t first_row = 0;
  int64_t rows = 0;
  std::vector<int64_t> offsets;   // rows + 1, from 0
  std::vector<uint32_t> columns;  // increasing within a row
  std::vector<uint8_t> values;    // bits of the weight; none is a zero

  // For a decoder: begins with rows of so many entries of `value_bytes` each. counts[r] becomes
  // where the entries of row r go.
  void begin(int64_t first, int64_t n, int64_t* counts, int64_t value_bytes);

  // The same as a weight in CSR, to be read while this lives unchanged.
  PackedView csr(const PackedView& whole) const;
};

// Decodes the unit of rows that holds `row`.
void decode_unit(const Packed& packed, int64_t row, Entries& out);

// Writes zeros (+0.0) and values, bit for bit, in parallel.
FXSPARSE_EXPORT void unpack(const Packed& packed, void* out, int64_t row_stride,
                            int64_t col_stride);

// The rows at `indices`, one after the other in `out`, in parallel. Every index is a row.
FXSPARSE_EXPORT void unpack_rows(const Packed& packed, const int64_t* indices, int64_t count,
                                 void* out);

}  // namespace fxsparse
