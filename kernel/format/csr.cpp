#include "format/csr.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <vector>

#include "error.h"
#include "format/csr_access.h"
#include "format/dense.h"
#include "pool/pool.h"

namespace fxsparse {
namespace {

void describe(Header& header) {
  header.index_width = csr_index_width(header.cols);
  header.offset_width = csr_offset_width(header.nonzeros);
}

Layout layout(const Header& header) {
  const auto check = [](const char* name, Width expected, Width got) {
    if (expected != got)
      fail("packed %s width: expected %d bytes, got %d", name, static_cast<int>(expected),
           static_cast<int>(got));
  };
  check("index", csr_index_width(header.cols), header.index_width);
  check("offset", csr_offset_width(header.nonzeros), header.offset_width);
  if (header.extent[0] | header.extent[1])
    fail("packed extent: expected zeros for csr, got %" PRIu64 " %" PRIu64, header.extent[0],
         header.extent[1]);

  uint64_t end = sizeof(Header);
  bool overflow = false;
  const auto section = [&](uint64_t count, uint64_t bytes_each) {
    const uint64_t begin = end;
    uint64_t bytes;
    overflow |= __builtin_mul_overflow(count, bytes_each, &bytes);
    overflow |= __builtin_add_overflow(end, bytes, &end);
    overflow |= __builtin_add_overflow(end, kAlignment - 1, &end);
    end &= ~(kAlignment - 1);
    return begin;
  };
  Layout result{};
  result.section[kCsrOffsets] =
      section(header.rows + 1, static_cast<uint64_t>(header.offset_width));
  result.section[kCsrIndices] = section(header.nonzeros, static_cast<uint64_t>(header.index_width));
  result.section[kCsrValues] = section(header.nonzeros, value_bytes(header.value));
  result.bytes = end;
  if (overflow || end > INT64_MAX)
    fail("packed size: expected a length below 2^63 bytes, got %" PRIu64 " x %" PRIu64
         " with %" PRIu64 " nonzeros",
         header.rows, header.cols, header.nonzeros);
  return result;
}

void validate_offsets(const PackedView& view) {
  int64_t previous = csr_offset(view, 0);
  if (previous != 0) fail("csr offsets[0]: expected 0, got %" PRId64, previous);
  for (int64_t row = 0; row < view.rows; ++row) {
    const int64_t next = csr_offset(view, row + 1);
    if (next < previous || next > view.nonzeros)
      fail("csr offsets[%" PRId64 "]: expected %" PRId64 " to %" PRId64 " (nonzeros), got %" PRId64,
           row + 1, previous, view.nonzeros, next);
    previous = next;
  }
  if (previous != view.nonzeros)
    fail("csr offsets[%" PRId64 "]: expected %" PRId64 " (nonzeros), got %" PRId64, view.rows,
         view.nonzeros, previous);
}

// The first entry of the row that is out of order or range, or -1.
template <class Index>
int64_t first_bad_index(const PackedView& view, int64_t row) {
  const uint8_t* indices = view.section[kCsrIndices];
  const int64_t end = csr_offset(view, row + 1);
  int64_t previous = -1;
  for (int64_t i = csr_offset(view, row); i < end; ++i) {
    const int64_t index = load_at<Index>(indices, i);
    if (index <= previous || index >= view.cols) return i;
    previous = index;
  }
  return -1;
}

template <class Index>
void validate_indices(const PackedView& view) {
  const int threads = threads_for_bytes(view.nonzeros * static_cast<int64_t>(sizeof(Index)));
  const int64_t chunks = std::clamp<int64_t>(threads * 4, 1, std::max<int64_t>(view.rows, 1));
  std::atomic<int64_t> first_bad_row{view.rows};
  parallel_for(threads, static_cast<int>(chunks), [&](int chunk) {
    for (int64_t row = view.rows * chunk / chunks; row < view.rows * (chunk + 1) / chunks; ++row) {
      if (first_bad_index<Index>(view, row) < 0) continue;
      int64_t seen = first_bad_row.load();
      while (row < seen && !first_bad_row.compare_exchange_weak(seen, row)) {
      }
      return;
    }
  });
  const int64_t row = first_bad_row.load();
  if (row == view.rows) return;
  const int64_t bad = first_bad_index<Index>(view, row);
  if (bad < 0) fail("csr indices of row %" PRId64 ": changed while they were checked", row);
  fail("csr indices[%" PRId64 "] (row %" PRId64 "): expected less than %" PRId64
       " columns and more than the entry before, got %" PRIu64,
       bad, row, view.cols, static_cast<uint64_t>(load_at<Index>(view.section[kCsrIndices], bad)));
}

void validate(const PackedView& view) {
  validate_offsets(view);
  with_index(view.index_width, [&](auto index) { validate_indices<decltype(index)>(view); });
}

int64_t row_cut(const PackedView& view, int64_t part, int64_t parts) {
  if (part >= parts) return view.rows;
  // A row costs about as much as 16 nonzeros besides its own (loop start, tail, store).
  constexpr int64_t kRowCost = 16;
  const auto cost = [&](int64_t row) { return csr_offset(view, row) + row * kRowCost; };
  const int64_t target =
      static_cast<int64_t>(static_cast<__int128>(cost(view.rows)) * part / parts);
  int64_t low = 0, high = view.rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return std::min(view.rows, (low + kRowGroup / 2) / kRowGroup * kRowGroup);
}

void missing_in_rows(const PackedView& view, const uint64_t* bad, int64_t begin, int64_t end,
                     uint64_t* missing) {
  std::vector<int64_t> columns;  // the bad ones
  uint64_t all = 0;
  for (int64_t k = 0; k < view.cols; ++k) {
    if (bad[k]) columns.push_back(k);
    all |= bad[k];
  }
  std::vector<int64_t> stored(columns.size() + 1);  // those of them that a row stores
  with_index(view.index_width, [&](auto index) {
    using Index = decltype(index);
    int64_t i = csr_offset(view, begin);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t last = csr_offset(view, row + 1);
      size_t n = 0;
      for (; i < last; ++i) {  // no branch to mispredict
        stored[n] = load_at<Index>(view.section[kCsrIndices], i);
        n += bad[stored[n]] != 0;
      }
      stored[n] = -1;
      uint64_t lost = n == 0 ? all : 0;
      size_t s = 0;
      for (size_t c = 0; c < columns.size() && lost != all; ++c) {
        const bool found = columns[c] == stored[s];
        s += found;
        lost |= found ? 0 : bad[columns[c]];
      }
      missing[row - begin] = lost;
    }
  });
}

void missing_in_cols(const PackedView& view, const uint64_t* bad, int64_t begin, int64_t end,
                     uint64_t* missing) {
  std::fill(missing, missing + (end - begin), 0);
  with_index(view.index_width, [&](auto index) {
    using Index = decltype(index);
    uint64_t everywhere = 0;  // batch rows that are in every missing[] already
    for (int64_t row = 0; row < view.rows; ++row) {
      const uint64_t lost = bad[row];
      if ((lost & ~everywhere) == 0) continue;
      // Whatever lies between two stored entries is missing.
      int64_t next = begin;
      const auto miss_until = [&](int64_t column) {
        for (; next < column; ++next) missing[next - begin] |= lost;
      };
      for (int64_t i = csr_offset(view, row); i < csr_offset(view, row + 1); ++i) {
        const int64_t column = load_at<Index>(view.section[kCsrIndices], i);
        if (column < begin) continue;
        if (column >= end) break;
        miss_until(column);
        next = column + 1;
      }
      miss_until(end);
      everywhere = ~uint64_t{0};
      for (int64_t c = 0; c < end - begin; ++c) everywhere &= missing[c];
    }
  });
}

}  // namespace

Width csr_index_width(uint64_t cols) {
  if (cols <= uint64_t{1} << 8) return Width::k8;
  if (cols <= uint64_t{1} << 16) return Width::k16;
  if (cols <= uint64_t{1} << 32) return Width::k32;
  fail("csr: expected at most 2^32 columns, got %" PRIu64, cols);
}

Width csr_offset_width(uint64_t nonzeros) {
  return nonzeros < uint64_t{1} << 32 ? Width::k32 : Width::k64;
}

const Format kCsrFormat = {
    FormatId::kCsr, "csr",    describe, layout,          csr_pack,
    csr_unpack,     validate, row_cut,  missing_in_rows, missing_in_cols,
};

}  // namespace fxsparse
