#include "format/entries.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "format/dense.h"
#include "format/format.h"
#include "format/units.h"

namespace fxsparse {
namespace {

template <class Bits>
void write_entries(const Entries& entries, int64_t row, Bits* out, int64_t stride) {
  const Bits* values = reinterpret_cast<const Bits*>(entries.values.data());
  for (int64_t i = entries.offsets[row]; i < entries.offsets[row + 1]; ++i)
    out[entries.columns[i] * stride] = values[i];
}

template <class Bits>
void write_rows(const Entries& entries, int64_t cols, Bits* out, int64_t row_stride,
                int64_t col_stride) {
  // Zeros go along the contiguous direction: whole rows, or all columns of these rows.
  if (col_stride <= row_stride) {
    for (int64_t row = 0; row < entries.rows; ++row)
      for (int64_t k = 0; k < cols; ++k) out[row * row_stride + k * col_stride] = 0;
  } else {
    for (int64_t k = 0; k < cols; ++k)
      for (int64_t row = 0; row < entries.rows; ++row) out[row * row_stride + k * col_stride] = 0;
  }
  for (int64_t row = 0; row < entries.rows; ++row)
    write_entries(entries, row, out + row * row_stride, col_stride);
}

}  // namespace

void Entries::begin(int64_t first, int64_t n, int64_t* counts, int64_t value_bytes) {
  first_row = first;
  rows = n;
  offsets.resize(n + 1);
  int64_t sum = 0;
  for (int64_t r = 0; r < n; ++r) {
    offsets[r] = sum;
    sum += counts[r];
    counts[r] = offsets[r];
  }
  offsets[n] = sum;
  columns.resize(sum);
  values.resize(sum * value_bytes);
}

PackedView Entries::csr(const PackedView& whole) const {
  PackedView view{};
  view.rows = rows;
  view.cols = whole.cols;
  view.nonzeros = offsets[rows];
  view.value = whole.value;
  view.index_width = Width::k32;
  view.offset_width = Width::k64;
  view.section[0] = reinterpret_cast<const uint8_t*>(offsets.data());
  view.section[1] = reinterpret_cast<const uint8_t*>(columns.data());
  view.section[2] = values.data();
  return view;
}

void decode_unit(const Packed& packed, int64_t row, Entries& out) {
  const int64_t unit = packed.format->unit_rows(packed.view);
  packed.format->decode(packed.view, row / unit * unit, out);
}

void unpack(const Packed& packed, void* out, int64_t row_stride, int64_t col_stride) {
  const PackedView& view = packed.view;
  const int64_t unit = packed.format->unit_rows(view);
  const int64_t units = (view.rows + unit - 1) / unit;
  const int64_t bytes = view.rows * view.cols * value_bytes(view.value);
  for_ranges(units, bytes, [&](int64_t begin, int64_t end) {
    Entries entries;
    for (int64_t u = begin; u < end; ++u) {
      packed.format->decode(view, u * unit, entries);
      with_bits(view.value, [&](auto type) {
        using Bits = decltype(type);
        write_rows(entries, view.cols, static_cast<Bits*>(out) + u * unit * row_stride, row_stride,
                   col_stride);
      });
    }
  });
}

void unpack_rows(const Packed& packed, const int64_t* indices, int64_t count, void* out) {
  const PackedView& view = packed.view;
  const int64_t unit = packed.format->unit_rows(view);
  // In the order of the rows, so that a unit is decoded once for all of its rows that are wanted.
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return indices[a] < indices[b]; });
  for_ranges(count, count * view.cols * value_bytes(view.value), [&](int64_t begin, int64_t end) {
    Entries entries;
    int64_t decoded = -1;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = indices[order[i]];
      if (row / unit != decoded) {
        decoded = row / unit;
        packed.format->decode(view, decoded * unit, entries);
      }
      with_bits(view.value, [&](auto type) {
        using Bits = decltype(type);
        Bits* to = static_cast<Bits*>(out) + order[i] * view.cols;
        std::fill_n(to, view.cols, Bits{0});
        write_entries(entries, row - entries.first_row, to, 1);
      });
    }
  });
}

}  // namespace fxsparse
