#include "format/dense.h"

#include <algorithm>
#include <atomic>

#include "format/format.h"
#include "pool/pool.h"

namespace fxsparse {
namespace {

template <class Bits>
int64_t count_run(const Bits* data, int64_t n, int64_t stride) {
  int64_t count = 0;
  if (stride == 1) {
    for (int64_t begin = 0; begin < n; begin += 4096) {
      // A 32-bit inner counter of a bounded block lets the compiler vectorise without widening.
      uint32_t block = 0;
      const int64_t end = std::min(n, begin + 4096);
      for (int64_t i = begin; i < end; ++i) block += is_nonzero(data[i]);
      count += block;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) count += is_nonzero(data[i * stride]);
  }
  return count;
}

}  // namespace

int threads_for_bytes(int64_t bytes) {
  constexpr int64_t kBytesPerThread = 256 << 10;  // ~20 us at 12 GB/s, above a worker's wake-up
  return static_cast<int>(std::clamp<int64_t>(bytes / kBytesPerThread, 1, get_num_threads()));
}

int64_t count_nonzeros(const DenseView& dense) {
  // The order of counting is free, so runs go along the direction with the smaller stride.
  DenseView d = dense;
  if (columns_are_contiguous(d)) {
    std::swap(d.rows, d.cols);
    std::swap(d.row_stride, d.col_stride);
  }
  if (d.rows == 0 || d.cols == 0) return 0;
  return with_bits(d.value, [&](auto bits) {
    using Bits = decltype(bits);
    const Bits* data = static_cast<const Bits*>(d.data);
    const int threads = threads_for_bytes(d.rows * d.cols * static_cast<int64_t>(sizeof(Bits)));
    const int64_t chunks = std::min<int64_t>(d.rows, threads * 4);
    std::atomic<int64_t> total{0};
    parallel_for(threads, static_cast<int>(chunks), [&](int chunk) {
      int64_t count = 0;
      for (int64_t r = d.rows * chunk / chunks; r < d.rows * (chunk + 1) / chunks; ++r)
        count += count_run(data + r * d.row_stride, d.cols, d.col_stride);
      total.fetch_add(count, std::memory_order_relaxed);
    });
    return total.load();
  });
}

}  // namespace fxsparse
