#pragma once

// What the formats whose rows are the lanes of a vector share: groups of 16 rows, each a stream of
// u16 masks (bit r: row r of the group has a value here) and of packed values.

#include <algorithm>
#include <cstring>

#include "format/access.h"
#include "format/units.h"

namespace fxsparse {

inline int64_t group_count(int64_t rows) { return (rows + kRowGroup - 1) / kRowGroup; }

// check(group) throws Error; of several, that of the first group is thrown here.
template <class F>
void check_groups(int64_t groups, int64_t bytes, F&& check) {
  const int64_t bad = check_units(groups, bytes, check);
  if (bad != groups) fail("packed group %" PRId64 ": changed while it was checked", bad);
}

// block[k][r] <- the bits of column k0 + k, row r of the group; zeros where there is no such row.
template <class Bits>
void read_block(const DenseView& dense, int64_t group, int64_t k0, int cols,
                Bits (*block)[kRowGroup]) {
  const int64_t first = group * kRowGroup;
  const int rows = static_cast<int>(std::min(kRowGroup, dense.rows - first));
  const Bits* data =
      static_cast<const Bits*>(dense.data) + first * dense.row_stride + k0 * dense.col_stride;
  if (rows < kRowGroup) std::memset(block, 0, cols * sizeof *block);
  if (columns_are_contiguous(dense)) {
    for (int k = 0; k < cols; ++k)
      for (int r = 0; r < rows; ++r)
        block[k][r] = data[r * dense.row_stride + k * dense.col_stride];
  } else {
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < cols; ++k)
        block[k][r] = data[r * dense.row_stride + k * dense.col_stride];
  }
}

// The end of part `part` of `parts`, as a row, where cost(g) is what the groups before g cost.
template <class F>
int64_t cut_groups(int64_t rows, int64_t part, int64_t parts, F&& cost) {
  if (part >= parts) return rows;
  const int64_t groups = group_count(rows);
  const int64_t target = cost_of_parts(cost(groups), part, parts);
  return std::min(rows, units_that_cost(groups, target, cost) * kRowGroup);
}

}  // namespace fxsparse
