#pragma once

// Rows in pairs, for kernels that load a row of a panel once for two rows of the weight.
//
// The weight is cut in tiles of 2^tile_rows_log2 rows by 2^tile_cols_log2 columns; a *block* is the
// tiles of the same rows, a *slot* the values of both rows of a pair that are multiplied in one
// step. Sections:
//   tiles    for each tile, block by block, (first value, first index), and an end: offset_width
//   headers  of every pair of every tile, 6 bytes: u8 row a, u8 row b, u16 shared, u16 single
//   indices  u8 columns within the tile: a pair's `shared` columns, then `single` times one of row
//            a and one of row b; each of the three lists increases
//   values   for each shared column, then for each single one, the value of row a and that of row b
// Every row of a block is in exactly one pair of each of its tiles. If their number is odd, one of
// them is paired with a row that does not exist, the one after the last. A shared column may be one
// where only one row has a nonzero: that is how the longer row of a pair keeps what is left over.
// The other's value is then +0.0, the only padding there is.
// extent: index bytes, values.

#include "format/format.h"

namespace fxsparse {

extern const Format kPairsFormat;

constexpr int kPairsTiles = 0;
constexpr int kPairsHeaders = 1;
constexpr int kPairsIndices = 2;
constexpr int kPairsValues = 3;
constexpr int kPairsSections = 4;

constexpr int64_t kMaxTileRows = 256;  // numbers within a tile are bytes
constexpr int64_t kMaxTileCols = 256;
constexpr int64_t kMaxTilePairs = kMaxTileRows / 2;
constexpr int kMaxTileWords = 4;  // of 64 columns

struct PairHeader {
  uint8_t row_a;
  uint8_t row_b;
  uint16_t shared;
  uint16_t single;
};
static_assert(sizeof(PairHeader) == 6, "pair headers are part of the file format");

// Where tiles and pairs lie.
struct PairGrid {
  int64_t rows;
  int64_t cols;
  int64_t tile_rows;
  int64_t tile_cols;

  template <class Sizes>  // a Header or a PackedView
  explicit PairGrid(const Sizes& s)
      : rows(s.rows),
        cols(s.cols),
        tile_rows(int64_t{1} << s.tile_rows_log2),
        tile_cols(int64_t{1} << s.tile_cols_log2) {}

  int64_t blocks() const { return rows / tile_rows + (rows % tile_rows != 0); }
  int64_t tiles_of_block() const { return cols / tile_cols + (cols % tile_cols != 0); }
  int64_t rows_of(int64_t block) const {
    const int64_t left = rows - block * tile_rows;
    return left < tile_rows ? left : tile_rows;
  }
  int64_t cols_of(int64_t tile) const {
    const int64_t left = cols - tile * tile_cols;
    return left < tile_cols ? left : tile_cols;
  }
  int64_t pairs_of(int64_t block) const { return (rows_of(block) + 1) / 2; }
  int64_t tile_index(int64_t block, int64_t tile) const { return block * tiles_of_block() + tile; }
  int64_t first_pair(int64_t block, int64_t tile) const {
    return block * tiles_of_block() * (tile_rows / 2) + tile * pairs_of(block);
  }
};

// Sets the widths and tiles by the sizes and the number of nonzeros.
void pairs_choose_tiles(Header& header);

void pairs_describe(const DenseView& dense, Header& header);
void pairs_pack(const DenseView& dense, const Header& header, uint8_t* out);

}  // namespace fxsparse
