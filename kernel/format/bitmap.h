#pragma once

// Rows in lanes, a mask for every column: the smallest exact form of a weight that is about half
// zeros, and the fastest for a few batch rows. Sections:
//   groups: for each 16 rows where their values start, and the end (offset_width);
//   masks: u16 for (group, column), group after group: bit r = row r of the group has a nonzero;
//   values: the weight's bits, by group, column, row.

#include "format/format.h"

namespace fxsparse {

extern const Format kBitmapFormat;

constexpr int kBitmapGroups = 0;
constexpr int kBitmapMasks = 1;
constexpr int kBitmapValues = 2;
constexpr int kBitmapSections = 3;

void bitmap_pack(const DenseView& dense, const Header& header, uint8_t* out);

}  // namespace fxsparse
