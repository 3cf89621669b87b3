#include "format/tiles.h"

#include <cmath>

#include "format/lane_groups.h"

namespace fxsparse {
namespace {

int64_t unit_rows(const PackedView&) { return kRowGroup; }

void set_widths(Header& header) {
  header.index_width = Width::k8;
  header.offset_width = offset_width_for(header.extent[1]);
  header.tile_rows_log2 = kTileRowsLog2;
  header.tile_cols_log2 = kTileColsLog2;
}

void describe(const DenseView& dense, Header& header) {
  tiles_measure(dense, &header.extent[0], &header.extent[1]);
  set_widths(header);
}

Layout layout(const Header& header) {
  const auto check = [](const char* name, int expected, int got) {
    if (expected != got) fail("packed %s: expected %d for tiles, got %d", name, expected, got);
  };
  const uint64_t steps = header.extent[0], entries = header.extent[1];
  const Width offset_width = offset_width_for(entries);
  check("index width", static_cast<int>(Width::k8), static_cast<int>(header.index_width));
  check("offset width", static_cast<int>(offset_width), static_cast<int>(header.offset_width));
  check("tile rows (log2)", kTileRowsLog2, header.tile_rows_log2);
  check("tile columns (log2)", kTileColsLog2, header.tile_cols_log2);
  // Padding takes places of zeros, so there are at most rows x columns entries.
  uint64_t most;
  if (__builtin_mul_overflow(header.rows, header.cols, &most)) most = INT64_MAX;
  if (entries < header.nonzeros || entries > most)
    fail("packed extent[1] (entries): expected %" PRIu64 " (nonzeros) to %" PRIu64
         " (rows x columns), got %" PRIu64,
         header.nonzeros, most, entries);
  if (steps > entries)
    fail("packed extent[0] (steps): expected at most %" PRIu64 " (entries), got %" PRIu64, entries,
         steps);
  const uint64_t groups = (header.rows + kRowGroup - 1) / kRowGroup;
  SectionPlacer placer;
  Layout result{};
  result.section[kTilesGroups] =
      placer.place(groups + 1, 2 * static_cast<uint64_t>(header.offset_width));
  result.section[kTilesMasks] = placer.place(steps, sizeof(uint16_t));
  result.section[kTilesIndices] = placer.place(entries, sizeof(uint8_t));
  result.section[kTilesValues] = placer.place(entries, value_bytes(header.value));
  finish_layout(header, placer, result);
  return result;
}

// The mean of the most nonzeros that any of 16 rows has in a tile: sum of P(most > t).
double expected_steps(double density) {
  double term = std::pow(1 - density, kTileCols), at_most = 0, mean = 0;
  for (int t = 0; t < kTileCols; ++t) {
    at_most += term;
    mean += 1 - std::pow(at_most, static_cast<double>(kRowGroup));
    term *= density / (1 - density) * (kTileCols - t) / (t + 1);
  }
  return mean;
}

int64_t expected_bytes(const Header& header) {
  Header whole = header;
  const double tiles = static_cast<double>(group_count(header.rows)) *
                       static_cast<double>((header.cols + kTileCols - 1) / kTileCols);
  const double size = static_cast<double>(header.rows) * static_cast<double>(header.cols);
  // Not quite 1, where the sum above would divide by zero.
  const double density =
      std::min(size > 0 ? static_cast<double>(header.nonzeros) / size : 0, 1 - 1e-9);
  // A run of 7 empty tiles before a tile that is not needs a padding step.
  const double empty = std::pow(1 - density, kTileCols * static_cast<double>(kRowGroup));
  const double run = std::pow(empty, kMostAdvance);
  const double padding = run < 1 ? tiles * (1 - empty) * run / (1 - run) : 0;
  whole.extent[0] = static_cast<uint64_t>(tiles * expected_steps(density) + padding);
  whole.extent[1] = header.nonzeros + static_cast<uint64_t>(padding);
  whole.extent[0] = std::min(whole.extent[0], whole.extent[1]);
  set_widths(whole);
  return static_cast<int64_t>(layout(whole).bytes);
}

int64_t entry_offset(const PackedView& view, int64_t group) {
  return get_offset(view.section[kTilesGroups], view.offset_width, 2 * group);
}

int64_t step_offset(const PackedView& view, int64_t group) {
  return get_offset(view.section[kTilesGroups], view.offset_width, 2 * group + 1);
}

// Calls f(entry, row, column) for the entries of a valid group, padding included.
template <class F>
void for_group_entries(const PackedView& view, int64_t group, F&& f) {
  int64_t entry = entry_offset(view, group), tile = 0;
  const int64_t end = step_offset(view, group + 1);
  for (int64_t step = step_offset(view, group); step < end; ++step) {
    tile += view.section[kTilesIndices][entry] >> kTileColsLog2;
    for (unsigned mask = load_at<uint16_t>(view.section[kTilesMasks], step); mask != 0;
         mask &= mask - 1, ++entry)
      f(entry, __builtin_ctz(mask),
        tile * kTileCols + view.section[kTilesIndices][entry] % kTileCols);
  }
}

void check_offsets(const PackedView& view, int64_t group) {
  const auto check = [&](const char* name, int64_t begin, int64_t end, int64_t most) {
    if (group == 0 && begin != 0) fail("tiles %s[0]: expected 0, got %" PRId64, name, begin);
    if (end < begin || end > most)
      fail("tiles %s[%" PRId64 "]: expected %" PRId64 " to %" PRId64 ", got %" PRId64, name,
           group + 1, begin, most, end);
  };
  check("entry offsets", entry_offset(view, group), entry_offset(view, group + 1), view.extent[1]);
  check("step offsets", step_offset(view, group), step_offset(view, group + 1), view.extent[0]);
}

void check_group(const PackedView& view, int64_t group) {
  check_offsets(view, group);
  const int64_t rows = std::min(kRowGroup, view.rows - group * kRowGroup);
  const int64_t tiles = (view.cols + kTileCols - 1) / kTileCols;
  int64_t previous[kRowGroup];
  for (int64_t& p : previous) p = -1;
  int64_t entry = entry_offset(view, group), tile = 0;
  const int64_t last_entry = entry_offset(view, group + 1);
  const int64_t last_step = step_offset(view, group + 1);
  for (int64_t step = step_offset(view, group); step < last_step; ++step) {
    unsigned mask = load_at<uint16_t>(view.section[kTilesMasks], step);
    if (mask == 0 || mask >> rows != 0)
      fail("tiles masks[%" PRId64 "]: expected bits of the group's %" PRId64 " rows, got 0x%x",
           step, rows, mask);
    if (__builtin_popcount(mask) > last_entry - entry)
      fail("tiles masks[%" PRId64 "]: expected at most %" PRId64
           " bits (entries of the group that are left), got 0x%x",
           step, last_entry - entry, mask);
    int advance = view.section[kTilesIndices][entry] >> kTileColsLog2;
    if (advance >= tiles - tile)
      fail("tiles indices[%" PRId64 "]: expected a step less than %" PRId64
           " tiles further, got %d",
           entry, tiles - tile, advance);
    tile += advance;
    for (; mask != 0; mask &= mask - 1, ++entry, advance = 0) {
      const int index = view.section[kTilesIndices][entry] - (advance << kTileColsLog2);
      const int64_t column = tile * kTileCols + index;
      int64_t& before = previous[__builtin_ctz(mask)];
      if (index >= kTileCols || column >= view.cols || column <= before)
        fail("tiles indices[%" PRId64 "]: expected less than %" PRId64
             " columns and more than the row's entry before, got column %" PRId64,
             entry, std::min<int64_t>(kTileCols, view.cols - tile * kTileCols), int64_t{index});
      before = column;
    }
  }
  if (entry != last_entry)
    fail("tiles masks of group %" PRId64 ": expected %" PRId64 " bits, got %" PRId64, group,
         last_entry - entry_offset(view, group), entry - entry_offset(view, group));
}

int64_t count_group_nonzeros(const PackedView& view, int64_t group) {
  return with_bits(view.value, [&](auto bits) {
    int64_t count = 0;
    for (int64_t i = entry_offset(view, group); i < entry_offset(view, group + 1); ++i)
      count += is_nonzero(load_at<decltype(bits)>(view.section[kTilesValues], i));
    return count;
  });
}

void validate(const PackedView& view) {
  const int64_t groups = group_count(view.rows);
  std::atomic<int64_t> nonzeros{0};
  check_groups(groups, view.extent[1] * (1 + value_bytes(view.value)), [&](int64_t group) {
    check_group(view, group);
    nonzeros += count_group_nonzeros(view, group);
  });
  const int64_t entries = entry_offset(view, groups), steps = step_offset(view, groups);
  if (entries != view.extent[1])
    fail("tiles entry offsets[%" PRId64 "]: expected %" PRId64 " (entries), got %" PRId64, groups,
         view.extent[1], entries);
  if (steps != view.extent[0])
    fail("tiles step offsets[%" PRId64 "]: expected %" PRId64 " (steps), got %" PRId64, groups,
         view.extent[0], steps);
  if (nonzeros != view.nonzeros)
    fail("tiles values: expected %" PRId64 " that are not zero (nonzeros), got %" PRId64,
         view.nonzeros, nonzeros.load());
}

void decode(const PackedView& view, int64_t first_row, Entries& out) {
  const int64_t group = first_row / kRowGroup;
  with_bits(view.value, [&](auto bits) {
    using Bits = decltype(bits);
    const uint8_t* values = view.section[kTilesValues];
    int64_t next[kRowGroup] = {};
    for_group_entries(view, group, [&](int64_t entry, int row, int64_t) {
      next[row] += is_nonzero(load_at<Bits>(values, entry));
    });
    out.begin(first_row, std::min(kRowGroup, view.rows - first_row), next, sizeof(Bits));
    for_group_entries(view, group, [&](int64_t entry, int row, int64_t column) {
      const Bits value = load_at<Bits>(values, entry);
      if (!is_nonzero(value)) return;
      const int64_t to = next[row]++;
      out.columns[to] = static_cast<uint32_t>(column);
      store_at(out.values.data(), to, value);
    });
  });
}

int64_t row_cut(const PackedView& view, int64_t part, int64_t parts) {
  // A step costs about as much as eight entries: whole vectors, however full.
  return cut_groups(view.rows, part, parts, [&](int64_t group) {
    return entry_offset(view, group) + 8 * step_offset(view, group);
  });
}

}  // namespace

const Format kTilesFormat = {
    FormatId::kTiles, "tiles",    unit_rows, describe, expected_bytes,
    layout,           tiles_pack, validate,  decode,   row_cut,
};

}  // namespace fxsparse
