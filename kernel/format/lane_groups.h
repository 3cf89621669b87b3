#pragma once

// What the formats whose rows are the lanes of a vector share: groups of 16 rows, each a stream of
// u16 masks (bit r: row r of the group has a value here) and of packed values.

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>

#include "error.h"
#include "format/access.h"
#include "format/dense.h"
#include "pool/pool.h"

namespace fxsparse {

inline int64_t group_count(int64_t rows) { return (rows + kRowGroup - 1) / kRowGroup; }

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

inline void finish_layout(const Header& header, const SectionPlacer& placer, Layout& layout) {
  layout.bytes = placer.end();
  if (placer.overflow())
    fail("packed size: expected a length below 2^63 bytes, got %" PRIu64 " x %" PRIu64
         " with %" PRIu64 " nonzeros",
         header.rows, header.cols, header.nonzeros);
}

// Zeroes what may be padding at the end of each section: to be called before they are filled.
inline void clear_section_ends(uint8_t* out, const Layout& layout, int sections) {
  for (int i = 0; i < sections; ++i) {
    const uint64_t end = i + 1 < sections ? layout.section[i + 1] : layout.bytes;
    clear_padding(out, end == layout.section[i] ? end : end - kAlignment, end);
  }
}

// Calls f(begin, end) for ranges of groups, on as many threads as pay for `bytes`.
template <class F>
void for_groups(int64_t groups, int64_t bytes, F&& f) {
  const int threads = threads_for_bytes(bytes);
  const int64_t chunks = std::min<int64_t>(groups, threads == 1 ? 1 : threads * 4);
  if (chunks == 0) return;
  parallel_for(threads, static_cast<int>(chunks),
               [&](int chunk) { f(groups * chunk / chunks, groups * (chunk + 1) / chunks); });
}

// check(group) throws Error; of several, that of the first group is thrown here.
template <class F>
void check_groups(int64_t groups, int64_t bytes, F&& check) {
  std::atomic<int64_t> first_bad{groups};
  for_groups(groups, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      try {
        check(g);
      } catch (const Error&) {
        int64_t seen = first_bad.load();
        while (g < seen && !first_bad.compare_exchange_weak(seen, g)) {
        }
        return;
      }
    }
  });
  const int64_t bad = first_bad.load();
  if (bad == groups) return;
  check(bad);
  fail("packed group %" PRId64 ": changed while it was checked", bad);
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
  const int64_t target = static_cast<int64_t>(static_cast<__int128>(cost(groups)) * part / parts);
  int64_t low = 0, high = groups;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return std::min(rows, low * kRowGroup);
}

}  // namespace fxsparse
