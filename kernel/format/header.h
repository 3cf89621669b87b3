#pragma once

#include "export.h"
#include "format/types.h"

namespace fxsparse {

struct Format;

FXSPARSE_EXPORT const char* value_name(ValueType value);  // "float32", ...
FXSPARSE_EXPORT ValueType value_from_name(const char* name);
FXSPARSE_EXPORT int64_t value_bytes(ValueType value);
FXSPARSE_EXPORT bool known_value(ValueType value);

// A header with everything set but what the format decides (widths, extent). Checks rows, cols and
// nonzeros: not negative, nonzeros at most rows * cols.
Header make_header(FormatId format, int64_t rows, int64_t cols, int64_t nonzeros, ValueType value,
                   uint32_t flags);

struct Packed {
  Header header;
  const Format* format;
  PackedView view;
};

// Reads and checks the header of a blob against the blob's length: after this every section lies
// inside the blob. Contents of the sections are not looked at. Throws Error naming the field.
FXSPARSE_EXPORT Packed open_packed(const void* blob, int64_t bytes);

}  // namespace fxsparse
