#include "op/mlp.h"

#include <algorithm>

#include "op/cost.h"
#include "op/schedule.h"
#include "op/scratch.h"
#include "pool/pool.h"

namespace fxsparse {
namespace {

// Of a thread: x and the hidden values as panels or rows, what the up projection multiplies them
// by, working memory of the kernels, rows on their way to a panel.
thread_local Scratch input;
thread_local Scratch hidden;
thread_local Scratch factor;
thread_local Scratch working;
thread_local Scratch rows_of_part;

// Results are cut so that what an activation or a sum is applied to is still in the cache.
constexpr int64_t kPartBytes = 128 << 10;
constexpr int64_t kRowPadding = 16;  // so that rows do not share a few lines of the cache

// Threads take whole panels where that leaves none of them idle for long.
bool spreads(int64_t panels, int threads) {
  const int64_t rounds = (panels + threads - 1) / threads;
  return 8 * rounds * threads <= 9 * panels;
}

class Mlp {
 public:
  explicit Mlp(const MlpCall& call)
      : call_(call),
        first_(call.gate.packed ? call.gate : call.up),
        ops_(*kernel(first_).ops),
        in_length_(first_.packed->view.cols),
        hidden_length_(first_.packed->view.rows),
        value_bytes_(value_bytes(first_.packed->view.value)) {}

  void run() {
    if (call_.batch == 0) return;
    panels_ = panels_of(first_);
    const bool same_panels = panels_of(call_.up) == panels_ && panels_of(call_.down) == panels_;
    double ns = expected_ns(call_.up) + expected_ns(call_.down);
    if (call_.gate.packed) ns += expected_ns(call_.gate);
    const int threads = choose_threads(ns, 0, call_.threads, call_.more);
    int64_t done = 0;
    if (same_panels && panels_.wide > 0 && spreads(panels_.wide, threads)) {
      const int jobs = static_cast<int>(std::min<int64_t>(panels_.wide, 1 << 15));
      const bool more = call_.more || panels_.wide < panels_.count;
      parallel_for(threads, jobs, more, [&](int job) {
        const int64_t end = panels_.wide * (job + 1) / jobs;
        for (int64_t panel = panels_.wide * job / jobs; panel < end; ++panel) run_panel(panel);
      });
      done = panels_.first_row(panels_.wide);
      if (panels_.wide == panels_.count) return;
    }
    run_rows(done, call_.batch - done, call_.threads);
  }

 private:
  const Kernel& kernel(const Weight& weight) const {
    const Packed& packed = *weight.packed;
    return find_kernel(packed.header.format, call_.isa, packed.view.value);
  }
  Panels panels_of(const Weight& weight) const {
    return make_panels(kernel(weight), weight.packed->view, call_.batch);
  }
  double expected_ns(const Weight& weight) const {
    const PackedView& view = weight.packed->view;
    return fxsparse::expected_ns(call_.isa, weight.packed->header.format, view.rows, view.cols,
                                 view.nonzeros, call_.batch);
  }
  static const uint8_t* row(const void* data, int64_t row, int64_t stride_bytes) {
    return static_cast<const uint8_t*>(data) + row * stride_bytes;
  }

  // Calls f(begin, end) for parts of a weight's rows whose results have at most kPartBytes.
  template <class F>
  static void for_parts(const Weight& weight, int64_t bytes_of_row, F&& f) {
    const Packed& packed = *weight.packed;
    const int64_t rows = packed.view.rows;
    const int64_t groups = std::max<int64_t>((rows + kRowGroup - 1) / kRowGroup, 1);
    const int64_t parts = std::min(groups, rows * bytes_of_row / kPartBytes + 1);
    int64_t begin = 0;
    for (int64_t part = 1; part <= parts; ++part) {
      const int64_t end = packed.format->row_cut(packed.view, part, parts);
      if (begin < end) f(begin, end);
      begin = end;
    }
  }

  // ---- one multiply after the other, for all rows -----------------------------------------------

  void run_rows(int64_t first, int64_t rows, int threads) const {
    const int64_t bytes = rows * hidden_length_ * value_bytes_;
    LinearCall up{};
    up.x = row(call_.x, first, call_.x_stride * value_bytes_);
    up.x_stride = call_.x_stride;
    up.y_stride = up.other_stride = hidden_length_;
    up.more = true;
    up.epilogue = call_.activation;
    if (call_.gate.packed) {
      LinearCall other = up;
      other.y = factor.reserve(bytes);
      other.epilogue = {};
      multiply(call_.up, rows, threads, other);
      up.other = other.y;
      up.epilogue.join = Epilogue::Join::kMultiply;
    }
    up.y = hidden.reserve(bytes);
    multiply(first_, rows, threads, up);

    LinearCall down{};
    down.x = up.y;
    down.x_stride = hidden_length_;
    down.y = out_row(first);
    down.y_stride = call_.y_stride;
    down.more = call_.more;
    if (call_.residual) {
      down.epilogue.join = Epilogue::Join::kAdd;
      down.other = residual_row(first);
      down.other_stride = call_.residual_stride;
    }
    multiply(call_.down, rows, threads, down);
  }

  void multiply(const Weight& weight, int64_t rows, int threads, LinearCall& call) const {
    call.packed = weight.packed;
    call.bias = weight.bias;
    call.batch = rows;
    call.isa = call_.isa;
    call.threads = threads;
    linear(kernel_of(call), call);
  }

