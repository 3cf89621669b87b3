#include "format/pairs_match.h"

#include <algorithm>

namespace fxsparse {
namespace {

// A group of rows of equal length is matched as a whole if it is no larger; work grows with the
// square.
constexpr int kMostMatched = 64;

// Pairs `n` rows so that the two with the most columns in common come first, then the two of the
// rest, and so on. One is left if n is odd: its place in `rows`; otherwise -1.
template <class F>
int match_group(const TileBits& tile, const uint8_t* rows, int n, F&& paired) {
  // Column-wise, so that the compiler counts the bits of several rows at once.
  uint64_t words[kMaxTileWords][kMostMatched];
  for (int w = 0; w < tile.words; ++w)
    for (int i = 0; i < n; ++i) words[w][i] = tile.bits[rows[i]][w];

  struct Edge {
    uint8_t i, j;
  };
  constexpr int kMostEdges = kMostMatched * (kMostMatched - 1) / 2;
  uint16_t common[kMostEdges];
  Edge edges[kMostEdges], sorted[kMostEdges];
  uint16_t first[kMaxTileCols + 2] = {};  // of the edges with so many columns fewer than the most
  int count = 0;
  for (int i = 0; i + 1 < n; ++i) {
    const int m = n - i - 1;
    uint64_t sums[kMostMatched] = {};  // four sums of 16 bits each
    for (int w = 0; w < tile.words; ++w) {
      const uint64_t row = words[w][i];
      for (int j = 0; j < m; ++j) {
        uint64_t x = row & words[w][i + 1 + j];
        x -= x >> 1 & 0x5555555555555555u;
        x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
        x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
        sums[j] += (x & 0x00ff00ff00ff00ffu) + (x >> 8 & 0x00ff00ff00ff00ffu);
      }
    }
    for (int j = 0; j < m; ++j) {
      const uint64_t half = sums[j] + (sums[j] >> 32);
      common[count] = static_cast<uint16_t>(half + (half >> 16));
      edges[count] = {static_cast<uint8_t>(i), static_cast<uint8_t>(i + 1 + j)};
      ++first[kMaxTileCols - common[count] + 1];
      ++count;
    }
  }
  for (int64_t c = 0; c <= kMaxTileCols; ++c) first[c + 1] += first[c];
  for (int e = 0; e < count; ++e) sorted[first[kMaxTileCols - common[e]]++] = edges[e];

  uint64_t used = 0;
  int left = n;
  for (int e = 0; e < count && left > 1; ++e) {
    const uint64_t both = uint64_t{1} << sorted[e].i | uint64_t{1} << sorted[e].j;
    if (used & both) continue;
    used |= both;
    left -= 2;
    paired(rows[sorted[e].i], rows[sorted[e].j]);
  }
  return left == 1 ? __builtin_ctzll(~used) : -1;
}

}  // namespace

int count_bits(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return static_cast<int>(x * 0x0101010101010101u >> 56);
}

PairBits split_pair(const TileBits& tile, int row_a, int row_b) {
  constexpr uint64_t kNone[kMaxTileWords] = {};
  const uint64_t* a = tile.bits[row_a];
  const uint64_t* b = row_b < tile.rows ? tile.bits[row_b] : kNone;
  PairBits pair{};
  int both = 0, count_a = 0, count_b = 0;
  for (int w = 0; w < tile.words; ++w) {
    pair.shared[w] = a[w] & b[w];
    pair.only_a[w] = a[w] & ~b[w];
    pair.only_b[w] = b[w] & ~a[w];
    both += count_bits(pair.shared[w]);
    count_a += count_bits(pair.only_a[w]);
    count_b += count_bits(pair.only_b[w]);
  }
  // What the longer row has more, in its first columns, counts as shared.
  uint64_t* longer = count_a > count_b ? pair.only_a : pair.only_b;
  const int more = count_a > count_b ? count_a - count_b : count_b - count_a;
  for (int left = more, w = 0; left > 0; ++w)
    for (; left > 0 && longer[w] != 0; --left) {
      const uint64_t lowest = longer[w] & -longer[w];
      longer[w] ^= lowest;
      pair.shared[w] |= lowest;
    }
  // Loops over a few numbers of shared columns are predicted better than over any number: what is
  // more than a multiple of four counts as a single column of both rows. 5-25 % faster with up to
  // four vectors where every second to fifth weight is not zero, no clear difference beyond; it
  // costs a byte each.
  int shared = both + more;
  int apart = shared > 4 ? std::min(shared % 4, both) : 0;
  shared -= apart;
  const int single = std::min(count_a, count_b) + apart;
  for (int w = tile.words - 1; apart > 0; --w)
    for (uint64_t common = a[w] & b[w]; apart > 0 && common != 0; --apart) {
      const uint64_t lowest = common & -common;
      common ^= lowest;
      pair.shared[w] ^= lowest;
      pair.only_a[w] |= lowest;
      pair.only_b[w] |= lowest;
    }
  pair.shared_count = static_cast<uint16_t>(shared);
  pair.single_count = static_cast<uint16_t>(single);
  return pair;
}

int match_rows(const TileBits& tile, PairHeader* pairs) {
  const int rows = static_cast<int>(tile.rows);
  int n = 0;
  const auto paired = [&](int a, int b) {
    const PairBits bits = split_pair(tile, a, b);
    pairs[n++] = {static_cast<uint8_t>(a), static_cast<uint8_t>(b), bits.shared_count,
                  bits.single_count};
  };

  // Longest first; equally long ones by number.
  uint8_t order[kMaxTileRows];
  uint16_t first[kMaxTileCols + 2] = {};
  for (int r = 0; r < rows; ++r) ++first[kMaxTileCols - tile.count[r] + 1];
  for (int64_t c = 0; c <= kMaxTileCols; ++c) first[c + 1] += first[c];
  for (int r = 0; r < rows; ++r)
    order[first[kMaxTileCols - tile.count[r]]++] = static_cast<uint8_t>(r);

  // Rows of equal length are matched with one another. One that is left goes to those that are next
  // in length: it takes the place before them.
  for (int begin = 0; begin < rows;) {
    int end = begin + 1;
    while (end < rows && end - begin < kMostMatched &&
           (end - begin == 1 || tile.count[order[end]] == tile.count[order[begin + 1]]))
      ++end;
    if (end - begin == 1) {
      paired(order[begin], rows);
      break;
    }
    const int left = match_group(tile, order + begin, end - begin, paired);
    if (left >= 0) order[end - 1] = order[begin + left];
    begin = left >= 0 ? end - 1 : end;
  }
  return n;
}

}  // namespace fxsparse
