#include "format/header.h"

#include <cinttypes>
#include <cstring>

#include "error.h"
#include "format/format.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packed weights are little endian");

namespace fxsparse {
namespace {

struct ValueInfo {
  ValueType value;
  const char* name;
  int64_t bytes;
};

constexpr ValueInfo kValues[kValueTypes] = {
    {ValueType::kFloat32, "float32", 4},
    {ValueType::kFloat64, "float64", 8},
    {ValueType::kBFloat16, "bfloat16", 2},
    {ValueType::kFloat16, "float16", 2},
};

const ValueInfo& info(ValueType value) { return kValues[static_cast<int>(value) - 1]; }

// rows, cols and nonzeros come from a file: nothing may overflow while they are compared.
void check_counts(uint64_t rows, uint64_t cols, uint64_t nonzeros) {
  constexpr uint64_t kMost = INT64_MAX;
  if (rows > kMost || cols > kMost)
    fail("packed rows x cols: expected sizes below 2^63, got %" PRIu64 " x %" PRIu64, rows, cols);
  if (cols > uint64_t{1} << 32)  // an entry's column has 32 bits
    fail("packed cols: expected at most 2^32 columns, got %" PRIu64, cols);
  uint64_t elements;
  if (__builtin_mul_overflow(rows, cols, &elements)) elements = UINT64_MAX;
  if (nonzeros > elements || nonzeros > kMost)
    fail("packed nonzeros: expected at most rows x cols (%" PRIu64 " x %" PRIu64 "), got %" PRIu64,
         rows, cols, nonzeros);
}

}  // namespace

bool known_value(ValueType value) {
  const int index = static_cast<int>(value);
  return index >= 1 && index <= kValueTypes;
}

const char* value_name(ValueType value) { return info(value).name; }

int64_t value_bytes(ValueType value) { return info(value).bytes; }

ValueType value_from_name(const char* name) {
  for (const ValueInfo& known : kValues)
    if (std::strcmp(known.name, name) == 0) return known.value;
  fail("value type: expected float32, float64, bfloat16 or float16, got %s", name);
}

Header make_header(FormatId format, int64_t rows, int64_t cols, int64_t nonzeros, ValueType value,
                   uint32_t flags) {
  if (rows < 0 || cols < 0 || nonzeros < 0)
    fail("packed weight: expected sizes of zero or more, got rows %" PRId64 ", cols %" PRId64
         ", nonzeros %" PRId64,
         rows, cols, nonzeros);
  check_counts(rows, cols, nonzeros);
  if (flags & ~kKnownFlags) fail("packed flags: expected 0 to 31, got %" PRIu32, flags);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.format = format;
  header.value = value;
  header.flags = flags;
  header.rows = rows;
  header.cols = cols;
  header.nonzeros = nonzeros;
  return header;
}

Packed open_packed(const void* blob, int64_t bytes) {
  if (bytes < static_cast<int64_t>(sizeof(Header)))
    fail("packed weight: expected at least %zu bytes, got %" PRId64, sizeof(Header), bytes);
  Packed packed;
  Header& header = packed.header;
  std::memcpy(&header, blob, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    fail("packed magic: expected \"fxsparse\" in the first 8 bytes, got other bytes");
  if (header.version != kVersion)
    fail("packed version: expected %" PRIu32 ", got %" PRIu32, kVersion, header.version);
  if (!known_value(header.value))
    fail("packed value type: expected 1 to %d, got %d", kValueTypes,
         static_cast<int>(header.value));
  packed.format = find_format(header.format);
  if (packed.format == nullptr)
    fail("packed format: expected a known format, got %d", static_cast<int>(header.format));
  if (header.reserved != 0) fail("packed reserved byte: expected zero, got %d", header.reserved);
  if (header.flags & ~kKnownFlags)
    fail("packed flags: expected 0 to 31, got %" PRIu32, header.flags);
  check_counts(header.rows, header.cols, header.nonzeros);
  const Layout layout = packed.format->layout(header);
  if (layout.bytes != static_cast<uint64_t>(bytes))
    fail("packed size: expected %" PRIu64 " bytes (%s, %" PRIu64 " x %" PRIu64 ", %" PRIu64
         " nonzeros of %s), got %" PRId64,
         layout.bytes, packed.format->name, header.rows, header.cols, header.nonzeros,
         value_name(header.value), bytes);
  PackedView& view = packed.view;
  view.rows = header.rows;
  view.cols = header.cols;
  view.nonzeros = header.nonzeros;
  view.value = header.value;
  view.index_width = header.index_width;
  view.offset_width = header.offset_width;
  view.tile_rows_log2 = header.tile_rows_log2;
  view.tile_cols_log2 = header.tile_cols_log2;
  view.extent[0] = header.extent[0];
  view.extent[1] = header.extent[1];
  for (int i = 0; i < kMaxSections; ++i)
    view.section[i] = static_cast<const uint8_t*>(blob) + layout.section[i];
  return packed;
}

}  // namespace fxsparse
