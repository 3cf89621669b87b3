#pragma once

// Compressed sparse rows. Sections: row offsets (rows + 1 of offset_width), column indices
// (nonzeros of index_width, strictly increasing within a row), values (nonzeros, the weight's
// bits).

#include "format/format.h"

namespace fxsparse {

extern const Format kCsrFormat;

constexpr int kCsrOffsets = 0;
constexpr int kCsrIndices = 1;
constexpr int kCsrValues = 2;
constexpr int kCsrSections = 3;

// The narrowest index that holds cols - 1.
Width csr_index_width(uint64_t cols);

void csr_pack(const DenseView& dense, const Header& header, uint8_t* out);

}  // namespace fxsparse
