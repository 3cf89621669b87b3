#include "format/bitmap.h"

#include "format/lane_groups.h"

namespace fxsparse {
namespace {

int64_t unit_rows(const PackedView&) { return kRowGroup; }

void describe(const DenseView&, Header& header) {
  header.index_width = Width::k16;
  header.offset_width = offset_width_for(header.nonzeros);
}

Layout layout(const Header& header) {
  const auto check = [](const char* name, int expected, int got) {
    if (expected != got) fail("packed %s: expected %d for bitmap, got %d", name, expected, got);
  };
  const Width offset_width = offset_width_for(header.nonzeros);
  check("index width", static_cast<int>(Width::k16), static_cast<int>(header.index_width));
  check("offset width", static_cast<int>(offset_width), static_cast<int>(header.offset_width));
  check("tile rows", 0, header.tile_rows_log2);
  check("tile columns", 0, header.tile_cols_log2);
  if (header.extent[0] | header.extent[1])
    fail("packed extent: expected zeros for bitmap, got %" PRIu64 " %" PRIu64, header.extent[0],
         header.extent[1]);
  // Rows and columns are below 2^63: neither the rounding nor the count of groups overflows.
  const uint64_t groups = (header.rows + kRowGroup - 1) / kRowGroup;
  uint64_t masks;
  if (__builtin_mul_overflow(groups, header.cols, &masks)) masks = UINT64_MAX;
  SectionPlacer placer;
  Layout result{};
  result.section[kBitmapGroups] =
      placer.place(groups + 1, static_cast<uint64_t>(header.offset_width));
  result.section[kBitmapMasks] = placer.place(masks, sizeof(uint16_t));
  result.section[kBitmapValues] = placer.place(header.nonzeros, value_bytes(header.value));
  finish_layout(header, placer, result);
  return result;
}

int64_t expected_bytes(const Header& header) {
  Header whole = header;
  describe(DenseView{}, whole);
  return static_cast<int64_t>(layout(whole).bytes);
}

int64_t value_offset(const PackedView& view, int64_t group) {
  return get_offset(view.section[kBitmapGroups], view.offset_width, group);
}

const uint8_t* masks_of(const PackedView& view, int64_t group) {
  return view.section[kBitmapMasks] + group * view.cols * static_cast<int64_t>(sizeof(uint16_t));
}

void check_group(const PackedView& view, int64_t group) {
  const int64_t begin = value_offset(view, group), end = value_offset(view, group + 1);
  if (group == 0 && begin != 0) fail("bitmap groups[0]: expected 0, got %" PRId64, begin);
  if (end < begin || end > view.nonzeros)
    fail("bitmap groups[%" PRId64 "]: expected %" PRId64 " to %" PRId64 " (nonzeros), got %" PRId64,
         group + 1, begin, view.nonzeros, end);
  const uint8_t* masks = masks_of(view, group);
  int64_t count = 0;
  unsigned any = 0;
  int64_t k = 0;
  for (; k + 4 <= view.cols; k += 4) {
    const uint64_t four = load_at<uint64_t>(masks + k * 2, 0);
    count += __builtin_popcountll(four);
    any |= static_cast<unsigned>(four | four >> 32);
  }
  any |= any >> 16;
  for (; k < view.cols; ++k) {
    const unsigned mask = load_at<uint16_t>(masks, k);
    count += __builtin_popcount(mask);
    any |= mask;
  }
  if (count != end - begin)
    fail("bitmap masks of group %" PRId64 ": expected %" PRId64 " bits, got %" PRId64, group,
         end - begin, count);
  const int64_t rows = std::min(kRowGroup, view.rows - group * kRowGroup);
  if ((any & 0xffffu) >> rows != 0)
    fail("bitmap masks of group %" PRId64 ": expected no bit beyond its %" PRId64 " rows, got some",
         group, rows);
}

void validate(const PackedView& view) {
  const int64_t groups = group_count(view.rows);
  check_groups(groups, groups * view.cols * 2, [&](int64_t group) { check_group(view, group); });
  const int64_t end = value_offset(view, groups);
  if (end != view.nonzeros)
    fail("bitmap groups[%" PRId64 "]: expected %" PRId64 " (nonzeros), got %" PRId64, groups,
         view.nonzeros, end);
}

void decode(const PackedView& view, int64_t first_row, Entries& out) {
  const int64_t group = first_row / kRowGroup;
  const uint8_t* masks = masks_of(view, group);
  int64_t next[kRowGroup] = {};
  for (int64_t k = 0; k < view.cols; ++k)
    for (unsigned mask = load_at<uint16_t>(masks, k); mask != 0; mask &= mask - 1)
      ++next[__builtin_ctz(mask)];
  out.begin(first_row, std::min(kRowGroup, view.rows - first_row), next, value_bytes(view.value));
  with_bits(view.value, [&](auto bits) {
    using Bits = decltype(bits);
    int64_t from = value_offset(view, group);
    for (int64_t k = 0; k < view.cols; ++k)
      for (unsigned mask = load_at<uint16_t>(masks, k); mask != 0; mask &= mask - 1) {
        const int64_t to = next[__builtin_ctz(mask)]++;
        out.columns[to] = static_cast<uint32_t>(k);
        store_at(out.values.data(), to, load_at<Bits>(view.section[kBitmapValues], from++));
      }
  });
}

int64_t row_cut(const PackedView& view, int64_t part, int64_t parts) {
  // A mask costs about as much as two nonzeros, however many it has.
  return cut_groups(view.rows, part, parts, [&](int64_t group) {
    return value_offset(view, group) + 2 * group * view.cols;
  });
}

}  // namespace

const Format kBitmapFormat = {
    FormatId::kBitmap, "bitmap", unit_rows, describe, expected_bytes, layout,
    bitmap_pack,       validate, decode,    row_cut,
};

}  // namespace fxsparse
