#include <algorithm>
#include <atomic>
#include <cinttypes>

#include "error.h"
#include "format/csr.h"
#include "format/csr_access.h"
#include "format/dense.h"
#include "format/units.h"

namespace fxsparse {
namespace {

// Calls f(begin, end) for blocks of whole strips of rows.
template <class F>
void for_row_blocks(int64_t rows, int64_t bytes, F&& f) {
  for_ranges((rows + kStripRows - 1) / kStripRows, bytes, [&](int64_t begin, int64_t end) {
    f(begin * kStripRows, std::min(rows, end * kStripRows));
  });
}

template <class Bits, class Index, class Offset>
struct Packer {
  const DenseView& dense;
  uint8_t* offsets;
  uint8_t* indices;
  uint8_t* values;

  const Bits* at(int64_t row) const {
    return static_cast<const Bits*>(dense.data) + row * dense.row_stride;
  }

  // offsets[row + 1] = nonzeros of the row.
  void count(int64_t begin, int64_t end) const {
    if (!columns_are_contiguous(dense)) {
      for (int64_t row = begin; row < end; ++row) {
        Offset n = 0;
        for (int64_t k = 0; k < dense.cols; ++k) n += is_nonzero(at(row)[k * dense.col_stride]);
        store_at<Offset>(offsets, row + 1, n);
      }
      return;
    }
    for (int64_t first = begin; first < end; first += kStripRows) {
      const int64_t n = std::min(kStripRows, end - first);
      Offset counts[kStripRows] = {};
      for (int64_t k = 0; k < dense.cols; ++k)
        for (int64_t r = 0; r < n; ++r)
          counts[r] += is_nonzero(at(first + r)[k * dense.col_stride]);
      for (int64_t r = 0; r < n; ++r) store_at<Offset>(offsets, first + r + 1, counts[r]);
    }
  }

  // Appends the nonzeros of `n` values of a row, `stride` apart, the first in column k0, at entry
  // `next` of at most `last`. An entry is written before it is known to be nonzero and overwritten
  // if it is not: no branch to mispredict. A row that is full takes no more, so nothing is ever
  // written beyond its end.
  Offset append(const Bits* run, int64_t stride, int64_t n, int64_t k0, Offset next,
                Offset last) const {
    for (int64_t k = 0; k < n && next != last; ++k) {
      const Bits bits = run[k * stride];
      store_at<Bits>(values, next, bits);
      store_at<Index>(indices, next, static_cast<Index>(k0 + k));
      next += is_nonzero(bits);
    }
    return next;
  }

  // Whether the row had all the nonzeros that were counted.
  bool fill_row(int64_t row) const {
    const Offset end = load_at<Offset>(offsets, row + 1);
    return end ==
           append(at(row), dense.col_stride, dense.cols, 0, load_at<Offset>(offsets, row), end);
  }

  // A strip of rows whose columns are contiguous, by way of a block that holds them row by row.
  bool fill_strip(int64_t first, int64_t n) const {
    constexpr int64_t kBlock = 128;
    Bits block[kStripRows][kBlock];
    Offset next[kStripRows];
    for (int64_t r = 0; r < n; ++r) next[r] = load_at<Offset>(offsets, first + r);
    for (int64_t k0 = 0; k0 < dense.cols; k0 += kBlock) {
      const int64_t length = std::min(kBlock, dense.cols - k0);
      for (int64_t k = 0; k < length; ++k)
        for (int64_t r = 0; r < n; ++r) block[r][k] = at(first + r)[(k0 + k) * dense.col_stride];
      for (int64_t r = 0; r < n; ++r)
        next[r] = append(block[r], 1, length, k0, next[r], load_at<Offset>(offsets, first + r + 1));
    }
    bool full = true;
    for (int64_t r = 0; r < n; ++r) full &= next[r] == load_at<Offset>(offsets, first + r + 1);
    return full;
  }

  // False if the weight did not have the same nonzeros whenever they were looked at. Whatever
  // somebody else writes to it meanwhile, entries stay within `nonzeros`.
  bool run(uint64_t nonzeros) const {
    const int64_t bytes = dense.rows * dense.cols * static_cast<int64_t>(sizeof(Bits));
    for_row_blocks(dense.rows, bytes, [&](int64_t begin, int64_t end) { count(begin, end); });
    uint64_t sum = 0;
    store_at<Offset>(offsets, 0, 0);
    for (int64_t row = 1; row <= dense.rows; ++row) {
      sum += load_at<Offset>(offsets, row);
      store_at<Offset>(offsets, row, static_cast<Offset>(sum));
    }
    if (sum != nonzeros) return false;
    std::atomic<bool> same{true};
    for_row_blocks(dense.rows, bytes, [&](int64_t begin, int64_t end) {
      bool full = true;
      if (columns_are_contiguous(dense))
        for (int64_t row = begin; row < end; row += kStripRows)
          full &= fill_strip(row, std::min(kStripRows, end - row));
      else
        for (int64_t row = begin; row < end; ++row) full &= fill_row(row);
      if (!full) same = false;
    });
    return same;
  }
};

}  // namespace

void csr_pack(const DenseView& dense, const Header& header, uint8_t* out) {
  const Layout layout = kCsrFormat.layout(header);
  const uint64_t nonzeros = header.nonzeros;
  std::memcpy(out, &header, sizeof header);
  clear_section_ends(out, layout, kCsrSections);
  const bool same = with_bits(header.value, [&](auto bits) {
    return with_index(header.index_width, [&](auto index) {
      return with_offset(header.offset_width, [&](auto offset) {
        return Packer<decltype(bits), decltype(index), decltype(offset)>{
            dense, out + layout.section[kCsrOffsets], out + layout.section[kCsrIndices],
            out + layout.section[kCsrValues]}
            .run(nonzeros);
      });
    });
  });
  if (!same) fail_changed(nonzeros);
}

}  // namespace fxsparse
