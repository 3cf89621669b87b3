// What every format must do: nothing here knows one.

#include <algorithm>
#include <cstring>

#include "error.h"
#include "format/entries.h"
#include "packed.h"
#include "pool/pool.h"
#include "report.h"
#include "tests.h"

namespace native {

using fxsparse::Entries;
using fxsparse::Format;
using fxsparse::Header;
using fxsparse::PackedView;

Blob pack(const Format& format, const Dense& dense, uint32_t flags, int shift) {
  const Header header = describe(dense.view, format, flags);
  // Anything that pack leaves unwritten must show.
  Blob blob{Memory(packed_bytes(header), shift, 0xa5), {}};
  pack(dense.view, header, blob.memory.data(), blob.memory.bytes());
  expect(blob.memory.intact(), "pack wrote beside its output");
  blob.packed = fxsparse::open_packed(blob.memory.data(), blob.memory.bytes());
  return blob;
}

namespace {

void test_decode(const Blob& blob, const Weight& weight) {
  const Scope scope("decode");
  const Format& format = *blob.packed.format;
  const PackedView& view = blob.packed.view;
  const int64_t unit = format.unit_rows(view);
  if (!expect(unit >= 16, "units of %lld rows", static_cast<long long>(unit))) return;
  const int bytes = weight.type->bytes;
  Entries entries;  // used again, as the driver does
  for (int64_t first = 0; first < weight.shape.rows; first += unit) {
    format.decode(view, first, entries);
    const int64_t rows = std::min(unit, weight.shape.rows - first);
    const int64_t begin = weight.offsets[first], count = weight.offsets[first + rows] - begin;
    if (!expect(entries.first_row == first && entries.rows == rows, "rows %lld, %lld",
                static_cast<long long>(entries.first_row), static_cast<long long>(entries.rows)))
      return;
    // Exactly these: all of columns and values is looked at elsewhere.
    bool same = static_cast<int64_t>(entries.offsets.size()) == rows + 1;
    for (int64_t row = 0; same && row <= rows; ++row)
      same = entries.offsets[row] == weight.offsets[first + row] - begin;
    if (!expect(same, "offsets of the unit at %lld", static_cast<long long>(first))) return;
    same = static_cast<int64_t>(entries.columns.size()) == count &&
           static_cast<int64_t>(entries.values.size()) == count * bytes;
    for (int64_t i = 0; same && i < count; ++i)
      same = entries.columns[i] == weight.columns[begin + i];
    expect(same, "columns of the unit at %lld", static_cast<long long>(first));
    expect(!same || count == 0 ||
               std::memcmp(entries.values.data(), weight.bits.data() + begin * bytes,
                           count * bytes) == 0,
           "values of the unit at %lld", static_cast<long long>(first));
  }
}

void test_unpack(const Blob& blob, const Weight& weight) {
  for (Order order : kOrders) {
    const Scope scope("unpack in order %d", static_cast<int>(order));
    const Dense expected = to_dense(weight, order, false);
    Dense out = make_dense(*weight.type, weight.shape, order);
    // Gaps of `expected` are filled as those of `out`.
    unpack(blob.packed, out.memory.data(), out.view.row_stride, out.view.col_stride);
    expect(out.memory == expected.memory && out.memory.intact(), "another weight");
  }
}

void test_cuts(const Blob& blob) {
  const Format& format = *blob.packed.format;
  const PackedView& view = blob.packed.view;
  for (int64_t parts : {1, 2, 3, 7, 64}) {
    int64_t before = 0;
    for (int64_t part = 1; part <= parts; ++part) {
      const int64_t cut = format.row_cut(view, part, parts);
      const bool whole = cut % fxsparse::kRowGroup == 0 || cut == view.rows;
      if (!expect(cut >= before && cut <= view.rows && whole, "row_cut(%lld, %lld) = %lld",
                  static_cast<long long>(part), static_cast<long long>(parts),
                  static_cast<long long>(cut)))
        return;
      before = cut;
    }
    expect(before == view.rows, "row_cut(%lld, %lld) = %lld", static_cast<long long>(parts),
           static_cast<long long>(parts), static_cast<long long>(before));
  }
}

void test_header(const Blob& blob, const Weight& weight, uint32_t flags) {
  Header header;
  std::memcpy(&header, blob.memory.data(), sizeof header);
  const auto rows = static_cast<uint64_t>(weight.shape.rows);
  const auto cols = static_cast<uint64_t>(weight.shape.cols);
  expect(header.format == blob.packed.format->id && header.value == weight.type->value &&
             header.rows == rows && header.cols == cols && header.flags == flags &&
             header.nonzeros == static_cast<uint64_t>(weight.nonzeros()),
         "the header");
}

void test_expected_bytes(const Blob& blob, const Weight& weight, const Format& format) {
  const int64_t expected = expected_bytes(format, weight.shape.rows, weight.shape.cols,
                                          weight.nonzeros(), weight.type->value);
  // An estimate for evenly spread nonzeros, so no bound holds for all; but it is of bytes, padded.
  expect(expected >= static_cast<int64_t>(sizeof(Header)) + weight.nonzeros() * weight.type->bytes,
         "expected_bytes = %lld for %lld bytes", static_cast<long long>(expected),
         static_cast<long long>(blob.memory.bytes()));
}

}  // namespace

void test_format(const Format& format, const Weight& weight, Random& random) {
  const auto flags = static_cast<uint32_t>(below(random, fxsparse::kKnownFlags + 1));
  const int shift = static_cast<int>(below(random, 64));
  const Blob blob = pack(format, to_dense(weight, Order::kRows, false), flags, shift);
  test_header(blob, weight, flags);
  test_expected_bytes(blob, weight, format);
  try {
    format.validate(blob.packed.view);
  } catch (const fxsparse::Error& error) {
    expect(false, "validate: %s", error.what());
    return;
  }
  // Whatever the strides and the signs of zeros, and however many threads: the same bytes.
  for (Order order : kOrders)
    for (bool negative_zeros : {false, true}) {
      const Blob other = pack(format, to_dense(weight, order, negative_zeros), flags);
      expect(other.memory == blob.memory, "packed from order %d%s: other bytes",
             static_cast<int>(order), negative_zeros ? " with -0.0" : "");
    }
  const int threads = fxsparse::get_num_threads();
  fxsparse::set_num_threads(1);
  const Blob alone = pack(format, to_dense(weight, Order::kRows, false), flags);
  fxsparse::set_num_threads(threads);
  expect(alone.memory == blob.memory, "packed by one thread: other bytes");
  test_decode(blob, weight);
  test_unpack(blob, weight);
  test_cuts(blob);
}

}  // namespace native
