// Calls that do more than one multiply, or more than multiply: the same bits as step by step.

#include <algorithm>
#include <cmath>

#include "matrix.h"
#include "op/mlp.h"
#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::Epilogue;
using fxsparse::LinearCall;
using fxsparse::VectorOps;
using Join = Epilogue::Join;

constexpr int64_t kBatches[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 48, 64, 100, 129, 150, 257, 300};
constexpr int64_t kBatchCount = sizeof kBatches / sizeof *kBatches;
constexpr int64_t kMostValues = 300'000;  // of wide weights, for the time it takes

// What one instruction set multiplies with.
struct Machine {
  fxsparse::Isa isa;
  const VectorOps& ops;
  const Type& type;

  LinearCall call(const Blob& blob, const Matrix& x, const Matrix* bias, const Matrix& y) const {
    LinearCall call{};
    call.packed = &blob.packed;
    call.x = x.memory.data();
    call.x_stride = x.stride;
    call.batch = x.rows;
    call.bias = bias ? bias->memory.data() : nullptr;
    call.y = y.memory.data();
    call.y_stride = y.stride;
    call.isa = isa;
    call.threads = 1;
    return call;
  }

  Matrix result(const Blob& blob, const Matrix& x, int64_t gap) const {
    return make_matrix(type, x.rows, blob.packed.view.rows, gap);
  }

  Matrix multiply(const Blob& blob, const Matrix& x, const Matrix* bias, int64_t gap) const {
    Matrix y = result(blob, x, gap);
    const LinearCall plain = call(blob, x, bias, y);
    linear(kernel_of(plain), plain);
    return y;
  }

  void finish(const Epilogue& epilogue, Matrix& y, const Matrix* other) const {
    for (int64_t row = 0; row < y.rows; ++row) {
      if (epilogue.activation >= 0) ops.activate[epilogue.activation](y.row(row), y.cols);
      if (epilogue.join == Join::kAdd) ops.add(y.row(row), other->row(row), y.cols);
      if (epilogue.join == Join::kMultiply) ops.multiply(y.row(row), other->row(row), y.cols);
    }
  }
};

int any_activation(Random& random) {
  return static_cast<int>(below(random, fxsparse::kActivations));
}

const Blob& any(const std::vector<Blob>& blobs, Random& random) {
  return blobs[below(random, static_cast<int64_t>(blobs.size()))];
}

Matrix any_x(const Type& type, int64_t rows, int64_t cols, Random& random) {
  Matrix x = random_matrix(type, rows, cols, chance(random, .5) ? 5 : 0, random);
  if (chance(random, .3) && rows * cols > 0)
    store(type, HUGE_VAL, x.row(below(random, rows)), below(random, cols));
  // Large enough to become infinite in float16 on the way.
  if (chance(random, .2) && rows * cols > 0)
    for (int64_t k = 0; k < cols; ++k) store(type, 6e4, x.row(rows / 2), k);
  return x;
}

void test_epilogue(const Machine& machine, const Blob& blob, const Matrix& x, const Matrix* bias,
                   Random& random) {
  const Matrix other = random_matrix(machine.type, x.rows, blob.packed.view.rows, 3, random);
  Epilogue epilogue{any_activation(random), static_cast<Join>(below(random, 3))};
  if (epilogue.join != Join::kNone && chance(random, .3)) epilogue.activation = -1;
  Matrix expected = machine.multiply(blob, x, bias, 2);
  machine.finish(epilogue, expected, &other);
  for (int threads : {1, 3}) {
    const Matrix y = machine.result(blob, x, 2);
    LinearCall call = machine.call(blob, x, bias, y);
    call.epilogue = epilogue;
    call.other = epilogue.join == Join::kNone ? nullptr : other.memory.data();
    call.other_stride = other.stride;
    call.threads = threads;
    linear(kernel_of(call), call);
    expect(y.memory == expected.memory && y.gaps_intact(),
           "activation %d, join %d, %d threads: other bits than in two steps", epilogue.activation,
           static_cast<int>(epilogue.join), threads);
  }
}

