#pragma once

#include "format/access.h"
#include "format/csr.h"

namespace fxsparse {

inline int64_t csr_offset(const PackedView& view, int64_t row) {
  return get_offset(view.section[kCsrOffsets], view.offset_width, row);
}

}  // namespace fxsparse
