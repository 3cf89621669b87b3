// Blobs that were damaged, as a file may be: refused with an Error, or safe and as good as the
// weight that they unpack to.

#include <cmath>
#include <cstring>
#include <optional>

#include "error.h"
#include "matrix.h"
#include "op/linear.h"
#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::Packed;

constexpr int64_t kAttempts = 12;
constexpr int64_t kHeader = sizeof(fxsparse::Header);

void flip_bits(Memory& blob, int64_t begin, Random& random) {
  for (int64_t n = 1 + below(random, 3); n > 0; --n)
    blob.data()[begin + below(random, blob.bytes() - begin)] ^= 1 << below(random, 8);
}

void overwrite(Memory& blob, int64_t begin, Random& random) {
  const int64_t at = begin + below(random, blob.bytes() - begin);
  const int64_t n = std::min(blob.bytes() - at, 1 + below(random, 40));
  const int kind = static_cast<int>(below(random, 4));
  for (int64_t i = 0; i < n; ++i)
    blob.data()[at + i] = kind == 0   ? 0
                          : kind == 1 ? 0xff
                          : kind == 2 ? static_cast<uint8_t>(random())
                                      : blob.data()[at];
}

// Little-endian integers that are off by one are what a wrong writer makes.
void off_by_one(Memory& blob, int64_t begin, Random& random) {
  blob.data()[begin + below(random, blob.bytes() - begin)] += chance(random, .5) ? 1 : -1;
}

void swap_bytes(Memory& blob, int64_t begin, Random& random) {
  const int64_t at = begin + below(random, blob.bytes() - begin - 2);
  std::swap(blob.data()[at], blob.data()[at + 1 + below(random, 2)]);
}

Memory damaged(const Memory& blob, Random& random) {
  int64_t bytes = blob.bytes();
  if (chance(random, .05)) bytes = below(random, bytes + 1);
  Memory copy(bytes, static_cast<int>(below(random, 3)));
  std::memcpy(copy.data(), blob.data(), bytes);
  // The header and what comes right after it are few bytes of many, and most fields refuse.
  const int64_t begin = chance(random, .1) ? 0 : kHeader;
  if (bytes <= begin + 2) return copy;
  switch (below(random, 4)) {
    case 0:
      flip_bits(copy, begin, random);
      break;
    case 1:
      overwrite(copy, begin, random);
      break;
    case 2:
      swap_bytes(copy, begin, random);
      break;
    default:
      off_by_one(copy, begin, random);
  }
  return copy;
}

// What validate accepts; anything but an Error is a failure.
std::optional<Packed> accepted(const Memory& blob) {
  try {
    const Packed packed = fxsparse::open_packed(blob.data(), blob.bytes());
    packed.format->validate(packed.view);
    return packed;
  } catch (const fxsparse::Error&) {
    return std::nullopt;
  } catch (const std::exception& error) {
    expect(false, "validate: expected an Error, got %s", error.what());
    return std::nullopt;
  }
}

bool moderate(const Weight& weight) {
  for (double value : weight.values)
    if (!(std::fabs(value) < 100)) return false;
  return true;
}

void test_use(const Packed& packed, const Kernels& kernels, Random& random) {
  const Type& type = kTypes[static_cast<int>(packed.view.value) - 1];
  const Shape shape{packed.view.rows, packed.view.cols};
  Dense dense = make_dense(type, shape, Order::kRows);
  unpack(packed, dense.memory.data(), dense.view.row_stride, dense.view.col_stride);
  expect(dense.memory.intact(), "unpack wrote beside its output");
  const Weight weight = from_dense(type, dense.view);
  const bool comparable = moderate(weight);
  const int64_t batch = shape.cols > 1000 || chance(random, .5)
                            ? 1 + below(random, shape.cols > 10'000 ? 2 : 16)
                            : 17 + below(random, 40);
  for (bool transposed : {false, true}) {
    const int64_t in = transposed ? shape.rows : shape.cols;
    const int64_t out = transposed ? shape.cols : shape.rows;
    const Matrix x = random_matrix(type, batch, in, 0, random);
    const Product expected = transposed ? backward(weight, x) : forward(weight, x, nullptr);
    for (const Tested& tested : kernels) {
      const Scope scope("%s", tested.isa_name);
      const Matrix y = make_matrix(type, batch, out, 0);
      fxsparse::LinearCall call{};
      call.packed = &packed;
      call.x = x.memory.data();
      call.x_stride = x.stride;
      call.batch = batch;
      call.y = y.memory.data();
      call.y_stride = y.stride;
      call.isa = tested.isa;
      if (transposed)
        linear_transposed(*tested.kernel, call);
      else
        linear(*tested.kernel, call);
      if (comparable)
        check_product(transposed ? "transposed" : "forward", y, expected);
      else
        expect(y.gaps_intact(), "wrote beside y");
    }
  }
}

}  // namespace

void test_damage(const fxsparse::Format& format, const Weight& weight, const Kernels& kernels,
                 Random& random) {
  const Blob blob = pack(format, to_dense(weight, Order::kRows, false));
  const bool large = weight.dense_bytes() > 1'000'000;
  for (int i = 0; i < (large ? 2 : kAttempts); ++i) {
    const Scope scope("damage %d", i);
    const Memory changed = damaged(blob.memory, random);
    const std::optional<Packed> packed = accepted(changed);
    // A header may have become one of another format or type, whose kernels are not at hand.
    if (!packed || packed->format != &format || packed->view.value != weight.type->value) continue;
    expect(packed->view.cols <= int64_t{1} << 32, "more columns than entries can tell apart");
    if (packed->view.rows != weight.shape.rows || packed->view.cols > 100'000) continue;
    test_use(*packed, kernels, random);
  }
}

}  // namespace native
