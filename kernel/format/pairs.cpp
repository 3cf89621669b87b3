#include "format/pairs.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <vector>

#include "error.h"
#include "format/access.h"
#include "format/units.h"

namespace fxsparse {
namespace {

constexpr int kMinRowsLog2 = 4, kMaxRowsLog2 = 8;  // kRowGroup to kMaxTileRows
constexpr int kMinColsLog2 = 6, kMaxColsLog2 = 8;  // a word of bits to kMaxTileCols

// Where a tile's values and indices start.
struct TileStart {
  int64_t value;
  int64_t index;
};

TileStart tile_start(const PackedView& view, int64_t tile) {
  const uint8_t* tiles = view.section[kPairsTiles];
  return {get_offset(tiles, view.offset_width, 2 * tile),
          get_offset(tiles, view.offset_width, 2 * tile + 1)};
}

PairHeader pair_header(const PackedView& view, int64_t pair) {
  return load_at<PairHeader>(view.section[kPairsHeaders], pair);
}

int64_t unit_rows(const PackedView& view) { return int64_t{1} << view.tile_rows_log2; }

Layout layout(const Header& header) {
  const auto check_log2 = [](const char* name, int least, int most, int got) {
    if (got < least || got > most)
      fail("packed tile %s: expected 2^%d to 2^%d for pairs, got 2^%d", name, least, most, got);
  };
  check_log2("rows", kMinRowsLog2, kMaxRowsLog2, header.tile_rows_log2);
  check_log2("columns", kMinColsLog2, kMaxColsLog2, header.tile_cols_log2);
  if (header.index_width != Width::k8)
    fail("packed index width: expected 1 byte for pairs, got %d",
         static_cast<int>(header.index_width));
  const uint64_t indices = header.extent[0], values = header.extent[1];
  if (values % 2 != 0 || values < header.nonzeros || values / 2 > header.nonzeros)
    fail("packed extent: expected an even number of values, %" PRIu64
         " to twice that for pairs, got %" PRIu64,
         header.nonzeros, values);
  if (indices < values / 2 || indices > values)
    fail("packed extent: expected %" PRIu64 " to %" PRIu64 " index bytes for pairs, got %" PRIu64,
         values / 2, values, indices);
  if (header.offset_width != offset_width_for(values))
    fail("packed offset width: expected %d bytes, got %d",
         static_cast<int>(offset_width_for(values)), static_cast<int>(header.offset_width));

  const PairGrid grid(header);
  const uint64_t across = static_cast<uint64_t>(grid.tiles_of_block());
  uint64_t tiles, pairs;
  const bool overflow =
      __builtin_mul_overflow(static_cast<uint64_t>(grid.blocks()), across, &tiles) |
      __builtin_mul_overflow((header.rows + 1) / 2, across, &pairs);
  SectionPlacer placer;
  Layout result{};
  result.section[kPairsTiles] =
      placer.place(tiles + 1, 2 * static_cast<uint64_t>(header.offset_width));
  result.section[kPairsHeaders] = placer.place(pairs, sizeof(PairHeader));
  result.section[kPairsIndices] = placer.place(indices, 1);
  result.section[kPairsValues] = placer.place(values, value_bytes(header.value));
  result.bytes = placer.end();
  if (overflow || placer.overflow())
    fail("packed size: expected a length below 2^63 bytes, got %" PRIu64 " x %" PRIu64
         " with %" PRIu64 " values",
         header.rows, header.cols, values);
  return result;
}

int64_t expected_bytes(const Header& header) {
  Header h = header;
  pairs_choose_tiles(h);
  const PairGrid grid(h);
  const double size = static_cast<double>(h.rows) * static_cast<double>(h.cols);
  const double nonzeros = static_cast<double>(h.nonzeros);
  const double density = size > 0 ? nonzeros / size : 0;
  // Two rows of a tile share density^2 of its columns, give or take a standard deviation of
  // density * (1 - density) * sqrt(columns); the best of about ten is 1.5 of those better. Padding
  // is one value for about 16 rows.
  const double width = static_cast<double>(std::min(grid.tile_cols, grid.cols));
  const double shared =
      width > 0 ? std::min(1.0, density + 1.5 * (1 - density) / std::sqrt(width)) : 0;
  const double padding = static_cast<double>(h.rows) / 16 *
                         static_cast<double>(grid.tiles_of_block()) * std::min(1.0, density * 64);
  const auto values = static_cast<uint64_t>((nonzeros + std::min(padding, nonzeros)) / 2) * 2;
  h.extent[1] = std::max(values, (h.nonzeros + 1) / 2 * 2);
  h.extent[0] =
      std::clamp(static_cast<uint64_t>(nonzeros * (1 - shared / 2)), h.extent[1] / 2, h.extent[1]);
  h.offset_width = offset_width_for(h.extent[1]);
  return static_cast<int64_t>(layout(h).bytes);
}

// ---- validation ---------------------------------------------------------------------------------

// Checks the columns of one list, which are `step` bytes apart, and adds them to `seen`.
void check_columns(const uint8_t* indices, int64_t count, int64_t step, int64_t cols,
                   uint64_t* seen, int64_t at) {
  int64_t previous = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t column = indices[i * step];
    uint64_t& word = seen[column / 64];
    const uint64_t bit = uint64_t{1} << column % 64;
    if (column <= previous || column >= cols || (word & bit) != 0)
      fail("pairs indices[%" PRId64 "]: expected less than %" PRId64
           " columns, more than the one before and none that the pair shares, got %" PRId64,
           at + i * step, cols, column);
    word |= bit;
    previous = column;
  }
}

void check_tile(const PackedView& view, const PairGrid& grid, int64_t block, int64_t tile) {
  const int64_t t = grid.tile_index(block, tile);
  const TileStart start = tile_start(view, t), next = tile_start(view, t + 1);
  const int64_t rows = grid.rows_of(block), cols = grid.cols_of(tile);
  const int64_t pairs = grid.pairs_of(block), first = grid.first_pair(block, tile);
  if (start.value < 0 || start.value > view.extent[1] || start.index < 0 ||
      start.index > view.extent[0])
    fail("pairs tiles[%" PRId64 "]: expected at most value %" PRId64 " and index %" PRId64
         ", got %" PRId64 " and %" PRId64,
         t, view.extent[1], view.extent[0], start.value, start.index);
  TileStart end = start;
  uint64_t seen[kMaxTileRows / 64] = {};
  const auto check_row = [&](int64_t pair, int64_t row, int64_t limit) {
    uint64_t& word = seen[row / 64];
    const uint64_t bit = uint64_t{1} << row % 64;
    if (row >= limit || (word & bit) != 0)
      fail("pairs headers[%" PRId64 "]: expected each row below %" PRId64
           " once in its tile, got %" PRId64,
           pair, limit, row);
    word |= bit;
  };
  for (int64_t p = first; p < first + pairs; ++p) {
    const PairHeader pair = pair_header(view, p);
    check_row(p, pair.row_a, rows);
    check_row(p, pair.row_b, 2 * pairs);
    if (pair.shared + pair.single > cols)
      fail("pairs headers[%" PRId64 "]: expected at most %" PRId64
           " columns, got %d shared and %d single",
           p, cols, pair.shared, pair.single);
    if (pair.row_b == rows && pair.single != 0)
      fail("pairs headers[%" PRId64 "]: expected no single columns of a row alone, got %d", p,
           pair.single);
    end.value += 2 * (pair.shared + pair.single);
    end.index += pair.shared + 2 * pair.single;
  }
  if (end.value != next.value || end.index != next.index || end.value > view.extent[1] ||
      end.index > view.extent[0])
    fail("pairs tiles[%" PRId64 "]: expected value %" PRId64 " and index %" PRId64
         " after the pairs before it, at most %" PRId64 " and %" PRId64 ", got %" PRId64
         " and %" PRId64,
         t + 1, end.value, end.index, view.extent[1], view.extent[0], next.value, next.index);
  int64_t at = start.index;
  for (int64_t p = first; p < first + pairs; ++p) {
    const PairHeader pair = pair_header(view, p);
    const uint8_t* indices = view.section[kPairsIndices];
    uint64_t shared[kMaxTileWords] = {};
    check_columns(indices + at, pair.shared, 1, cols, shared, at);
    at += pair.shared;
    for (int row = 0; row < 2; ++row) {
      uint64_t all[kMaxTileWords];
      std::copy(shared, shared + kMaxTileWords, all);
      check_columns(indices + at + row, pair.single, 2, cols, all, at + row);
    }
    at += 2 * pair.single;
  }
}

void check_block(const PackedView& view, const PairGrid& grid, int64_t block) {
  for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile) check_tile(view, grid, block, tile);
}

