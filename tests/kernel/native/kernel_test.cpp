// Each kernel by itself, in buffers of exactly its size. linear() has larger ones, and cuts rows
// only where the work is worth it.

#include <algorithm>
#include <cstring>

#include "matrix.h"
#include "report.h"
#include "tests.h"

namespace native {
namespace {

using fxsparse::Kernel;

// x as a kernel wants it: 0 vectors for a few rows, or a panel.
Memory prepare(const Kernel& kernel, const Matrix& x, int vectors) {
  if (vectors > 0) {
    const int64_t lanes = static_cast<int64_t>(vectors) * kernel.ops->lanes;
    Memory panel(x.cols * lanes * kernel.ops->compute_bytes);
    kernel.ops->pack(x.memory.data(), x.stride, x.rows, x.cols, vectors, panel.data());
    expect(panel.intact(), "pack wrote beside the panel");
    return panel;
  }
  Memory few(kernel.few_bytes(x.rows, x.cols));
  if (few.bytes() > 0) kernel.prepare_few(x.memory.data(), x.stride, x.rows, x.cols, few.data());
  expect(few.intact(), "prepare_few wrote beside its output");
  return few;
}

Matrix multiply(const Blob& blob, const Kernel& kernel, const Matrix& x, const Memory& input,
                int vectors, const Matrix& bias, int64_t parts) {
  const fxsparse::PackedView& view = blob.packed.view;
  Matrix y = make_matrix(*x.type, x.rows, view.rows, 1);
  const Memory scratch(vectors == 0 ? 0 : (kernel.scratch_bytes(view, vectors) + 63) / 64 * 64);
  int64_t begin = 0;
  for (int64_t part = 1; part <= parts; ++part) {
    const int64_t end = blob.packed.format->row_cut(view, part, parts);
    if (begin == end) continue;
    if (vectors == 0)
      kernel.multiply_few(view, input.bytes() == 0 ? x.memory.data() : input.data(), x.rows,
                          bias.memory.data(), y.memory.data(), y.stride, begin, end);
    else
      kernel.multiply(view, input.data(), x.rows, vectors, bias.memory.data(), y.memory.data(),
                      y.stride, begin, end, scratch.data());
    // Rows after `end` are another thread's. Looked at for few parts, as it takes longer than they.
    bool untouched = true;
    for (int64_t b = 0; parts < 4 && b < y.rows; ++b)
      for (const uint8_t* p = y.row(b) + end * y.type->bytes;
           p != y.row(b) + y.cols * y.type->bytes; ++p)
        untouched &= *p == 0xff;
    expect(untouched, "rows beyond %lld were written", static_cast<long long>(end));
    begin = end;
  }
  expect(scratch.intact(), "wrote beside the scratch memory");
  expect(y.gaps_intact(), "wrote between or beside the rows of y");
  return y;
}

// Rows of y from what a kernel writes as a panel.
Matrix multiply_to_panel(const Blob& blob, const Kernel& kernel, const Matrix& x,
                         const Memory& input, int vectors, const Matrix& bias, int64_t parts) {
  const fxsparse::PackedView& view = blob.packed.view;
  Memory panel((view.rows + 1) * vectors * kernel.ops->lanes * kernel.ops->compute_bytes);
  int64_t begin = 0;
  for (int64_t part = 1; part <= parts; ++part) {
    const int64_t end = blob.packed.format->row_cut(view, part, parts);
    if (begin < end)
      kernel.multiply_to_panel(view, input.data(), vectors, bias.memory.data(), panel.data(), begin,
                               end);
    begin = end;
  }
  expect(panel.intact(), "wrote beside the panel");
  Matrix y = make_matrix(*x.type, x.rows, view.rows, 1);
  kernel.ops->unpack(panel.data(), y.rows, y.cols, vectors, y.memory.data(), y.stride);
  return y;
}

void test_width(const Blob& blob, const Weight& weight, const Kernel& kernel, int64_t batch,
                int vectors, Random& random) {
  const Scope scope("%lld rows as %d vectors", static_cast<long long>(batch), vectors);
  const Matrix x = random_matrix(*weight.type, batch, weight.shape.cols, 2, random);
  const Matrix bias = random_matrix(*weight.type, 1, weight.shape.rows, 0, random);
  const Memory input = prepare(kernel, x, vectors);
  const Matrix whole = multiply(blob, kernel, x, input, vectors, bias, 1);
  if (!check_product("kernel", whole, forward(weight, x, &bias))) return;
  for (int64_t parts : {2, 3, 64})
    expect(multiply(blob, kernel, x, input, vectors, bias, parts).memory == whole.memory,
           "%lld parts give other bits than one", static_cast<long long>(parts));
  for (int64_t parts : {1, 3}) {
    if (vectors == 0 || !kernel.multiply_to_panel) return;
    const Matrix y = multiply_to_panel(blob, kernel, x, input, vectors, bias, parts);
    expect(y.memory == whole.memory, "a panel of %lld parts has other bits than rows",
           static_cast<long long>(parts));
  }
}

}  // namespace

void test_cuts_of_kernels(const Blob& blob, const Weight& weight, const Kernels& kernels,
                          Random& random) {
  for (const Tested& tested : kernels) {
    const Scope isa("%s", tested.isa_name);
    const Kernel& kernel = *tested.kernel;
    expect(kernel.most_vectors >= 1 && kernel.most_vectors <= fxsparse::kMaxVectors &&
               kernel.most_few <= fxsparse::kMaxFew && kernel.leftover_few <= kernel.most_few &&
               kernel.most_vectors * kernel.ops->lanes <= fxsparse::kMaxPanelRows,
           "the kernel's limits");
    const int vectors = 1 + static_cast<int>(below(random, kernel.most_vectors));
    // Wide weights take long.
    const int64_t most = weight.shape.cols > 10'000 ? 3 : fxsparse::kMaxPanelRows;
    const int64_t lanes = static_cast<int64_t>(vectors) * kernel.ops->lanes;
    test_width(blob, weight, kernel, 1 + below(random, std::min(lanes, most)), vectors, random);
    const int64_t few = std::min<int64_t>(kernel.most_few, most);
    if (few > 0) test_width(blob, weight, kernel, 1 + below(random, few), 0, random);
  }
}

}  // namespace native
