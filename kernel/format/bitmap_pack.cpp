#include "format/bitmap.h"
#include "format/lane_groups.h"

namespace fxsparse {
namespace {

constexpr int kBlockCols = 64;

template <class Bits>
unsigned mask_of(const Bits (&values)[kRowGroup]) {
  unsigned mask = 0;
  for (int r = 0; r < kRowGroup; ++r) mask |= static_cast<unsigned>(is_nonzero(values[r])) << r;
  return mask;
}

template <class Bits>
struct Packer {
  const DenseView& dense;
  Width offset_width;
  uint8_t* groups;
  uint8_t* masks;
  uint8_t* values;

  uint8_t* masks_of(int64_t group) const {
    return masks + group * dense.cols * static_cast<int64_t>(sizeof(uint16_t));
  }

  // Writes the group's masks, and how many values it has as groups[group + 1].
  void count(int64_t group) const {
    Bits block[kBlockCols][kRowGroup];
    int64_t n = 0;
    for (int64_t k0 = 0; k0 < dense.cols; k0 += kBlockCols) {
      const int cols = static_cast<int>(std::min<int64_t>(kBlockCols, dense.cols - k0));
      read_block(dense, group, k0, cols, block);
      for (int k = 0; k < cols; ++k) {
        const unsigned mask = mask_of(block[k]);
        store_at(masks_of(group), k0 + k, static_cast<uint16_t>(mask));
        n += __builtin_popcount(mask);
      }
    }
    put_offset(groups, offset_width, group + 1, n);
  }

  // Whether the group's nonzeros are those that were counted: only so many values are written.
  bool fill(int64_t group) const {
    Bits block[kBlockCols][kRowGroup];
    // A value is written before it is known to be nonzero: no branch to mispredict.
    Bits packed[kBlockCols * kRowGroup + 1];
    int64_t next = get_offset(groups, offset_width, group);
    for (int64_t k0 = 0; k0 < dense.cols; k0 += kBlockCols) {
      const int cols = static_cast<int>(std::min<int64_t>(kBlockCols, dense.cols - k0));
      read_block(dense, group, k0, cols, block);
      int n = 0;
      for (int k = 0; k < cols; ++k) {
        unsigned mask = 0;
        for (int r = 0; r < kRowGroup; ++r) {
          const bool nonzero = is_nonzero(block[k][r]);
          packed[n] = block[k][r];
          n += nonzero;
          mask |= static_cast<unsigned>(nonzero) << r;
        }
        if (mask != load_at<uint16_t>(masks_of(group), k0 + k)) return false;
      }
      std::memcpy(values + next * static_cast<int64_t>(sizeof(Bits)), packed, n * sizeof(Bits));
      next += n;
    }
    return true;
  }

  bool run(uint64_t nonzeros) const {
    const int64_t count_of_groups = group_count(dense.rows);
    const int64_t bytes = dense.rows * dense.cols * static_cast<int64_t>(sizeof(Bits));
    for_ranges(count_of_groups, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) count(g);
    });
    uint64_t sum = 0;
    put_offset(groups, offset_width, 0, 0);
    for (int64_t g = 1; g <= count_of_groups; ++g) {
      sum += get_offset(groups, offset_width, g);
      put_offset(groups, offset_width, g, static_cast<int64_t>(sum));
    }
    if (sum != nonzeros) return false;
    return first_failing(count_of_groups, bytes, [&](int64_t g) { return fill(g); }) ==
           count_of_groups;
  }
};

}  // namespace

void bitmap_pack(const DenseView& dense, const Header& header, uint8_t* out) {
  const Layout layout = kBitmapFormat.layout(header);
  std::memcpy(out, &header, sizeof header);
  clear_section_ends(out, layout, kBitmapSections);
  const bool same = with_bits(header.value, [&](auto bits) {
    return Packer<decltype(bits)>{dense, header.offset_width, out + layout.section[kBitmapGroups],
                                  out + layout.section[kBitmapMasks],
                                  out + layout.section[kBitmapValues]}
        .run(header.nonzeros);
  });
  if (!same) fail_changed(header.nonzeros);
}

}  // namespace fxsparse
