// linear and linear_transposed against the oracle.

#include <cmath>
#include <cstring>
#include <limits>

#include "matrix.h"
#include "op/linear.h"
#include "report.h"
#include "sabotage.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::LinearCall;

constexpr int64_t kBatches[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12,  13, 14,
                                15, 16, 17, 18, 19, 20, 31, 32, 33, 64, 100, 129, 200};
constexpr int64_t kBatchCount = sizeof kBatches / sizeof *kBatches;
constexpr int64_t kBatchesOfCase = 4;
// Of wide weights, for the time it takes.
constexpr int64_t kMostValues = 300'000;

// One product that every kernel has to give.
struct Problem {
  bool transposed;
  Matrix x;
  const Matrix* bias;  // or null
  Product expected;
  int64_t out, y_gap;
};

void damage_rows(const Matrix& x, Random& random) {
  constexpr double kBad[] = {HUGE_VAL, -HUGE_VAL, std::numeric_limits<double>::quiet_NaN()};
  if (x.cols == 0) return;
  for (int64_t row = 0; row < x.rows; ++row) {
    if (!chance(random, .2)) continue;
    // Now and then two infinities meet.
    for (int i = chance(random, .2) ? 2 : 1; i > 0; --i)
      store(*x.type, kBad[below(random, 3)], x.row(row), below(random, x.cols));
  }
}

Problem make_problem(const Weight& weight, bool transposed, int64_t batch, const Matrix* bias,
                     Random& random) {
  const int64_t in = transposed ? weight.shape.rows : weight.shape.cols;
  const int64_t out = transposed ? weight.shape.cols : weight.shape.rows;
  Problem p{transposed, random_matrix(*weight.type, batch, in, chance(random, .5) ? 5 : 0, random),
            bias,       {},
            out,        chance(random, .5) ? 3 : 0};
  if (chance(random, .3)) damage_rows(p.x, random);
  p.expected = transposed ? backward(weight, p.x) : forward(weight, p.x, bias);
  return p;
}

Matrix run(const Blob& blob, const Tested& tested, const Problem& p, int threads) {
  Matrix y = make_matrix(*p.x.type, p.x.rows, p.out, p.y_gap);
  LinearCall call{};
  call.packed = &blob.packed;
  call.x = p.x.memory.data();
  call.x_stride = p.x.stride;
  call.batch = p.x.rows;
  call.bias = p.bias ? p.bias->memory.data() : nullptr;
  call.y = y.memory.data();
  call.y_stride = y.stride;
  call.isa = tested.isa;
  call.threads = threads;
  if (p.transposed)
    linear_transposed(*tested.kernel, call);
  else
    linear(*tested.kernel, call);
  sabotage_product(blob, y, threads);
  return y;
}

// The rows of a matrix as pixels of images, the values of a channel together.
struct Images {
  const Type& type;
  fxsparse::Planes planes;
  Memory memory;

  uint8_t* at(int64_t row, int64_t k) const {
    const int64_t image = row / planes.pixels * planes.image, pixel = row % planes.pixels;
    return memory.data() + (image + k * planes.channel + pixel) * type.bytes;
  }
};

Images make_images(const Type& type, int64_t count, int64_t pixels, int64_t channels, int64_t gap) {
  const fxsparse::Planes planes{pixels, channels * (pixels + gap), pixels + gap};
  const int64_t values =
      channels == 0 ? 0 : (count - 1) * planes.image + (channels - 1) * planes.channel + pixels;
  return {type, planes, Memory(values * type.bytes)};
}

// The same product for images: the same bits, in other places.
void test_images(const Blob& blob, const Tested& tested, const Problem& p, const Matrix& y,
                 Random& random) {
  const int64_t rows = p.x.rows, size = p.x.type->bytes;
  int64_t count = 1 + below(random, rows);
  while (rows % count != 0) --count;
  const Images in = make_images(*p.x.type, count, rows / count, p.x.cols, below(random, 4));
  const Images out = make_images(*p.x.type, count, rows / count, p.out, 0);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < p.x.cols; ++k)
      std::memcpy(in.at(row, k), p.x.row(row) + k * size, size);
  LinearCall call{};
  call.packed = &blob.packed;
  call.x = in.memory.data();
  call.x_planes = &in.planes;
  call.batch = rows;
  call.bias = p.bias ? p.bias->memory.data() : nullptr;
  call.y = out.memory.data();
  call.y_planes = &out.planes;
  call.isa = tested.isa;
  call.threads = static_cast<int>(1 + below(random, 3));
  linear(*tested.kernel, call);
  bool same = true;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < p.out; ++n)
      same &= std::memcmp(out.at(row, n), y.row(row) + n * size, size) == 0;
  expect(same, "%lld images of %lld pixels give other bits than rows",
         static_cast<long long>(count), static_cast<long long>(rows / count));
}

void test_problem(const Blob& blob, const Kernels& kernels, const Problem& p, Random& random) {
  const Scope scope("batch %lld%s", static_cast<long long>(p.x.rows), p.bias ? " with bias" : "");
  for (const Tested& tested : kernels) {
    const Scope isa("%s", tested.isa_name);
    const Matrix y = run(blob, tested, p, 1);
    if (!check_product(p.transposed ? "transposed" : "forward", y, p.expected)) continue;
    const Matrix shared = run(blob, tested, p, 3);
    expect(shared.memory == y.memory, "%s: three threads give other bits than one",
           p.transposed ? "transposed" : "forward");
    if (!p.transposed) test_images(blob, tested, p, y, random);
  }
}

}  // namespace

void test_products(const Blob& blob, const Weight& weight, const Kernels& kernels, int64_t number) {
  Random random(number);
  const Matrix bias = random_matrix(*weight.type, 1, weight.shape.rows, 0, random);
  for (int64_t i = 0; i < kBatchesOfCase; ++i) {
    // Any few cases in a row take all the batches.
    int64_t batch = kBatches[(number * kBatchesOfCase + i) * 5 % kBatchCount];
    const int64_t widest = std::max(weight.shape.cols, weight.shape.rows);
    if (batch * widest > kMostValues) batch = std::max<int64_t>(kMostValues / widest, 1);
    const Matrix* with_bias = chance(random, .7) ? &bias : nullptr;
    test_problem(blob, kernels, make_problem(weight, false, batch, with_bias, random), random);
    test_problem(blob, kernels, make_problem(weight, true, batch, nullptr, random), random);
  }
}

}  // namespace native