// Every tile's end is compared with what its headers say, so blocks can be checked in any order;
// the first that is wrong is the one to report.
void validate(const PackedView& view) {
  const PairGrid grid(view);
  const int64_t tiles = grid.blocks() * grid.tiles_of_block();
  const TileStart first = tile_start(view, 0), last = tile_start(view, tiles);
  if (first.value != 0 || first.index != 0)
    fail("pairs tiles[0]: expected value 0 and index 0, got %" PRId64 " and %" PRId64, first.value,
         first.index);
  if (last.value != view.extent[1] || last.index != view.extent[0])
    fail("pairs tiles[%" PRId64 "]: expected value %" PRId64 " and index %" PRId64
         " (all), got %" PRId64 " and %" PRId64,
         tiles, view.extent[1], view.extent[0], last.value, last.index);
  if (tiles == 0) return;
  const int64_t bad = check_units(grid.blocks(), view.extent[0],
                                  [&](int64_t block) { check_block(view, grid, block); });
  if (bad != grid.blocks())
    fail("pairs tiles of block %" PRId64 ": changed while they were checked", bad);
}

// ---- decoding -----------------------------------------------------------------------------------

// Calls f(row, column, value) for the entries of a tile that are not padding, row being one of the
// block and the columns of the tile in no order.
template <class Bits, class F>
void for_tile_entries(const PackedView& view, const PairGrid& grid, int64_t block, int64_t tile,
                      F&& f) {
  const TileStart start = tile_start(view, grid.tile_index(block, tile));
  const int64_t first = grid.first_pair(block, tile);
  const uint8_t* indices = view.section[kPairsIndices] + start.index;
  int64_t at = start.value;
  const auto entry = [&](int row, int column) {
    const Bits value = load_at<Bits>(view.section[kPairsValues], at++);
    if (is_nonzero(value)) f(row, column, value);
  };
  for (int64_t p = first; p < first + grid.pairs_of(block); ++p) {
    const PairHeader pair = pair_header(view, p);
    for (int i = 0; i < pair.shared; ++i, ++indices) {
      entry(pair.row_a, indices[0]);
      entry(pair.row_b, indices[0]);
    }
    for (int i = 0; i < pair.single; ++i, indices += 2) {
      entry(pair.row_a, indices[0]);
      entry(pair.row_b, indices[1]);
    }
  }
}

