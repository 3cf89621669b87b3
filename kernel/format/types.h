#pragma once

// The plain data that the formats, the kernels and the driver share. Included by the files of
// kernel/isa, which are compiled with instruction sets the CPU may not have: nothing here may
// define a function, or the linker could pick that copy for everybody.

#include <cstdint>

namespace fxsparse {

enum class FormatId : uint16_t { kCsr = 1, kBitmap = 2, kTiles = 3, kPairs = 4 };
constexpr int kFormats = 4;

// How values are stored. What they are computed in follows from it (ComputeOf in isa/), so that
// narrower storage than the model's type needs no new header.
enum class ValueType : uint8_t { kFloat32 = 1, kFloat64 = 2, kBFloat16 = 3, kFloat16 = 4 };
constexpr int kValueTypes = 4;

// Unsigned little-endian integers; the enumerator is the size in bytes.
enum class Width : uint8_t { k8 = 1, k16 = 2, k32 = 4, k64 = 8 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr uint32_t kVersion = 1;
constexpr char kMagic[8] = {'f', 'x', 's', 'p', 'a', 'r', 's', 'e'};
// What the dense weight was, for the way back; no kernel reads these.
constexpr uint32_t kFlagTransposed = 1;    // the transpose of this one
constexpr uint32_t kFlagBuffer = 2;        // a buffer, not a parameter
constexpr uint32_t kFlagRequiresGrad = 4;  // a parameter that required gradients
constexpr int kTrailingShift = 3;          // dimensions of size 1 that follow; 3: a vector
constexpr uint32_t kFlagsTrailing = 3u << kTrailingShift;
constexpr uint32_t kKnownFlags = kFlagTransposed | kFlagBuffer | kFlagRequiresGrad | kFlagsTrailing;
constexpr uint64_t kAlignment = 64;  // of every section, relative to the start of the blob

// The first 64 bytes of a packed weight, little endian, on every CPU the same. What follows are the
// format's sections; their places are computed from this (Format::layout) and never stored.
struct Header {
  char magic[8];
  uint32_t version;
  FormatId format;
  ValueType value;
  Width index_width;
  Width offset_width;
  uint8_t tile_rows_log2;  // of the format's tiles; zero where it has none
  uint8_t tile_cols_log2;
  uint8_t reserved;  // zero
  uint32_t flags;
  uint64_t rows;  // N, out_features
  uint64_t cols;  // K, in_features
  uint64_t nonzeros;
  uint64_t extent[2];  // lengths that only the format knows (steps, tiles); zero where it has none
};
static_assert(sizeof(Header) == 64, "the header is part of the file format");

constexpr int kMaxSections = 4;

// A packed weight opened for reading: a checked header and where its sections start. Sections are
// 64-byte aligned relative to the blob, but a blob (mapped from a file) may start anywhere.
struct PackedView {
  int64_t rows;
  int64_t cols;
  int64_t nonzeros;
  ValueType value;
  Width index_width;
  Width offset_width;
  uint8_t tile_rows_log2;
  uint8_t tile_cols_log2;
  int64_t extent[2];
  const uint8_t* section[kMaxSections];
};

// A dense matrix that somebody else owns; strides in elements.
struct DenseView {
  const void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
  ValueType value;
};

// Rows are handed out in groups of 16: a group's outputs fill whole cache lines (16 floats), so two
// threads never write to the same line, and every kernel's output tile is one group.
constexpr int64_t kRowGroup = 16;

}  // namespace fxsparse
