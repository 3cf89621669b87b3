#pragma once

// The driver of two multiplies with an activation between: y = down(activation(up(x))), or
// y = down(activation(gate(x)) * up(x)).

#include "op/linear.h"

namespace fxsparse {

struct Weight {
  const Packed* packed;  // null: there is none
  const void* bias;      // or null
};

struct MlpCall {
  Weight gate, up, down;
  Epilogue activation;
  const void* x;  // batch rows
  int64_t x_stride;
  int64_t batch;
  void* y;
  int64_t y_stride;
  const void* residual;  // added to y; or null
  int64_t residual_stride;
  Isa isa;
  int threads;
  bool more;
};

// Equal bit for bit, for any number of threads, to the multiplies one by one.
FXSPARSE_EXPORT void mlp(const MlpCall& call);

}  // namespace fxsparse
