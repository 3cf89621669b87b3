#pragma once

// What a kernel is. One Kernel stands for a format, an instruction set and a value type; it
// computes on one thread, allocates nothing and knows nothing of batches larger than a panel.
//
// A *panel* holds a few rows of x (or of the output gradient) transposed, in the type that is
// computed in: panel[k * lanes + b] with lanes = vectors * vector_lanes, so that one weight
// multiplies `vectors` whole vectors. Lanes beyond the rows given are zero.

#include "format/types.h"

namespace fxsparse {

enum class Isa : uint8_t { kGeneric, kAvx2, kAvx512, kNeon };

constexpr int kMaxVectors = 4;  // of a panel row; 4 x 2 accumulators of two registers' worth

struct Kernel {
  int vector_lanes;
  int64_t compute_bytes;  // of one element of a panel
  int64_t panel_bytes;    // a panel should not be larger, as long as it has one vector

  // panel <- `rows` rows of x, `cols` long, `stride` elements apart.
  void (*pack)(const void* x, int64_t stride, int64_t rows, int64_t cols, int vectors, void* panel);

  // The way back: rows of y, `cols` long, from a panel.
  void (*unpack)(const void* panel, int64_t rows, int64_t cols, int vectors, void* y,
                 int64_t stride);

  // True where all n values are finite.
  bool (*all_finite)(const void* x, int64_t n);

  // y[b][n] = bias[n] + sum over k of W[n][k] * panel[k][b], for n in [begin, end), b < rows.
  // `bias` may be null. The order of the sum depends on the row of W alone.
  void (*multiply)(const PackedView& w, const void* panel, int64_t rows, int vectors,
                   const void* bias, void* y, int64_t y_stride, int64_t begin, int64_t end);

  // The same for a single row of x, which is in the computing type and not transposed.
  void (*multiply_one)(const PackedView& w, const void* x, const void* bias, void* y, int64_t begin,
                       int64_t end);

  // out[k - begin][b] = sum over n of W[n][k] * panel[n][b], for k in [begin, end): `out` is a
  // panel of the columns [begin, end) alone. Sums run over n in order, whatever the cut.
  void (*multiply_transposed)(const PackedView& w, const void* panel, int vectors, void* out,
                              int64_t begin, int64_t end);

  // The same for a single row: panels with one lane.
  void (*multiply_transposed_one)(const PackedView& w, const void* g, void* out, int64_t begin,
                                  int64_t end);

  // out <- n values of x in the computing type, and back.
  void (*widen)(const void* x, int64_t n, void* out);
  void (*narrow)(const void* x, int64_t n, void* out);
};

}  // namespace fxsparse
