#pragma once

// Typed access to the sections of a CSR blob, which may start at any address.

#include <cstring>

#include "format/csr.h"

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

inline int64_t csr_offset(const PackedView& view, int64_t row) {
  const uint8_t* offsets = view.section[kCsrOffsets];
  return view.offset_width == Width::k32 ? load_at<uint32_t>(offsets, row)
                                         : static_cast<int64_t>(load_at<uint64_t>(offsets, row));
}

}  // namespace fxsparse
