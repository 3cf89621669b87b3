#pragma once

// Laying out the sections of a blob one after the other, each on a multiple of kAlignment.

#include <algorithm>
#include <cinttypes>

#include "error.h"
#include "format/format.h"

namespace fxsparse {

class Sections {
 public:
  // Counts come from a file: nothing may overflow.
  void add(uint64_t count, uint64_t bytes_each) {
    uint64_t bytes;
    layout_.section[used_++] = end_;
    overflow_ |= __builtin_mul_overflow(count, bytes_each, &bytes);
    overflow_ |= __builtin_add_overflow(end_, bytes, &end_);
    overflow_ |= __builtin_add_overflow(end_, kAlignment - 1, &end_);
    end_ &= ~(kAlignment - 1);
  }

  // Throws Error if the length does not fit 63 bits.
  Layout finish(const Header& header) {
    layout_.bytes = end_;
    if (overflow_ || end_ > INT64_MAX)
      fail("packed size: expected a length below 2^63 bytes, got %" PRIu64 " x %" PRIu64
           " with %" PRIu64 " nonzeros",
           header.rows, header.cols, header.nonzeros);
    return layout_;
  }

 private:
  Layout layout_{};
  uint64_t end_ = sizeof(Header);
  int used_ = 0;
  bool overflow_ = false;
};

// The bytes between sections are zero, so that equal weights are equal blobs: to be called before
// the `sections` sections are filled.
inline void clear_padding(uint8_t* out, const Layout& layout, int sections) {
  for (int i = 0; i < sections; ++i) {
    const uint64_t end = i + 1 < sections ? layout.section[i + 1] : layout.bytes;
    const uint64_t begin = std::max(layout.section[i], end < kAlignment ? 0 : end - kAlignment);
    std::fill(out + begin, out + end, uint8_t{0});
  }
}

}  // namespace fxsparse
