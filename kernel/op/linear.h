#pragma once

// The driver: y = x Wt + bias and its transpose for any batch, on the pool. Free of torch.

#include <vector>

#include "format/format.h"
#include "isa/dispatch.h"
#include "op/epilogue.h"
#include "op/planes.h"

namespace fxsparse {

struct LinearCall {
  const Packed* packed;
  const void* x;     // batch rows of cols() values (transposed: rows())
  int64_t x_stride;  // between rows, in values
  int64_t batch;
  const void* bias;  // rows() values or null; not used when transposed
  void* y;           // batch rows of rows() values (transposed: cols())
  int64_t y_stride;
  Isa isa;      // of the kernel
  int threads;  // at most; 0: as many as the work is worth
  bool more;    // for the pool: the next operator that uses threads is one of these, too

  // Done to y, which has rows() values a row; not where y is images, and not when transposed.
  Epilogue epilogue;
  const void* other;  // what joins y, or null: batch rows of rows() values
  int64_t other_stride;

  // Where x and y are images: both or none, and not when transposed. The strides then do not count.
  const Planes* x_planes;
  const Planes* y_planes;
};

inline const Kernel& kernel_of(const LinearCall& call) {
  return find_kernel(call.packed->header.format, call.isa, call.packed->view.value);
}

// Results do not depend on the number of threads. A row of x with Inf or NaN gets the dense result:
// NaN wherever the weight has a dropped zero at such a place.
FXSPARSE_EXPORT void linear(const Kernel& kernel, const LinearCall& call);

// Calls that differ in their weight, bias and y alone: x is made ready once, and the pool is called
// once.
FXSPARSE_EXPORT void linears(const std::vector<LinearCall>& calls);

FXSPARSE_EXPORT void linear_transposed(const Kernel& kernel, const LinearCall& call);

}  // namespace fxsparse
