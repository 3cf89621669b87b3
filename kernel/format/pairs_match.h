#pragma once

// Which rows of a tile are paired.

#include "format/pairs.h"

namespace fxsparse {

// Where the nonzeros of a tile are.
struct TileBits {
  int64_t rows;
  int words;  // of a row
  uint64_t bits[kMaxTileRows][kMaxTileWords];
  uint16_t count[kMaxTileRows];
};

// How the columns of two rows are divided; the lists `only` are of equal length.
struct PairBits {
  uint64_t shared[kMaxTileWords];
  uint64_t only_a[kMaxTileWords];
  uint64_t only_b[kMaxTileWords];
  uint16_t shared_count;
  uint16_t single_count;
};

int count_bits(uint64_t bits);

// Row b may be tile.rows, the row that does not exist.
PairBits split_pair(const TileBits& tile, int row_a, int row_b);

// Pairs of all rows, in the order they are stored: a function of the tile alone. Returns how many.
int match_rows(const TileBits& tile, PairHeader* pairs);

}  // namespace fxsparse