  uint8_t* out_row(int64_t row) const {
    return static_cast<uint8_t*>(call_.y) + row * call_.y_stride * value_bytes_;
  }
  const uint8_t* residual_row(int64_t first) const {
    return row(call_.residual, first, call_.residual_stride * value_bytes_);
  }

  // ---- a panel from x to y ----------------------------------------------------------------------

  // Where something is not finite, by the way that corrects the result.
  void run_panel(int64_t panel) const {
    const int64_t first = panels_.first_row(panel), rows = panels_.rows(panel);
    if (!multiply_panel(first, rows, panels_.width(panel))) run_rows(first, rows, 1);
  }

  // False, with y not complete, where x or a hidden value is not finite.
  bool multiply_panel(int64_t first, int64_t rows, int width) const {
    const int64_t lanes = static_cast<int64_t>(width) * ops_.lanes;
    const int64_t lane_bytes = lanes * ops_.compute_bytes;
    const int64_t x_stride = call_.x_stride * value_bytes_;
    for (int64_t r = first; r < first + rows; ++r)
      if (!ops_.all_finite(row(call_.x, r, x_stride), in_length_)) return false;
    void* x = input.reserve(in_length_ * lane_bytes);
    ops_.pack(row(call_.x, first, x_stride), call_.x_stride, rows, in_length_, width, x);

    const bool gated = call_.gate.packed != nullptr;
    auto* h = static_cast<uint8_t*>(hidden.reserve((hidden_length_ + 1) * lane_bytes));
    bool finite = true;
    for_parts(first_, lane_bytes, [&](int64_t begin, int64_t end) {
      multiply_to_panel(first_, x, rows, width, h, begin, end);
      finite &= finish(h + begin * lane_bytes, (end - begin) * lanes, nullptr, !gated);
    });
    if (gated)
      for_parts(call_.up, lane_bytes, [&](int64_t begin, int64_t end) {
        auto* part = static_cast<uint8_t*>(factor.reserve((end - begin + 1) * lane_bytes));
        multiply_to_panel(call_.up, x, rows, width, part - begin * lane_bytes, begin, end);
        finite &= finish(h + begin * lane_bytes, (end - begin) * lanes, part, true);
      });
    if (!finite) return false;

    const Kernel& down = kernel(call_.down);
    const PackedView& view = call_.down.packed->view;
    void* scratch = working.reserve(down.scratch_bytes(view, width));
    for_parts(call_.down, call_.residual ? rows * value_bytes_ : 0,
              [&](int64_t begin, int64_t end) {
                down.multiply(view, h, rows, width, call_.down.bias, out_row(first), call_.y_stride,
                              begin, end, scratch);
                for (int64_t r = first; call_.residual && r < first + rows; ++r)
                  ops_.add(out_row(r) + begin * value_bytes_,
                           residual_row(r) + begin * value_bytes_, end - begin);
              });
    return true;
  }

  // out[n] for n in [begin, end), not yet rounded where the format writes panels itself.
  void multiply_to_panel(const Weight& weight, const void* x, int64_t rows, int width, uint8_t* out,
                         int64_t begin, int64_t end) const {
    const Kernel& kernel = this->kernel(weight);
    const PackedView& view = weight.packed->view;
    if (kernel.multiply_to_panel)
      return kernel.multiply_to_panel(view, x, width, weight.bias, out, begin, end);
    const int64_t stride = end - begin + kRowPadding;
    auto* y = static_cast<uint8_t*>(rows_of_part.reserve(rows * stride * value_bytes_));
    kernel.multiply(view, x, rows, width, weight.bias, y - begin * value_bytes_, stride, begin, end,
                    working.reserve(kernel.scratch_bytes(view, width)));
    ops_.pack(y, stride, rows, end - begin, width,
              out + begin * width * ops_.lanes * ops_.compute_bytes);
  }

  // values <- activation(values), or with `other` values * other, each rounded to the stored type
  // first and after. Whether all are finite, if that is asked.
  bool finish(uint8_t* values, int64_t n, const uint8_t* other, bool look) const {
    constexpr int64_t kBlock = 1024;
    const bool widened = ops_.compute_bytes != value_bytes_;
    alignas(64) uint8_t stored[kBlock * sizeof(double)], stored_other[kBlock * sizeof(double)];
    bool finite = true;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      uint8_t* at = values + i * ops_.compute_bytes;
      uint8_t* y = widened ? stored : at;
      if (widened) ops_.narrow(at, count, y);
      if (other) {
        const uint8_t* by = other + i * ops_.compute_bytes;
        if (widened) ops_.narrow(by, count, stored_other);
        ops_.multiply(y, widened ? stored_other : by, count);
      } else {
        apply(ops_, call_.activation, y, nullptr, count);
      }
      if (look) finite &= ops_.all_finite(y, count);
      if (widened) ops_.widen(y, count, at);
    }
    return finite;
  }

  const MlpCall& call_;
  const Weight& first_;  // whose result the activation is applied to
  const VectorOps& ops_;
  const int64_t in_length_;
  const int64_t hidden_length_;
  const int64_t value_bytes_;
  Panels panels_;
};

}  // namespace

void mlp(const MlpCall& call) { Mlp(call).run(); }

}  // namespace fxsparse