void test_linears(const Machine& machine, const std::vector<Blob>& blobs, const Matrix& x,
                  const Matrix* bias, Random& random) {
  std::vector<const Blob*> list;
  for (int64_t n = 1 + below(random, 5); n > 0; --n) list.push_back(&any(blobs, random));
  for (int threads : {1, 3}) {
    std::vector<Matrix> results;
    std::vector<LinearCall> calls;
    for (size_t i = 0; i < list.size(); ++i) {
      results.push_back(machine.result(*list[i], x, 1));
      calls.push_back(machine.call(*list[i], x, i % 2 ? nullptr : bias, results[i]));
      calls[i].threads = threads;
    }
    linears(calls);
    for (size_t i = 0; i < list.size(); ++i)
      expect(results[i].memory == machine.multiply(*list[i], x, i % 2 ? nullptr : bias, 1).memory,
             "%d of %d linears, %d threads: other bits than alone", static_cast<int>(i),
             static_cast<int>(list.size()), threads);
  }
}

void test_mlp(const Machine& machine, const std::vector<Blob>& first, const std::vector<Blob>& last,
              const Matrix& x, const Matrix* bias, Random& random) {
  const bool same = chance(random, .5), gated = chance(random, .5), joins = chance(random, .5);
  const int64_t format = below(random, static_cast<int64_t>(first.size()));
  const Blob& up = first[format];
  const Blob& gate = same ? up : any(first, random);
  const Blob& down = same ? last[format] : any(last, random);
  const Matrix residual = random_matrix(machine.type, x.rows, down.packed.view.rows, 4, random);
  const Epilogue activation{any_activation(random), Join::kNone};

  Matrix hidden = machine.multiply(gated ? gate : up, x, bias, 0);
  machine.finish(activation, hidden, nullptr);
  if (gated) {
    const Matrix factor = machine.multiply(up, x, nullptr, 0);
    machine.finish({-1, Join::kMultiply}, hidden, &factor);
  }
  Matrix expected = machine.multiply(down, hidden, nullptr, 2);
  if (joins) machine.finish({-1, Join::kAdd}, expected, &residual);

  for (int threads : {1, 2, 3}) {
    const Matrix y = machine.result(down, x, 2);
    const void* bias_data = bias ? bias->memory.data() : nullptr;
    fxsparse::MlpCall call{};
    if (gated) call.gate = {&gate.packed, bias_data};
    call.up = {&up.packed, gated ? nullptr : bias_data};
    call.down = {&down.packed, nullptr};
    call.activation = activation;
    call.x = x.memory.data();
    call.x_stride = x.stride;
    call.batch = x.rows;
    call.y = y.memory.data();
    call.y_stride = y.stride;
    call.residual = joins ? residual.memory.data() : nullptr;
    call.residual_stride = residual.stride;
    call.isa = machine.isa;
    call.threads = threads;
    mlp(call);
    expect(y.memory == expected.memory && y.gaps_intact(),
           "mlp of %s, %s and %s%s, activation %d, %d threads: other bits than one by one",
           gated ? gate.packed.format->name : "no gate", up.packed.format->name,
           down.packed.format->name, joins ? " with residual" : "", activation.activation, threads);
  }
}

}  // namespace

void test_fused(const std::vector<Blob>& first, const std::vector<Blob>& last, const Type& type,
                const Kernels& kernels, Random& random) {
  const fxsparse::PackedView& view = first[0].packed.view;
  const int64_t widest = std::max({view.rows, view.cols, int64_t{1}});
  const Matrix bias = random_matrix(type, 1, view.rows, 0, random);
  for (const Tested& tested : kernels) {
    // An emulated one is not what the driver finds.
    const fxsparse::FormatId format = first[0].packed.header.format;
    const fxsparse::Kernel& kernel = find_kernel(format, tested.isa, type.value);
    const Machine machine{tested.isa, *kernel.ops, type};
    const int64_t most = std::max<int64_t>(kMostValues / widest, 1);
    const int64_t batch = std::min(kBatches[below(random, kBatchCount)], most);
    const Scope scope("%s, batch %lld", tested.isa_name, static_cast<long long>(batch));
    const Matrix x = any_x(type, batch, view.cols, random);
    const Matrix* with_bias = chance(random, .7) ? &bias : nullptr;
    test_epilogue(machine, any(first, random), x, with_bias, random);
    test_linears(machine, first, x, with_bias, random);
    test_mlp(machine, first, last, x, with_bias, random);
  }
}

}  // namespace native
