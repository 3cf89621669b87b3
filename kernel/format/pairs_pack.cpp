#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "error.h"
#include "format/access.h"
#include "format/dense.h"
#include "format/pairs.h"
#include "format/pairs_match.h"
#include "format/units.h"

namespace fxsparse {
namespace {

// Calls f(block) for all blocks of rows, on as many threads as pay.
template <class F>
void for_blocks(const PairGrid& grid, int64_t value_bytes, F&& f) {
  const int64_t blocks = grid.blocks();
  if (blocks == 0 || grid.cols == 0) return;
  for_ranges(blocks, grid.rows * grid.cols * value_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) f(block);
  });
}

// One tile at a time, copied: whoever writes to the weight meanwhile, values and bits agree. Zeros
// are +0.0.
template <class Bits>
class TileReader {
 public:
  TileReader(const DenseView& dense, const PairGrid& grid)
      : dense_(dense),
        grid_(grid),
        stride_(grid.tile_cols),
        values_((grid.tile_rows + 1) * stride_) {}

  void read(int64_t block, int64_t tile) {
    const int64_t rows = grid_.rows_of(block), cols = grid_.cols_of(tile);
    bits_.rows = rows;
    bits_.words = static_cast<int>((cols + 63) / 64);
    const Bits* corner = static_cast<const Bits*>(dense_.data) +
                         block * grid_.tile_rows * dense_.row_stride +
                         tile * grid_.tile_cols * dense_.col_stride;
    // Beyond the columns: zeros, so that words are whole.
    if (cols % 64 != 0)
      for (int64_t r = 0; r < rows; ++r)
        std::fill(row(r) + cols, row(r) + bits_.words * 64, Bits{0});
    if (columns_are_contiguous(dense_)) {
      for (int64_t r0 = 0; r0 < rows; r0 += kStripRows) {
        const int64_t n = std::min(kStripRows, rows - r0);
        for (int64_t k = 0; k < cols; ++k)
          for (int64_t r = r0; r < r0 + n; ++r)
            row(r)[k] = corner[r * dense_.row_stride + k * dense_.col_stride];
      }
    } else if (dense_.col_stride == 1) {
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(row(r), corner + r * dense_.row_stride, cols * sizeof(Bits));
    } else {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < cols; ++k)
          row(r)[k] = corner[r * dense_.row_stride + k * dense_.col_stride];
    }
    for (int64_t r = 0; r < rows; ++r) {
      int count = 0;
      for (int w = 0; w < bits_.words; ++w) {
        const uint64_t word = nonzero_bits(row(r) + w * 64);
        bits_.bits[r][w] = word;
        count += count_bits(word);
      }
      bits_.count[r] = static_cast<uint16_t>(count);
    }
    std::fill(row(rows), row(rows) + stride_, Bits{0});
  }

  const TileBits& bits() const { return bits_; }
  const Bits* values(int64_t r) const { return values_.data() + r * stride_; }

 private:
  Bits* row(int64_t r) { return values_.data() + r * stride_; }

  // Makes -0.0 +0.0.
  static uint64_t nonzero_bits(Bits* values) {
    uint8_t flags[64];
    for (int k = 0; k < 64; ++k) {
      const Bits nonzero = is_nonzero(values[k]);
      flags[k] = static_cast<uint8_t>(nonzero);
      values[k] &= static_cast<Bits>(-nonzero);
    }
    uint64_t word = 0;
    for (int k = 0; k < 64; k += 8)
      word |= (load_at<uint64_t>(flags, k / 8) * 0x0102040810204080u >> 56) << k;
    return word;
  }

  const DenseView& dense_;
  const PairGrid& grid_;
  const int64_t stride_;
  std::vector<Bits> values_;
  TileBits bits_;
};

struct TileSize {
  uint64_t values = 0;
  uint64_t indices = 0;
  uint64_t nonzeros = 0;
};

// Pairs the rows of a tile and says what it takes.
TileSize match_tile(const TileBits& tile, PairHeader* pairs) {
  const int n = match_rows(tile, pairs);
  TileSize size;
  for (int p = 0; p < n; ++p) {
    size.values += 2 * (pairs[p].shared + pairs[p].single);
    size.indices += pairs[p].shared + 2 * pairs[p].single;
  }
  for (int64_t r = 0; r < tile.rows; ++r) size.nonzeros += tile.count[r];
  return size;
}

int list_columns(const uint64_t* bits, uint8_t* columns) {
  int n = 0;
  for (int w = 0; w < kMaxTileWords; ++w)
    for (uint64_t word = bits[w]; word != 0; word &= word - 1)
      columns[n++] = static_cast<uint8_t>(w * 64 + __builtin_ctzll(word));
  return n;
}

template <class Bits, class Offset>
struct Packer {
  const DenseView& dense;
  const PairGrid grid;
  uint8_t* tiles;
  uint8_t* headers;
  uint8_t* indices;
  uint8_t* values;

