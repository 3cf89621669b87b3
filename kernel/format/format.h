#pragma once

// The table of packed formats. A new format is one line in format.cpp and its own pair of files;
// its kernels are lines of isa/table.inc.

#include "export.h"
#include "format/entries.h"
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

  // decode() yields the rows of a multiple of this, or what is left of the weight: 16 or more.
  int64_t (*unit_rows)(const PackedView& view);

  // Fills in what the format decides (widths, tiles, extent) from the sizes and from where the
  // nonzeros of `dense` are; header.nonzeros is their number.
  void (*describe)(const DenseView& dense, Header& header);

  // About the bytes of a weight whose nonzeros are spread evenly. Pure.
  int64_t (*expected_bytes)(const Header& header);

  // Pure. Throws Error if the header's widths, tiles or extent cannot be the format's own for these
  // sizes, or if the length does not fit 63 bits.
  Layout (*layout)(const Header& header);

  // Writes header and sections of `dense` to `out`, which has exactly layout().bytes. `header` came
  // from describe. Throws Error if the weight has changed since; `out` is then undefined, but
  // nothing is written beyond it.
  void (*pack)(const DenseView& dense, const Header& header, uint8_t* out);

  // Checks everything a kernel relies on in the sections; values are any bits.
  void (*validate)(const PackedView& view);

  // The entries that are not padding of unit_rows rows from first_row on, which is a multiple of
  // unit_rows.
  void (*decode)(const PackedView& view, int64_t first_row, Entries& out);

  // The end of part `part` (1-based) when the rows are cut in `parts` of about equal work: a
  // multiple of kRowGroup (and of what else the kernels want) or the number of rows, not
  // decreasing in `part`.
  int64_t (*row_cut)(const PackedView& view, int64_t part, int64_t parts);
};

FXSPARSE_EXPORT const Format* find_format(FormatId id);  // null if unknown
FXSPARSE_EXPORT const Format& format_from_name(const char* name);

// About the bytes of a packed weight whose nonzeros are spread evenly, header included.
FXSPARSE_EXPORT int64_t expected_bytes(const Format& format, int64_t rows, int64_t cols,
                                       int64_t nonzeros, ValueType value);

// Number of entries that are not +0.0 or -0.0 (NaN, Inf and denormals are nonzeros).
FXSPARSE_EXPORT int64_t count_nonzeros(const DenseView& dense);

// The header of a weight in a format, and the bytes it takes packed. Reads the weight.
FXSPARSE_EXPORT Header describe(const DenseView& dense, const Format& format, uint32_t flags);
FXSPARSE_EXPORT int64_t packed_bytes(const Header& header);

// Fills `out` in place; temporaries are bounded by a tile's rows. Throws Error if out_bytes is not
// packed_bytes(header), if the header is not one of this weight, or if the weight is seen to change
// meanwhile.
FXSPARSE_EXPORT void pack(const DenseView& dense, const Header& header, void* out,
                          int64_t out_bytes);

}  // namespace fxsparse
