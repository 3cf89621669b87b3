#include "op/nonfinite.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fxsparse {
namespace {

constexpr int kMaskRows = 64;  // rows of x that a mask has room for

// Up to 64 rows of x in the computing type. A row that holds a NaN gives NaN everywhere; the others
// are looked at where they are infinite.
template <class Scalar>
struct Infinities {
  std::vector<Scalar> x;       // row by row
  std::vector<uint64_t> mask;  // of each place: the rows that are infinite there
  uint64_t rows = 0;           // that have no NaN
  int64_t places[kMaskRows] = {};

  Infinities(const VectorOps& ops, const void* const* stored, int count, int64_t length)
      : x(count * length), mask(length) {
    for (int b = 0; b < count; ++b) {
      Scalar* row = &x[b * length];
      ops.widen(stored[b], length, row);
      if (std::any_of(row, row + length, [](Scalar value) { return std::isnan(value); })) continue;
      rows |= uint64_t{1} << b;
      for (int64_t k = 0; k < length; ++k) {
        mask[k] |= static_cast<uint64_t>(std::isinf(row[k])) << b;
        places[b] += std::isinf(row[k]);
      }
    }
  }
};

template <class F>
void for_bits(uint64_t bits, F&& f) {
  for (; bits != 0; bits &= bits - 1) f(__builtin_ctzll(bits));
}

template <class Scalar>
constexpr Scalar kNan = std::numeric_limits<Scalar>::quiet_NaN();

template <class Scalar>
void multiply_block(const Packed& packed, const VectorOps& ops, const void* const* x,
                    void* const* y, int count, const void* bias, int64_t begin, int64_t end) {
  const int64_t cols = packed.view.cols, bytes = value_bytes(packed.view.value);
  const Infinities<Scalar> in(ops, x, count, cols);
  const int64_t n = end - begin;
  std::vector<Scalar> results(count * n, kNan<Scalar>), biases(n), values;
  if (bias) ops.widen(static_cast<const uint8_t*>(bias) + begin * bytes, n, biases.data());
  Entries entries;
  for (int64_t row = begin; in.rows != 0 && row < end; ++row) {
    if (row >= entries.first_row + entries.rows) {
      decode_unit(packed, row, entries);
      values.resize(entries.columns.size());
      ops.widen(entries.values.data(), values.size(), values.data());
    }
    const int64_t first = entries.offsets[row - entries.first_row];
    const int64_t last = entries.offsets[row - entries.first_row + 1];
    // With more infinities than entries one of them meets a zero.
    uint64_t open = 0;
    for_bits(in.rows,
             [&](int b) { open |= static_cast<uint64_t>(in.places[b] <= last - first) << b; });
    if (open == 0) continue;
    Scalar sums[kMaskRows] = {};
    int64_t met[kMaskRows] = {};
    for (int64_t i = first; i < last; ++i) {
      const int64_t k = entries.columns[i];
      const uint64_t infinite = in.mask[k] & open;
      for_bits(std::isfinite(values[i]) ? infinite : open, [&](int b) {
        sums[b] += values[i] * in.x[b * cols + k];
        met[b] += infinite >> b & 1;
      });
    }
    for_bits(open, [&](int b) {
      if (met[b] == in.places[b]) results[b * n + row - begin] = sums[b] + biases[row - begin];
    });
  }
  for (int b = 0; b < count; ++b)
    ops.narrow(&results[b * n], n, static_cast<uint8_t*>(y[b]) + begin * bytes);
}

template <class Scalar>
void restore_block(const Packed& packed, const VectorOps& ops, const void* const* x, void* const* y,
                   int count, int64_t begin, int64_t end) {
  const PackedView& view = packed.view;
  const Infinities<Scalar> in(ops, x, count, view.rows);
  const uint64_t all = count == kMaskRows ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  std::vector<uint64_t> missing(end - begin, all & ~in.rows);
  uint64_t everywhere = all & ~in.rows;  // rows of x that are in every missing[] already
  Entries entries;
  for (int64_t row = 0; row < view.rows; ++row) {
    const uint64_t lost = in.mask[row];
    if ((lost & ~everywhere) == 0) continue;
    if (row >= entries.first_row + entries.rows) decode_unit(packed, row, entries);
    // Whatever lies between two stored entries is missing.
    int64_t next = begin;
    const auto miss_until = [&](int64_t column) {
      for (; next < column; ++next) missing[next - begin] |= lost;
    };
    const int64_t r = row - entries.first_row;
    for (int64_t i = entries.offsets[r]; i < entries.offsets[r + 1]; ++i) {
      const int64_t column = entries.columns[i];
      if (column < begin) continue;
      if (column >= end) break;
      miss_until(column);
      next = column + 1;
    }
    miss_until(end);
    everywhere = all;
    for (const uint64_t rows : missing) everywhere &= rows;
  }
  const Scalar nan = kNan<Scalar>;
  const int64_t bytes = value_bytes(view.value);
  for (int64_t c = begin; c < end; ++c)
    for_bits(missing[c - begin],
             [&](int b) { ops.narrow(&nan, 1, static_cast<uint8_t*>(y[b]) + c * bytes); });
}

template <class F>
void for_blocks(const NonfiniteRows& rows, F&& f) {
  for (int b = 0; b < rows.count; b += kMaskRows)
    f(rows.x + b, rows.y + b, std::min(kMaskRows, rows.count - b));
}

}  // namespace

void multiply_nonfinite(const Packed& packed, const VectorOps& ops, const NonfiniteRows& rows,
                        const void* bias, int64_t begin, int64_t end) {
  for_blocks(rows, [&](const void* const* x, void* const* y, int count) {
    if (packed.view.value == ValueType::kFloat64)
      multiply_block<double>(packed, ops, x, y, count, bias, begin, end);
    else
      multiply_block<float>(packed, ops, x, y, count, bias, begin, end);
  });
}

void restore_dropped_nans(const Packed& packed, const VectorOps& ops, const NonfiniteRows& rows,
                          int64_t begin, int64_t end) {
  for_blocks(rows, [&](const void* const* x, void* const* y, int count) {
    if (packed.view.value == ValueType::kFloat64)
      restore_block<double>(packed, ops, x, y, count, begin, end);
    else
      restore_block<float>(packed, ops, x, y, count, begin, end);
  });
}

}  // namespace fxsparse
