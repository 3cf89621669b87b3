#pragma once

// Inf and NaN in x: 0 x Inf = NaN, also where the zero was not stored, and only there. Rows of x
// that hold one are rare; what the kernels made of them is replaced here by the dense result, which
// needs no more than the entries that meet something infinite.

#include "format/format.h"
#include "isa/kernel.h"

namespace fxsparse {

// Rows of x (or of the output gradient) with Inf or NaN, all of the weight's type, and where their
// results are.
struct NonfiniteRows {
  int count = 0;
  const void* x[kMaxPanelRows];
  void* y[kMaxPanelRows];
};

// Sets y[n] for n in [begin, end), all of them. `bias` may be null.
void multiply_nonfinite(const Packed& packed, const VectorOps& ops, const NonfiniteRows& rows,
                        const void* bias, int64_t begin, int64_t end);

// The same for the transposed product, whose kernels meet stored entries only: NaN in the columns
// [begin, end) of y that have a dropped zero where x is not finite.
void restore_dropped_nans(const Packed& packed, const VectorOps& ops, const NonfiniteRows& rows,
                          int64_t begin, int64_t end);

}  // namespace fxsparse
