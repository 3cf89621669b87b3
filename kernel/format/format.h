#pragma once

// The table of packed formats. A new format is one line in format.cpp and its own pair of files;
// its kernels are lines of isa/table.inc.

#include "export.h"
#include "format/header.h"

namespace fxsparse {

// Where the sections of a blob start, and its length; all multiples of kAlignment.
struct Layout {
  uint64_t section[kMaxSections];
  uint64_t bytes;
};

struct Format {
  FormatId id;
  const char* name;

  // Fills in what the format decides from the sizes (widths, extent).
  void (*describe)(Header& header);

  // Pure. Throws Error if the header's widths or extent are not the format's own for these sizes,
  // or if the length does not fit 63 bits.
  Layout (*layout)(const Header& header);

  // Writes header and sections of `dense` to `out`, which has exactly layout().bytes.
  // `header` is described and holds the true number of nonzeros. Throws Error if that has changed;
  // `out` is then undefined, but nothing is written beyond it.
  void (*pack)(const DenseView& dense, const Header& header, uint8_t* out);

  // Writes zeros (+0.0) and values, bit for bit.
  void (*unpack)(const PackedView& view, void* out, int64_t row_stride, int64_t col_stride);

  // Checks everything a kernel relies on in the sections; values are any bits.
  void (*validate)(const PackedView& view);

  // The end of part `part` (1-based) when the rows are cut in `parts` of about equal work: a
  // multiple of kRowGroup or the number of rows, not decreasing in `part`.
  int64_t (*row_cut)(const PackedView& view, int64_t part, int64_t parts);

  // For the exact treatment of Inf and NaN in x, up to 64 rows of it at once, a bit for each.
  // bad[c]: the rows of x that have one in column c. missing[r - begin]: those of which row r of
  // the weight has no stored entry in at least one bad column.
  void (*missing_in_rows)(const PackedView& view, const uint64_t* bad, int64_t begin, int64_t end,
                          uint64_t* missing);

  // The same the other way round: bad[r] and missing[c - begin].
  void (*missing_in_cols)(const PackedView& view, const uint64_t* bad, int64_t begin, int64_t end,
                          uint64_t* missing);
};

const Format* find_format(FormatId id);  // null if unknown
FXSPARSE_EXPORT const Format& format_from_name(const char* name);

// Bytes of a packed weight. Pure: nonzeros may be anything up to rows * cols.
FXSPARSE_EXPORT int64_t packed_bytes(const Format& format, int64_t rows, int64_t cols,
                                     int64_t nonzeros, ValueType value);

// Number of entries that are not +0.0 or -0.0 (NaN, Inf and denormals are nonzeros).
FXSPARSE_EXPORT int64_t count_nonzeros(const DenseView& dense);

// Counts, then fills `out` in place; no temporary is as large as a row. Throws Error if out_bytes
// is not packed_bytes of the counted nonzeros, or if the weight is seen to change meanwhile.
FXSPARSE_EXPORT void pack(const DenseView& dense, const Format& format, uint32_t flags, void* out,
                          int64_t out_bytes);

}  // namespace fxsparse
