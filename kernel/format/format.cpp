#include "format/format.h"

#include <cinttypes>
#include <cstring>
#include <string>

#include "error.h"
#include "format/bitmap.h"
#include "format/csr.h"
#include "format/pairs.h"
#include "format/tiles.h"

namespace fxsparse {
namespace {

const Format* const kFormatTable[] = {&kCsrFormat, &kBitmapFormat, &kTilesFormat, &kPairsFormat};

}  // namespace

const Format* find_format(FormatId id) {
  for (const Format* format : kFormatTable)
    if (format->id == id) return format;
  return nullptr;
}

const Format& format_from_name(const char* name) {
  std::string names;
  for (const Format* format : kFormatTable) {
    if (std::strcmp(format->name, name) == 0) return *format;
    names += (names.empty() ? "" : ", ") + std::string(format->name);
  }
  fail("format: expected one of %s, got %s", names.c_str(), name);
}

int64_t expected_bytes(const Format& format, int64_t rows, int64_t cols, int64_t nonzeros,
                       ValueType value) {
  return format.expected_bytes(make_header(format.id, rows, cols, nonzeros, value, 0));
}

Header describe(const DenseView& dense, const Format& format, uint32_t flags) {
  Header header =
      make_header(format.id, dense.rows, dense.cols, count_nonzeros(dense), dense.value, flags);
  format.describe(dense, header);
  return header;
}

int64_t packed_bytes(const Header& header) {
  return find_format(header.format)->layout(header).bytes;
}

void pack(const DenseView& dense, const Header& header, void* out, int64_t out_bytes) {
  const auto rows = static_cast<uint64_t>(dense.rows), cols = static_cast<uint64_t>(dense.cols);
  if (header.rows != rows || header.cols != cols || header.value != dense.value)
    fail("pack: expected a weight of %" PRIu64 " x %" PRIu64 " (the header's), got %" PRIu64
         " x %" PRIu64,
         header.rows, header.cols, rows, cols);
  const int64_t expected = packed_bytes(header);
  if (out_bytes != expected)
    fail("pack: expected an output of %" PRId64 " bytes (%" PRIu64 " nonzeros), got %" PRId64,
         expected, header.nonzeros, out_bytes);
  find_format(header.format)->pack(dense, header, static_cast<uint8_t*>(out));
}

}  // namespace fxsparse
