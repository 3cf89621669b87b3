#pragma once

// The exact path for rows of x with Inf or NaN. A dropped zero is not multiplied, so the kernel's
// sum misses the NaN of 0 * Inf; here the outputs that have one are overwritten.

#include "format/format.h"

namespace fxsparse {

// bad[k] |= 1 << bit where the k-th of the `length` values of a row of x is not finite.
void mark_nonfinite(ValueType value, const void* x, int64_t length, int bit, uint64_t* bad);

// y: up to 64 rows, `y_stride` values apart, of which the outputs [begin, end) are computed. bad:
// of the same rows of x. `missing` is Format::missing_in_rows or, for the transposed product,
// missing_in_cols.
using Missing = void (*)(const PackedView&, const uint64_t*, int64_t, int64_t, uint64_t*);
void restore_dropped_nans(const PackedView& view, Missing missing, const uint64_t* bad, void* y,
                          int64_t y_stride, int64_t begin, int64_t end);

}  // namespace fxsparse