template <class Bits>
void decode_block(const PackedView& view, int64_t block, Entries& out) {
  const PairGrid grid(view);
  const int64_t rows = grid.rows_of(block);
  // One more for the row that does not exist.
  std::vector<int64_t> next(rows + 1, 0);
  for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile)
    for_tile_entries<Bits>(view, grid, block, tile, [&](int row, int, Bits) { ++next[row]; });
  out.begin(block * grid.tile_rows, rows, next.data(), sizeof(Bits));

  // Columns are put in order by way of a dense tile.
  std::vector<Bits> values((rows + 1) * grid.tile_cols);
  std::vector<uint64_t> seen((rows + 1) * kMaxTileWords);
  for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile) {
    std::fill(seen.begin(), seen.end(), 0);
    for_tile_entries<Bits>(view, grid, block, tile, [&](int row, int column, Bits value) {
      values[row * grid.tile_cols + column] = value;
      seen[row * kMaxTileWords + column / 64] |= uint64_t{1} << column % 64;
    });
    for (int64_t row = 0; row < rows; ++row)
      for (int w = 0; w < kMaxTileWords; ++w)
        for (uint64_t bits = seen[row * kMaxTileWords + w]; bits != 0; bits &= bits - 1) {
          const int64_t column = w * 64 + __builtin_ctzll(bits);
          out.columns[next[row]] = static_cast<uint32_t>(tile * grid.tile_cols + column);
          store_at<Bits>(out.values.data(), next[row], values[row * grid.tile_cols + column]);
          ++next[row];
        }
  }
}

void decode(const PackedView& view, int64_t first_row, Entries& out) {
  with_bits(view.value, [&](auto bits) {
    decode_block<decltype(bits)>(view, first_row >> view.tile_rows_log2, out);
  });
}

int64_t row_cut(const PackedView& view, int64_t part, int64_t parts) {
  if (part >= parts) return view.rows;
  const PairGrid grid(view);
  // A row costs about as much as 8 values for each tile, and as 16 once, besides its own values:
  // its sum is loaded and stored, in the end transposed.
  const int64_t row_cost = 8 * grid.tiles_of_block() + 16;
  const auto cost = [&](int64_t block) {
    return tile_start(view, block * grid.tiles_of_block()).value +
           std::min(view.rows, block * grid.tile_rows) * row_cost;
  };
  const int64_t blocks = grid.blocks();
  const int64_t target = cost_of_parts(cost(blocks), part, parts);
  int64_t low = units_that_cost(blocks, target, cost);
  if (low > 0 && target - cost(low - 1) < cost(low) - target) --low;
  return std::min(view.rows, low * grid.tile_rows);
}

}  // namespace

void pairs_choose_tiles(Header& header) {
  const double size = static_cast<double>(header.rows) * static_cast<double>(header.cols);
  const double density = size > 0 ? static_cast<double>(header.nonzeros) / size : 0;
  header.index_width = Width::k8;
  // Taller tiles find better pairs and read x less often: 0-20 % faster. But a block is the least a
  // thread can do, so smaller weights are cut more finely.
  header.tile_rows_log2 = header.rows >= 1536 ? 8 : 7;
  // Wider tiles are fewer: each costs a pair two loops and its sums a way to memory and back. A
  // panel of many vectors wants narrower ones, as its part for a tile is to fit the first cache.
  header.tile_cols_log2 = density >= 0.35 || header.cols <= 64 ? 6 : density >= 0.08 ? 7 : 8;
}

const Format kPairsFormat = {
    FormatId::kPairs, "pairs",    unit_rows, pairs_describe, expected_bytes,
    layout,           pairs_pack, validate,  decode,         row_cut,
};

}  // namespace fxsparse
