#include "format/lane_groups.h"
#include "format/tiles.h"

namespace fxsparse {
namespace {

// The steps of one tile, or the padding steps before it.
template <class Bits>
struct TileSteps {
  int steps = 0;
  int entries = 0;
  uint16_t masks[kTileCols];
  uint8_t indices[kTileCols * kRowGroup];
  Bits values[kTileCols * kRowGroup];
};

// The columns of each row's nonzeros, as bits.
template <class Bits>
void row_bits(const Bits (*block)[kRowGroup], int cols, uint32_t (&bits)[kRowGroup]) {
  for (uint32_t& b : bits) b = 0;
  for (int k = 0; k < cols; ++k)
    for (int r = 0; r < kRowGroup; ++r)
      bits[r] |= static_cast<uint32_t>(is_nonzero(block[k][r])) << k;
}

template <class Bits>
void make_steps(const Bits (*block)[kRowGroup], uint32_t (&bits)[kRowGroup], int64_t advance,
                TileSteps<Bits>& out) {
  out.steps = out.entries = 0;
  for (;;) {
    const int first = out.entries;
    unsigned mask = 0;
    for (int r = 0; r < kRowGroup; ++r) {
      if (bits[r] == 0) continue;
      const int k = __builtin_ctz(bits[r]);
      bits[r] &= bits[r] - 1;
      mask |= 1u << r;
      out.indices[out.entries] = static_cast<uint8_t>(k);
      out.values[out.entries++] = block[k][r];
    }
    if (mask == 0) return;
    out.masks[out.steps++] = static_cast<uint16_t>(mask);
    out.indices[first] |= static_cast<uint8_t>(advance << kTileColsLog2);
    advance = 0;
  }
}

template <class Bits>
void make_padding(TileSteps<Bits>& out) {
  out.steps = out.entries = 1;
  out.masks[0] = 1;
  out.indices[0] = static_cast<uint8_t>(kMostAdvance << kTileColsLog2);
  out.values[0] = 0;
}

// Calls f(steps) for every tile of a group that is not empty and for the padding before it, until
// f returns false.
template <class Bits, class F>
bool for_tiles(const DenseView& dense, int64_t group, F&& f) {
  Bits block[kTileCols][kRowGroup];
  uint32_t bits[kRowGroup];
  TileSteps<Bits> steps;
  int64_t last = 0;  // tile
  for (int64_t k0 = 0; k0 < dense.cols; k0 += kTileCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kTileCols, dense.cols - k0));
    read_block(dense, group, k0, cols, block);
    row_bits(block, cols, bits);
    uint32_t any = 0;
    for (const uint32_t b : bits) any |= b;
    if (any == 0) continue;
    for (; k0 / kTileCols - last > kMostAdvance; last += kMostAdvance) {
      make_padding(steps);
      if (!f(steps)) return false;
    }
    make_steps(block, bits, k0 / kTileCols - last, steps);
    if (!f(steps)) return false;
    last = k0 / kTileCols;
  }
  return true;
}

// The same, but f is given only the numbers of steps and entries.
template <class Bits, class F>
void count_tiles(const DenseView& dense, int64_t group, F&& f) {
  Bits block[kTileCols][kRowGroup];
  uint32_t bits[kRowGroup];
  int64_t last = 0;
  for (int64_t k0 = 0; k0 < dense.cols; k0 += kTileCols) {
    const int cols = static_cast<int>(std::min<int64_t>(kTileCols, dense.cols - k0));
    read_block(dense, group, k0, cols, block);
    row_bits(block, cols, bits);
    int most = 0, sum = 0;
    for (const uint32_t b : bits) {
      const int n = __builtin_popcount(b);
      most = std::max(most, n);
      sum += n;
    }
    if (sum == 0) continue;
    for (; k0 / kTileCols - last > kMostAdvance; last += kMostAdvance) f(1, 1);
    f(most, sum);
    last = k0 / kTileCols;
  }
}

template <class Bits>
struct Packer {
  const DenseView& dense;
  Width offset_width;
  uint8_t* groups;
  uint8_t* masks;
  uint8_t* indices;
  uint8_t* values;

  int64_t entry_offset(int64_t group) const { return get_offset(groups, offset_width, 2 * group); }
  int64_t step_offset(int64_t group) const {
    return get_offset(groups, offset_width, 2 * group + 1);
  }
  void put_offsets(int64_t group, int64_t entries, int64_t steps) const {
    put_offset(groups, offset_width, 2 * group, entries);
    put_offset(groups, offset_width, 2 * group + 1, steps);
  }

