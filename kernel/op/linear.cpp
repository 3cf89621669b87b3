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

  double expected_ns() const {
    // Every format is decoded to CSR for the transposed product.
    const FormatId format = transposed_ ? FormatId::kCsr : packed_.header.format;
    return fxsparse::expected_ns(call_.isa, format, view_.rows, view_.cols, view_.nonzeros,
                                 call_.batch);
  }

  // Cuts the work into about so many chunks; more where a chunk's result would leave the cache.
  void cut_work(double chunks) {
    panels_ = transposed_ ? make_transposed_panels(ops_, call_.batch, in_length_)
                          : make_panels(kernel_, view_, call_.batch);
    parts_ = choose_parts(chunks, panels_.count, (out_length_ + kRowGroup - 1) / kRowGroup);
    const auto keep_below = [&](int64_t bytes, int64_t most) {
      parts_ = std::max(parts_, (bytes - 1) / most + 1);
    };
    if (transposed_) keep_below(out_length_ * lane_bytes(panels_.width(0)), kOutputBytes);
    const int64_t rows_bytes = out_length_ * panels_.rows(0) * value_bytes_;
    if (call_.y_planes) keep_below(rows_bytes, kResultBytes);
    if (!call_.epilogue.empty()) keep_below(rows_bytes, kEpilogueBytes);
  }

  // Whether a thread's input serves both. What few rows are made into depends on the format.
  bool same_input(const Multiply& other) const {
    const bool few = panels_.wide < panels_.count;
    return panels_ == other.panels_ && (!few || (kernel_.prepare_few == other.kernel_.prepare_few &&
                                                 kernel_.few_bytes == other.kernel_.few_bytes));
  }
  void share_input(const Multiply* other) { id_ = other ? other->id_ : next_call(); }
  bool shares_input(const Multiply& other) const { return id_ == other.id_; }

  int64_t panels() const { return panels_.count; }
  int64_t parts() const { return parts_; }

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

 private:
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

// A pool's job has at most 2^16 chunks. More of them share one.
constexpr int64_t kMostChunks = 1 << 15;

// Runs all chunks of `count` multiplies, those that share an input one after the other for each
// panel.
void run(Multiply* list, int count, const LinearCall& call, int chunks_per_thread, double cut_ns) {
  if (call.batch == 0) return;
  double total_ns = 0;
  for (int i = 0; i < count; ++i) total_ns += list[i].expected_ns();
  const int threads = choose_threads(total_ns, cut_ns, call.threads, call.more);
  int64_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    const double share = total_ns > 0 ? list[i].expected_ns() / total_ns : 1;
    list[i].cut_work(threads == 1 ? 1 : threads * chunks_per_thread * share);
    const Multiply* same = std::find_if(
        list, list + i, [&](const Multiply& other) { return list[i].same_input(other); });
    list[i].share_input(same == list + i ? nullptr : same);
    chunks += list[i].panels() * list[i].parts();
  }

  // Of the multiplies that share list[i]'s input: chunks of one panel; 0 if an earlier one leads.
  const auto parts_of_panel = [&](int i) {
    int64_t parts = 0;
    for (int j = 0; j < count; ++j) {
      if (!list[i].shares_input(list[j])) continue;
      if (j < i) return int64_t{0};
      parts += list[j].parts();
    }
    return parts;
  };
  const auto run_chunk = [&](int64_t chunk) {
    for (int i = 0; i < count; ++i) {
      const int64_t parts = parts_of_panel(i);
      if (chunk >= parts * list[i].panels()) {
        chunk -= parts * list[i].panels();
        continue;
      }
      const int64_t panel = chunk / parts;
      int64_t part = chunk % parts;
      int j = i;
      for (; !list[i].shares_input(list[j]) || part >= list[j].parts(); ++j)
        if (list[i].shares_input(list[j])) part -= list[j].parts();
      return list[j].run_chunk(panel, part);
    }
  };
  const int64_t jobs = std::min(chunks, kMostChunks);
  parallel_for(threads, static_cast<int>(jobs), call.more, [&](int job) {
    for (int64_t c = chunks * job / jobs; c < chunks * (job + 1) / jobs; ++c) run_chunk(c);
  });
}

}  // namespace

void linear(const Kernel& kernel, const LinearCall& call) {
  Multiply multiply(kernel, call, false);
  run(&multiply, 1, call, kChunksPerThread, 0);
}

void linears(const std::vector<LinearCall>& calls) {
  std::vector<Multiply> list;
  list.reserve(calls.size());
  for (const LinearCall& call : calls) list.emplace_back(kernel_of(call), call, false);
  run(list.data(), static_cast<int>(list.size()), calls[0], kChunksPerThread, 0);
}

void linear_transposed(const Kernel& kernel, const LinearCall& call) {
  Multiply multiply(kernel, call, true);
  run(&multiply, 1, call, kChunksPerThreadTransposed,
      kNsPerColumnCut * static_cast<double>(call.packed->view.rows));
}

}  // namespace fxsparse
