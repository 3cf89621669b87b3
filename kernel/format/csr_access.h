#pragma once

#include "format/access.h"
#include "format/csr.h"

namespace fxsparse {

inline int64_t csr_offset(const PackedView& view, int64_t row) {
  const uint8_t* offsets = view.section[kCsrOffsets];
  return view.offset_width == Width::k32 ? load_at<uint32_t>(offsets, row)
                                         : static_cast<int64_t>(load_at<uint64_t>(offsets, row));
}

}  // namespace fxsparse