  // Writes how many entries and steps a group has as the offsets of the next.
  void count(int64_t group) const {
    int64_t entries = 0, steps = 0;
    count_tiles<Bits>(dense, group, [&](int more_steps, int more_entries) {
      entries += more_entries;
      steps += more_steps;
    });
    put_offsets(group + 1, entries, steps);
  }

  // Whether the group has all the steps and entries that were counted; no more are written.
  // `nonzeros` grows by those entries that do not only pad.
  bool fill(int64_t group, std::atomic<uint64_t>& nonzeros) const {
    uint64_t padding = 0;
    int64_t entry = entry_offset(group), step = step_offset(group);
    const int64_t last_entry = entry_offset(group + 1), last_step = step_offset(group + 1);
    const bool fits = for_tiles<Bits>(dense, group, [&](const TileSteps<Bits>& tile) {
      if (entry + tile.entries > last_entry || step + tile.steps > last_step) return false;
      constexpr int64_t kMaskBytes = sizeof(uint16_t), kValueBytes = sizeof(Bits);
      std::memcpy(masks + step * kMaskBytes, tile.masks, tile.steps * kMaskBytes);
      std::memcpy(indices + entry, tile.indices, tile.entries);
      std::memcpy(values + entry * kValueBytes, tile.values, tile.entries * kValueBytes);
      padding += tile.entries == 1 && tile.values[0] == 0;
      entry += tile.entries;
      step += tile.steps;
      return true;
    });
    nonzeros += last_entry - entry_offset(group) - padding;
    return fits && entry == last_entry && step == last_step;
  }

  bool run(uint64_t most_steps, uint64_t most_entries, uint64_t expected_nonzeros) const {
    const int64_t count_of_groups = group_count(dense.rows);
    const int64_t bytes = dense.rows * dense.cols * static_cast<int64_t>(sizeof(Bits));
    for_ranges(count_of_groups, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) count(g);
    });
    uint64_t entries = 0, steps = 0;
    put_offsets(0, 0, 0);
    for (int64_t g = 1; g <= count_of_groups; ++g) {
      entries += entry_offset(g);
      steps += step_offset(g);
      put_offsets(g, static_cast<int64_t>(entries), static_cast<int64_t>(steps));
    }
    if (entries != most_entries || steps != most_steps) return false;
    std::atomic<uint64_t> nonzeros{0};
    const int64_t filled =
        first_failing(count_of_groups, bytes, [&](int64_t g) { return fill(g, nonzeros); });
    return filled == count_of_groups && nonzeros == expected_nonzeros;
  }
};

}  // namespace

void tiles_measure(const DenseView& dense, uint64_t* steps, uint64_t* entries) {
  std::atomic<uint64_t> all_steps{0}, all_entries{0};
  with_bits(dense.value, [&](auto bits) {
    using Bits = decltype(bits);
    const int64_t bytes = dense.rows * dense.cols * static_cast<int64_t>(sizeof(Bits));
    for_ranges(group_count(dense.rows), bytes, [&](int64_t begin, int64_t end) {
      uint64_t some_steps = 0, some_entries = 0;
      for (int64_t g = begin; g < end; ++g)
        count_tiles<Bits>(dense, g, [&](int more_steps, int more_entries) {
          some_steps += more_steps;
          some_entries += more_entries;
        });
      all_steps += some_steps;
      all_entries += some_entries;
    });
  });
  *steps = all_steps;
  *entries = all_entries;
}

void tiles_pack(const DenseView& dense, const Header& header, uint8_t* out) {
  const Layout layout = kTilesFormat.layout(header);
  std::memcpy(out, &header, sizeof header);
  clear_section_ends(out, layout, kTilesSections);
  const bool same = with_bits(header.value, [&](auto bits) {
    return Packer<decltype(bits)>{dense,
                                  header.offset_width,
                                  out + layout.section[kTilesGroups],
                                  out + layout.section[kTilesMasks],
                                  out + layout.section[kTilesIndices],
                                  out + layout.section[kTilesValues]}
        .run(header.extent[0], header.extent[1], header.nonzeros);
  });
  if (!same) fail_changed(header.nonzeros);
}

}  // namespace fxsparse
