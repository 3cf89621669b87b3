#pragma once

// The exact path for rows of x with Inf or NaN. A dropped zero is not multiplied, so the kernel's
// sum misses the NaN of 0 * Inf; here the outputs that have one are overwritten.

#include "format/format.h"

namespace fxsparse {

// x: one row, `length` values; y: outputs [begin, end) of that row, at y[begin]. `missing` is
// Format::missing_in_rows or, for the transposed product, missing_in_cols.
using Missing = void (*)(const PackedView&, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*);
void restore_dropped_nans(const PackedView& view, Missing missing, const void* x, int64_t length,
                          void* y, int64_t begin, int64_t end);

}  // namespace fxsparse
