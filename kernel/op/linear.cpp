#include "op/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "op/cost.h"
#include "op/nonfinite.h"
#include "op/schedule.h"
#include "op/scratch.h"
#include "pool/pool.h"

namespace fxsparse {
namespace {

// The input a thread made ready last, so that it does so once a call and panel. For itself: half a
// panel that another core has just written costs more to fetch than to make. 768 x 3072 with 8
// rows, on two threads, took 112-127 us with one panel made together, 91-94 us so (Sapphire
// Rapids).
struct Input {
  uint64_t call = 0;
  int64_t panel = 0;
  const void* data = nullptr;
  const uint8_t* rows = nullptr;  // as they are; null where they lie apart and are not needed so
  int64_t row_stride = 0;
  int bad_count = 0;  // rows with Inf or NaN
  uint8_t bad_rows[kMaxPanelRows];
  Scratch buffer;
  Scratch gathered;
};
thread_local Input input;
thread_local Scratch output;
thread_local Scratch result;  // rows of y on their way to images
thread_local Scratch result_panel;

// Rows of y that become images wait in a buffer of about this size. Their stride is not a power of
// two, so that they do not share the same few lines of the cache.
constexpr int64_t kResultBytes = 64 << 10;
constexpr int64_t kResultPadding = 16;

// What an epilogue finds in the cache: 128 KB of y with as much of what joins it.
constexpr int64_t kEpilogueBytes = 128 << 10;

// What waking parked workers costs besides what choose_threads takes it to be, unless the next call
// is to find them awake. Without a torch operator before, two threads gain from 60-80 us of work on
// (on Sapphire Rapids, virtual); after one, whose threads spin, 75 us of work took 98 on two
// threads, 110 took 120 and 260 took 190.
constexpr double kNsToWake = 45e3;

uint64_t next_call() {
  static std::atomic<uint64_t> calls{0};
  return calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

// One call of linear or linear_transposed, and what a chunk of it needs.
class Multiply {
 public:
  Multiply(const Kernel& kernel, const LinearCall& call, bool transposed)
      : kernel_(kernel),
        ops_(*kernel.ops),
        call_(call),
        packed_(*call.packed),
        view_(call.packed->view),
        transposed_(transposed),
        in_length_(transposed ? view_.rows : view_.cols),
        out_length_(transposed ? view_.cols : view_.rows),
        value_bytes_(value_bytes(view_.value)) {}

  void run() {
    if (call_.batch == 0 || out_length_ == 0) return;
    panels_ = transposed_ ? make_transposed_panels(ops_, call_.batch, in_length_)
                          : make_panels(kernel_, view_, call_.batch);
    const double cut_ns = (transposed_ ? kNsPerColumnCut * static_cast<double>(view_.rows) : 0) +
                          (call_.more || workers_awake() ? 0 : kNsToWake);
    const int threads = choose_threads(expected_ns(transposed_), cut_ns, call_.threads);
    parts_ = choose_parts(threads, panels_.count, (out_length_ + kRowGroup - 1) / kRowGroup,
                          transposed_ ? kChunksPerThreadTransposed : kChunksPerThread);
    if (transposed_)
      parts_ =
          std::max(parts_, (out_length_ * lane_bytes(panels_.width(0)) - 1) / kOutputBytes + 1);
    if (call_.y_planes)
      parts_ =
          std::max(parts_, (out_length_ * panels_.rows(0) * value_bytes_ - 1) / kResultBytes + 1);
    if (!call_.epilogue.empty())
      parts_ =
          std::max(parts_, (out_length_ * panels_.rows(0) * value_bytes_ - 1) / kEpilogueBytes + 1);
    // A pool's job has at most 2^16 chunks. Panels of a larger batch share them.
    const int64_t chunks = panels_.count * parts_;
    const int jobs = static_cast<int>(chunks < kMostChunks ? chunks : kMostChunks);
    id_ = next_call();
    parallel_for(threads, jobs, call_.more, [&](int job) {
      for (int64_t c = chunks * job / jobs; c < chunks * (job + 1) / jobs; ++c)
        run_chunk(c / parts_, c % parts_);
    });
  }

 private:
  static constexpr int kMostChunks = 1 << 15;

  double expected_ns(bool transposed) const {
    // Every format is decoded to CSR for the transposed product.
    const FormatId format = transposed ? FormatId::kCsr : packed_.header.format;
    return fxsparse::expected_ns(call_.isa, format, view_.rows, view_.cols, view_.nonzeros,
                                 call_.batch);
  }

  int64_t cut(int64_t part) const {
    if (part == 0) return 0;
    if (!transposed_) return packed_.format->row_cut(view_, part, parts_);
    const int64_t groups = (out_length_ + kRowGroup - 1) / kRowGroup;
    const int64_t column = groups * part / parts_ * kRowGroup;
    return column < out_length_ ? column : out_length_;
  }

  const uint8_t* in_row(int64_t row) const {
    return static_cast<const uint8_t*>(call_.x) + row * call_.x_stride * value_bytes_;
  }
  PlaneRows in_planes(int64_t first, int64_t rows) const {
    return {*call_.x_planes, value_bytes_, first, rows, in_length_};
  }
  uint8_t* out_row(int64_t row) const {
    return static_cast<uint8_t*>(call_.y) + row * call_.y_stride * value_bytes_;
  }
  uint8_t* out_channel(int64_t channel) const {
    return static_cast<uint8_t*>(call_.y) + channel * call_.y_planes->channel * value_bytes_;
  }

  void run_chunk(int64_t panel, int64_t part) {
    const int64_t begin = cut(part), end = cut(part + 1);
    if (begin == end) return;
    const int64_t first = panels_.first_row(panel), rows = panels_.rows(panel);
    const int width = panels_.width(panel);
    prepare_input(panel, first, rows);
    if (!call_.y_planes) {
      multiply(width, rows, out_row(first), call_.y_stride, begin, end);
      if (!call_.epilogue.empty()) finish_rows(first, rows, begin, end);
      return;
    }
    const int64_t stride = end - begin + kResultPadding;
    uint8_t* y = static_cast<uint8_t*>(result.reserve(rows * stride * value_bytes_));
    multiply(width, rows, y - begin * value_bytes_, stride, begin, end);
    rows_to_planes(ops_, {*call_.y_planes, value_bytes_, first, rows, end - begin}, y, stride,
                   out_channel(begin), result_panel);
  }

  void finish_rows(int64_t first, int64_t rows, int64_t begin, int64_t end) {
    for (int64_t row = first; row < first + rows; ++row) {
      const uint8_t* other = static_cast<const uint8_t*>(call_.other);
      if (other) other += (row * call_.other_stride + begin) * value_bytes_;
      apply(ops_, call_.epilogue, out_row(row) + begin * value_bytes_, other, end - begin);
    }
  }

  // The prepared rows times the part [begin, end) of the weight; y is where the first row's result
  // is, from its beginning.
  void multiply(int width, int64_t rows, uint8_t* y, int64_t y_stride, int64_t begin, int64_t end) {
    if (transposed_)
      multiply_transposed(width, rows, y, y_stride, begin, end);
    else if (width == 0)
      kernel_.multiply_few(view_, input.data, rows, call_.bias, y, y_stride, begin, end);
    else
      kernel_.multiply(view_, input.data, rows, width, call_.bias, y, y_stride, begin, end,
                       output.reserve(kernel_.scratch_bytes(view_, width)));
    if (input.bad_count == 0) return;
    NonfiniteRows bad;
    bad.count = input.bad_count;
    for (int i = 0; i < bad.count; ++i) {
      bad.x[i] = input.rows + input.bad_rows[i] * input.row_stride * value_bytes_;
      bad.y[i] = y + input.bad_rows[i] * y_stride * value_bytes_;
    }
    if (transposed_)
      restore_dropped_nans(packed_, ops_, bad, begin, end);
    else
      multiply_nonfinite(packed_, ops_, bad, call_.bias, begin, end);
  }

  void prepare_input(int64_t panel, int64_t first, int64_t rows) {
    if (input.call == id_ && input.panel == panel) return;
    input.call = 0;
    const int width = panels_.width(panel);
    find_rows(first, rows, width == 0);
    input.bad_count = 0;
    for (int64_t row = 0; input.rows != nullptr && row < rows; ++row)
      if (!ops_.all_finite(input.rows + row * input.row_stride * value_bytes_, in_length_))
        input.bad_rows[input.bad_count++] = static_cast<uint8_t>(row);
    input.data = prepared(width, first, rows);
    input.call = id_;
    input.panel = panel;
  }

  // Rows of images are gathered only where they are few, or not all finite.
  void find_rows(int64_t first, int64_t rows, bool few) {
    if (call_.x_planes == nullptr) {
      input.rows = in_row(first);
      input.row_stride = call_.x_stride;
      return;
    }
    input.rows = nullptr;
    const PlaneRows planes = in_planes(first, rows);
    if (!few && all_finite(ops_, planes, call_.x)) return;
    void* gathered = input.gathered.reserve(rows * in_length_ * value_bytes_);
    planes_to_rows(planes, call_.x, gathered);
    input.rows = static_cast<const uint8_t*>(gathered);
    input.row_stride = in_length_;
  }

  const void* prepared(int width, int64_t first, int64_t rows) {
    if (width > 0) {
      void* data = input.buffer.reserve(in_length_ * lane_bytes(width));
      if (call_.x_planes != nullptr && input.rows == nullptr)
        planes_to_panel(ops_, in_planes(first, rows), call_.x, width, data);
      else
        ops_.pack(input.rows, input.row_stride, rows, in_length_, width, data);
      return data;
    }
    const int64_t bytes =
        transposed_ ? widened_bytes(in_length_) : kernel_.few_bytes(rows, in_length_);
    if (bytes == 0) return input.rows;
    void* data = input.buffer.reserve(bytes);
    if (transposed_)
      ops_.widen(input.rows, in_length_, data);
    else
      kernel_.prepare_few(input.rows, input.row_stride, rows, in_length_, data);
    return data;
  }

  // Of a row in the computing type; 0 if that is the stored one.
  int64_t widened_bytes(int64_t length) const {
    return ops_.compute_bytes == value_bytes_ ? 0 : length * ops_.compute_bytes;
  }
  int64_t lane_bytes(int width) const {
    return (width == 0 ? 1 : width * ops_.lanes) * ops_.compute_bytes;
  }

  void multiply_transposed(int width, int64_t rows, uint8_t* y, int64_t y_stride, int64_t begin,
                           int64_t end) {
    const int64_t bytes = (end - begin) * lane_bytes(width);
    y += begin * value_bytes_;
    const bool in_place = width == 0 && widened_bytes(1) == 0;
    void* out = in_place ? y : output.reserve(bytes);
    std::memset(out, 0, bytes);
    const auto scatter = [&](const PackedView& csr, int64_t first_row) {
      const uint8_t* in = static_cast<const uint8_t*>(input.data) + first_row * lane_bytes(width);
      if (width == 0)
        ops_.scatter_one(csr, in, out, begin, end);
      else
        ops_.scatter(csr, in, width, out, begin, end);
    };
    if (packed_.format->id == FormatId::kCsr) {
      scatter(view_, 0);
    } else {
      Entries entries;
      for (int64_t row = 0; row < view_.rows; row = entries.first_row + entries.rows) {
        decode_unit(packed_, row, entries);
        scatter(entries.csr(view_), entries.first_row);
      }
    }
    if (width > 0)
      ops_.unpack(out, rows, end - begin, width, y, y_stride);
    else if (!in_place)
      ops_.narrow(out, end - begin, y);
  }

  const Kernel& kernel_;
  const VectorOps& ops_;
  const LinearCall& call_;
  const Packed& packed_;
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