  // Headers of a block's pairs; tiles[t + 1] = the size of tile t. Returns the nonzeros.
  uint64_t match_block(int64_t block) const {
    TileReader<Bits> reader(dense, grid);
    PairHeader pairs[kMaxTilePairs];
    uint64_t nonzeros = 0;
    for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile) {
      reader.read(block, tile);
      const TileSize size = match_tile(reader.bits(), pairs);
      nonzeros += size.nonzeros;
      const int64_t t = grid.tile_index(block, tile);
      store_at(tiles, 2 * t + 2, static_cast<Offset>(size.values));
      store_at(tiles, 2 * t + 3, static_cast<Offset>(size.indices));
      std::memcpy(headers + grid.first_pair(block, tile) * sizeof(PairHeader), pairs,
                  grid.pairs_of(block) * sizeof(PairHeader));
    }
    return nonzeros;
  }

  // False if a pair is not what it was when it was matched.
  bool fill_block(int64_t block) const {
    TileReader<Bits> reader(dense, grid);
    for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile) {
      reader.read(block, tile);
      const int64_t t = grid.tile_index(block, tile), first = grid.first_pair(block, tile);
      int64_t value = static_cast<int64_t>(load_at<Offset>(tiles, 2 * t));
      uint8_t* index = indices + load_at<Offset>(tiles, 2 * t + 1);
      for (int64_t p = first; p < first + grid.pairs_of(block); ++p) {
        const PairHeader pair = load_at<PairHeader>(headers, p);
        const PairBits bits = split_pair(reader.bits(), pair.row_a, pair.row_b);
        if (bits.shared_count != pair.shared || bits.single_count != pair.single) return false;
        const Bits* a = reader.values(pair.row_a);
        const Bits* b = reader.values(pair.row_b);
        const auto slot = [&](int column_a, int column_b) {
          store_at(values, value++, a[column_a]);
          store_at(values, value++, b[column_b]);
        };
        uint8_t columns[2][kMaxTileCols];
        const int shared = list_columns(bits.shared, index);
        for (int i = 0; i < shared; ++i) slot(index[i], index[i]);
        index += shared;
        list_columns(bits.only_a, columns[0]);
        list_columns(bits.only_b, columns[1]);
        for (int i = 0; i < pair.single; ++i, index += 2) {
          index[0] = columns[0][i];
          index[1] = columns[1][i];
          slot(index[0], index[1]);
        }
      }
    }
    return true;
  }

  // False if the weight did not have the same nonzeros whenever they were looked at. Whatever
  // somebody else writes to it meanwhile, nothing is written beyond what the header says.
  bool run(const Header& header) const {
    std::atomic<uint64_t> nonzeros{0};
    for_blocks(grid, sizeof(Bits), [&](int64_t block) { nonzeros += match_block(block); });
    if (nonzeros != header.nonzeros) return false;
    uint64_t value = 0, index = 0;
    store_at(tiles, 0, Offset{0});
    store_at(tiles, 1, Offset{0});
    for (int64_t t = 1; t <= grid.blocks() * grid.tiles_of_block(); ++t) {
      value += load_at<Offset>(tiles, 2 * t);
      index += load_at<Offset>(tiles, 2 * t + 1);
      store_at(tiles, 2 * t, static_cast<Offset>(value));
      store_at(tiles, 2 * t + 1, static_cast<Offset>(index));
    }
    if (value != header.extent[1] || index != header.extent[0]) return false;
    std::atomic<bool> same{true};
    for_blocks(grid, sizeof(Bits), [&](int64_t block) {
      if (!fill_block(block)) same = false;
    });
    return same;
  }
};

}  // namespace

void pairs_describe(const DenseView& dense, Header& header) {
  pairs_choose_tiles(header);
  const PairGrid grid(header);
  std::atomic<uint64_t> values{0}, indices{0};
  with_bits(header.value, [&](auto bits) {
    using Bits = decltype(bits);
    for_blocks(grid, sizeof(Bits), [&](int64_t block) {
      TileReader<Bits> reader(dense, grid);
      PairHeader pairs[kMaxTilePairs];
      for (int64_t tile = 0; tile < grid.tiles_of_block(); ++tile) {
        reader.read(block, tile);
        const TileSize size = match_tile(reader.bits(), pairs);
        values += size.values;
        indices += size.indices;
      }
    });
  });
  header.extent[0] = indices;
  header.extent[1] = values;
  header.offset_width = offset_width_for(values);
}

void pairs_pack(const DenseView& dense, const Header& header, uint8_t* out) {
  const Layout layout = kPairsFormat.layout(header);
  const PairGrid grid(header);
  std::memcpy(out, &header, sizeof header);
  clear_section_ends(out, layout, kPairsSections);
  const bool same = with_bits(header.value, [&](auto bits) {
    return with_offset(header.offset_width, [&](auto offset) {
      return Packer<decltype(bits), decltype(offset)>{dense,
                                                      grid,
                                                      out + layout.section[kPairsTiles],
                                                      out + layout.section[kPairsHeaders],
                                                      out + layout.section[kPairsIndices],
                                                      out + layout.section[kPairsValues]}
          .run(header);
    });
  });
  if (!same)
    fail("pack: expected the %" PRIu64
         " nonzeros described at first, got others: the weight changed while it was packed",
         header.nonzeros);
}

}  // namespace fxsparse
