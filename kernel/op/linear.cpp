#include "op/linear.h"

#include <algorithm>
#include <atomic>

#include "op/nonfinite.h"
#include "op/schedule.h"
#include "op/scratch.h"
#include "pool/pool.h"

namespace fxsparse {
namespace {

// The input a thread made ready last, so that it does so once a call and panel.
struct Input {
  uint64_t call = 0;
  int64_t panel = 0;
  const void* data = nullptr;
  const uint64_t* bad = nullptr;  // where it is not finite, if anywhere
  Scratch buffer;
  Scratch bad_buffer;
};
thread_local Input input;
thread_local Scratch output;

uint64_t next_call() {
  static std::atomic<uint64_t> calls{0};
  return calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

// One call of linear or linear_transposed, and what a chunk of it needs.
class Multiply {
 public:
  Multiply(const Kernel& kernel, const LinearCall& call, bool transposed)
      : kernel_(kernel),
        call_(call),
        view_(call.packed->view),
        transposed_(transposed),
        in_length_(transposed ? view_.rows : view_.cols),
        out_length_(transposed ? view_.cols : view_.rows),
        value_bytes_(value_bytes(view_.value)) {}

  void run() {
    if (call_.batch == 0 || out_length_ == 0) return;
    panels_ = make_panels(kernel_, call_.batch, in_length_);
    const double cut_ns = transposed_ ? kNsPerColumnCut * static_cast<double>(view_.rows) : 0;
    const int threads = choose_threads(view_.nonzeros, call_.batch, cut_ns, call_.threads);
    parts_ = choose_parts(threads, panels_.count, (out_length_ + kRowGroup - 1) / kRowGroup,
                          transposed_ ? kChunksPerThreadTransposed : kChunksPerThread);
    if (transposed_)
      parts_ =
          std::max(parts_, (out_length_ * lane_bytes(panels_.width(0)) - 1) / kOutputBytes + 1);
    // A pool's job has at most 2^16 chunks. Panels of a larger batch share them.
    const int64_t chunks = panels_.count * parts_;
    const int jobs = static_cast<int>(chunks < kMostChunks ? chunks : kMostChunks);
    id_ = next_call();
    parallel_for(threads, jobs, [&](int job) {
      for (int64_t c = chunks * job / jobs; c < chunks * (job + 1) / jobs; ++c)
        run_chunk(c / parts_, c % parts_);
    });
  }

 private:
  static constexpr int kMostChunks = 1 << 15;

  int64_t cut(int64_t part) const {
    if (part == 0) return 0;
    if (!transposed_) return call_.packed->format->row_cut(view_, part, parts_);
    const int64_t groups = (out_length_ + kRowGroup - 1) / kRowGroup;
    const int64_t column = groups * part / parts_ * kRowGroup;
    return column < out_length_ ? column : out_length_;
  }

  const uint8_t* in_row(int64_t row) const {
    return static_cast<const uint8_t*>(call_.x) + row * call_.x_stride * value_bytes_;
  }
  uint8_t* out_row(int64_t row) const {
    return static_cast<uint8_t*>(call_.y) + row * call_.y_stride * value_bytes_;
  }

  void run_chunk(int64_t panel, int64_t part) {
    const int64_t begin = cut(part), end = cut(part + 1);
    if (begin == end) return;
    const int64_t first = panels_.first_row(panel), rows = panels_.rows(panel);
    const int width = panels_.width(panel);
    prepare_input(panel, first, rows);
    if (width == 0)
      multiply_one(first, begin, end);
    else
      multiply_panel(width, first, rows, begin, end);
    if (input.bad == nullptr) return;
    const Format& format = *call_.packed->format;
    restore_dropped_nans(view_, transposed_ ? format.missing_in_cols : format.missing_in_rows,
                         input.bad, out_row(first), call_.y_stride, begin, end);
  }

  // Null if all is finite. A panel has at most 64 rows: kMaxVectors of 16 lanes.
  const uint64_t* find_nonfinite(int64_t first, int64_t rows) const {
    uint64_t* bad = nullptr;
    for (int row = 0; row < rows; ++row) {
      if (kernel_.all_finite(in_row(first + row), in_length_)) continue;
      if (bad == nullptr) {
        bad = static_cast<uint64_t*>(input.bad_buffer.reserve(in_length_ * sizeof *bad));
        std::fill(bad, bad + in_length_, 0);
      }
      mark_nonfinite(view_.value, in_row(first + row), in_length_, row, bad);
    }
    return bad;
  }

  void prepare_input(int64_t panel, int64_t first, int64_t rows) {
    if (input.call == id_ && input.panel == panel) return;
    input.call = 0;
    input.bad = find_nonfinite(first, rows);
    const int width = panels_.width(panel);
    if (width > 0) {
      void* data = input.buffer.reserve(in_length_ * lane_bytes(width));
      kernel_.pack(in_row(first), call_.x_stride, rows, in_length_, width, data);
      input.data = data;
    } else if (computes_in_stored_type()) {
      input.data = in_row(first);
    } else {
      void* data = input.buffer.reserve(in_length_ * kernel_.compute_bytes);
      kernel_.widen(in_row(first), in_length_, data);
      input.data = data;
    }
    input.call = id_;
    input.panel = panel;
  }

  bool computes_in_stored_type() const { return kernel_.compute_bytes == value_bytes_; }
  int64_t lane_bytes(int width) const {
    return width * kernel_.vector_lanes * kernel_.compute_bytes;
  }

  void multiply_one(int64_t row, int64_t begin, int64_t end) {
    if (!transposed_)
      return kernel_.multiply_one(view_, input.data, call_.bias, out_row(row), begin, end);
    uint8_t* y = out_row(row) + begin * value_bytes_;
    if (computes_in_stored_type())
      return kernel_.multiply_transposed_one(view_, input.data, y, begin, end);
    void* out = output.reserve((end - begin) * kernel_.compute_bytes);
    kernel_.multiply_transposed_one(view_, input.data, out, begin, end);
    kernel_.narrow(out, end - begin, y);
  }

  void multiply_panel(int width, int64_t first, int64_t rows, int64_t begin, int64_t end) {
    if (!transposed_)
      return kernel_.multiply(view_, input.data, rows, width, call_.bias, out_row(first),
                              call_.y_stride, begin, end);
    void* out = output.reserve((end - begin) * lane_bytes(width));
    kernel_.multiply_transposed(view_, input.data, width, out, begin, end);
    kernel_.unpack(out, rows, end - begin, width, out_row(first) + begin * value_bytes_,
                   call_.y_stride);
  }

  const Kernel& kernel_;
  const LinearCall& call_;
  const PackedView& view_;
  const bool transposed_;
  const int64_t in_length_;
  const int64_t out_length_;
  const int64_t value_bytes_;
  Panels panels_;
  int64_t parts_ = 1;
  uint64_t id_ = 0;
};

}  // namespace

void linear(const Kernel& kernel, const LinearCall& call) { Multiply(kernel, call, false).run(); }

void linear_transposed(const Kernel& kernel, const LinearCall& call) {
  Multiply(kernel, call, true).run();
}

}  // namespace fxsparse
