#include "format/format.h"

#include <cinttypes>
#include <cstring>

#include "error.h"
#include "format/csr.h"

namespace fxsparse {
namespace {

const Format* const kFormats[] = {&kCsrFormat};

Header describe(const Format& format, int64_t rows, int64_t cols, int64_t nonzeros, ValueType value,
                uint32_t flags) {
  Header header = make_header(format.id, rows, cols, nonzeros, value, flags);
  format.describe(header);
  return header;
}

}  // namespace

const Format* find_format(FormatId id) {
  for (const Format* format : kFormats)
    if (format->id == id) return format;
  return nullptr;
}

const Format& format_from_name(const char* name) {
  for (const Format* format : kFormats)
    if (std::strcmp(format->name, name) == 0) return *format;
  fail("format: expected csr, got %s", name);
}

int64_t packed_bytes(const Format& format, int64_t rows, int64_t cols, int64_t nonzeros,
                     ValueType value) {
  return format.layout(describe(format, rows, cols, nonzeros, value, 0)).bytes;
}

void pack(const DenseView& dense, const Format& format, uint32_t flags, void* out,
          int64_t out_bytes) {
  const int64_t nonzeros = count_nonzeros(dense);
  const Header header = describe(format, dense.rows, dense.cols, nonzeros, dense.value, flags);
  const int64_t expected = format.layout(header).bytes;
  if (out_bytes != expected)
    fail("pack: expected an output of %" PRId64 " bytes (%" PRId64 " nonzeros), got %" PRId64,
         expected, nonzeros, out_bytes);
  format.pack(dense, header, static_cast<uint8_t*>(out));
}

}  // namespace fxsparse
