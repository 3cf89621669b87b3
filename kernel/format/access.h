#pragma once

// Typed access to the sections of a blob, which may start at any address, and their lay-out.

#include <cinttypes>
#include <cstring>

#include "error.h"
#include "format/format.h"

namespace fxsparse {

template <class T>
T load_at(const uint8_t* section, int64_t i) {
  T value;
  std::memcpy(&value, section + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
void store_at(uint8_t* section, int64_t i, T value) {
  std::memcpy(section + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

// Calls f with the unsigned integer an index is stored in.
template <class F>
auto with_index(Width width, F&& f) {
  switch (width) {
    case Width::k8:
      return f(uint8_t{});
    case Width::k16:
      return f(uint16_t{});
    default:
      return f(uint32_t{});
  }
}

// Calls f with the unsigned integer an offset is stored in.
template <class F>
auto with_offset(Width width, F&& f) {
  return width == Width::k32 ? f(uint32_t{}) : f(uint64_t{});
}

// The narrowest offset that holds `most`.
inline Width offset_width_for(uint64_t most) {
  return most < uint64_t{1} << 32 ? Width::k32 : Width::k64;
}

inline int64_t get_offset(const uint8_t* section, Width width, int64_t i) {
  return width == Width::k32 ? load_at<uint32_t>(section, i)
                             : static_cast<int64_t>(load_at<uint64_t>(section, i));
}

inline void put_offset(uint8_t* section, Width width, int64_t i, int64_t value) {
  if (width == Width::k32)
    store_at(section, i, static_cast<uint32_t>(value));
  else
    store_at(section, i, static_cast<uint64_t>(value));
}

// Places sections one after the other.
class SectionPlacer {
 public:
  // Where a section of `count` elements of so many bytes starts.
  uint64_t place(uint64_t count, uint64_t bytes_each) {
    const uint64_t begin = end_;
    uint64_t bytes;
    overflow_ |= __builtin_mul_overflow(count, bytes_each, &bytes);
    overflow_ |= __builtin_add_overflow(end_, bytes, &end_);
    overflow_ |= __builtin_add_overflow(end_, kAlignment - 1, &end_);
    end_ &= ~(kAlignment - 1);
    return begin;
  }
  uint64_t end() const { return end_; }
  bool overflow() const { return overflow_ || end_ > INT64_MAX; }

 private:
  uint64_t end_ = sizeof(Header);
  bool overflow_ = false;
};

inline void finish_layout(const Header& header, const SectionPlacer& placer, Layout& layout) {
  layout.bytes = placer.end();
  if (placer.overflow())
    fail("packed size: expected a length below 2^63 bytes, got %" PRIu64 " x %" PRIu64
         " with %" PRIu64 " nonzeros",
         header.rows, header.cols, header.nonzeros);
}

// The bytes between sections are zero, so that equal weights are equal blobs.
inline void clear_padding(uint8_t* out, uint64_t begin, uint64_t end) {
  std::memset(out + begin, 0, end - begin);
}

// Zeroes what may be padding at the end of each section: to be called before they are filled.
inline void clear_section_ends(uint8_t* out, const Layout& layout, int sections) {
  for (int i = 0; i < sections; ++i) {
    const uint64_t end = i + 1 < sections ? layout.section[i + 1] : layout.bytes;
    clear_padding(out, end == layout.section[i] ? end : end - kAlignment, end);
  }
}

}  // namespace fxsparse
