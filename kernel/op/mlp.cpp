#include "op/mlp.h"

#include "op/scratch.h"

namespace fxsparse {
namespace {

thread_local Scratch hidden;
thread_local Scratch other;

void multiply(const MlpCall& call, const Weight& weight, LinearCall& linear_call) {
  linear_call.packed = weight.packed;
  linear_call.bias = weight.bias;
  linear_call.batch = call.batch;
  linear_call.isa = call.isa;
  linear_call.threads = call.threads;
  linear(find_kernel(weight.packed->header.format, call.isa, weight.packed->view.value),
         linear_call);
}

}  // namespace

void mlp(const MlpCall& call) {
  const int64_t width = call.up.packed->view.rows;
  const int64_t bytes = call.batch * width * value_bytes(call.up.packed->view.value);
  LinearCall up{};
  up.x = call.x;
  up.x_stride = call.x_stride;
  up.y_stride = up.other_stride = width;
  up.more = true;
  up.epilogue = call.activation;
  if (call.gate.packed) {
    LinearCall factor = up;
    factor.y = other.reserve(bytes);
    factor.epilogue = {};
    multiply(call, call.up, factor);
    up.other = factor.y;
    up.epilogue.join = Epilogue::Join::kMultiply;
  }
  up.y = hidden.reserve(bytes);
  multiply(call, call.gate.packed ? call.gate : call.up, up);

  LinearCall down{};
  down.x = up.y;
  down.x_stride = width;
  down.y = call.y;
  down.y_stride = call.y_stride;
  down.more = call.more;
  if (call.residual) {
    down.epilogue.join = Epilogue::Join::kAdd;
    down.other = call.residual;
    down.other_stride = call.residual_stride;
  }
  multiply(call, call.down, down);
}

}  // namespace fxsparse
