#include "format/csr.h"

#include <algorithm>
#include <cinttypes>

#include "error.h"
#include "format/csr_access.h"
#include "format/units.h"

namespace fxsparse {
namespace {

int64_t unit_rows(const PackedView&) { return kRowGroup; }

void set_widths(Header& header) {
  header.index_width = csr_index_width(header.cols);
  header.offset_width = offset_width_for(header.nonzeros);
}

void describe(const DenseView&, Header& header) { set_widths(header); }

Layout layout(const Header& header) {
  const auto check = [](const char* name, Width expected, Width got) {
    if (expected != got)
      fail("packed %s width: expected %d bytes, got %d", name, static_cast<int>(expected),
           static_cast<int>(got));
  };
  check("index", csr_index_width(header.cols), header.index_width);
  check("offset", offset_width_for(header.nonzeros), header.offset_width);
  if (header.extent[0] | header.extent[1])
    fail("packed extent: expected zeros for csr, got %" PRIu64 " %" PRIu64, header.extent[0],
         header.extent[1]);

  if (header.tile_rows_log2 | header.tile_cols_log2)
    fail("packed tiles: expected zeros for csr, got %d %d", header.tile_rows_log2,
         header.tile_cols_log2);

  SectionPlacer placer;
  Layout result{};
  result.section[kCsrOffsets] =
      placer.place(header.rows + 1, static_cast<uint64_t>(header.offset_width));
  result.section[kCsrIndices] =
      placer.place(header.nonzeros, static_cast<uint64_t>(header.index_width));
  result.section[kCsrValues] = placer.place(header.nonzeros, value_bytes(header.value));
  finish_layout(header, placer, result);
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
  const int64_t row = first_failing(view.rows, view.nonzeros * static_cast<int64_t>(sizeof(Index)),
                                    [&](int64_t r) { return first_bad_index<Index>(view, r) < 0; });
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
  const int64_t target = cost_of_parts(cost(view.rows), part, parts);
  const int64_t row = units_that_cost(view.rows, target, cost);
  return std::min(view.rows, (row + kRowGroup / 2) / kRowGroup * kRowGroup);
}

int64_t expected_bytes(const Header& header) {
  Header described = header;
  set_widths(described);
  return layout(described).bytes;
}

void decode(const PackedView& view, int64_t first_row, Entries& out) {
  out.first_row = first_row;
  out.rows = std::min(kRowGroup, view.rows - first_row);
  const int64_t begin = csr_offset(view, first_row);
  out.offsets.resize(out.rows + 1);
  for (int64_t row = 0; row <= out.rows; ++row)
    out.offsets[row] = csr_offset(view, first_row + row) - begin;
  const int64_t count = out.offsets[out.rows];
  out.columns.resize(count);
  with_index(view.index_width, [&](auto index) {
    for (int64_t i = 0; i < count; ++i)
      out.columns[i] = load_at<decltype(index)>(view.section[kCsrIndices], begin + i);
  });
  const int64_t bytes = value_bytes(view.value);
  const uint8_t* values = view.section[kCsrValues] + begin * bytes;
  out.values.assign(values, values + count * bytes);
}

}  // namespace

Width csr_index_width(uint64_t cols) {
  if (cols <= uint64_t{1} << 8) return Width::k8;
  if (cols <= uint64_t{1} << 16) return Width::k16;
  return Width::k32;
}

const Format kCsrFormat = {
    FormatId::kCsr, "csr",    unit_rows, describe, expected_bytes,
    layout,         csr_pack, validate,  decode,   row_cut,
};

}  // namespace fxsparse
