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

constexpr int kScatterVectors = 4;  // of a panel of the transposed product
constexpr int kMaxVectors = 8;      // of a panel row
constexpr int kMaxFew = 16;         // batch rows that multiply_few takes
constexpr int kMaxPanelRows = 128;  // kMaxVectors of 16 lanes

#define FXSPARSE_ACTIVATION(name) +1
constexpr int kActivations =
#include "isa/activations.inc"
    ;
#undef FXSPARSE_ACTIVATION

// What does not depend on the format: one for each instruction set and value type.
struct VectorOps {
  int lanes;
  int64_t compute_bytes;  // of one element of a panel

  // panel <- `rows` rows of x, `cols` long, `stride` elements apart.
  void (*pack)(const void* x, int64_t stride, int64_t rows, int64_t cols, int vectors, void* panel);

  // The way back: rows of y, `cols` long, from a panel.
  void (*unpack)(const void* panel, int64_t rows, int64_t cols, int vectors, void* y,
                 int64_t stride);

  // True where all n values are finite.
  bool (*all_finite)(const void* x, int64_t n);

  // out <- n values of x in the computing type, and back.
  void (*widen)(const void* x, int64_t n, void* out);
  void (*narrow)(const void* x, int64_t n, void* out);

  // The transposed product of a weight in CSR: out[k - begin][b] += sum over n of
  // W[n][k] * panel[n][b], for k in [begin, end): `out` is a panel of the columns [begin, end)
  // alone. Sums run over n in order, whatever the cut.
  void (*scatter)(const PackedView& csr, const void* panel, int vectors, void* out, int64_t begin,
                  int64_t end);

  // The same for a single row: panels with one lane.
  void (*scatter_one)(const PackedView& csr, const void* g, void* out, int64_t begin, int64_t end);

  // n values of the stored type in place, by an activation's place in activations.inc; and
  // y <- y + other, y <- y * other. A value's result does not depend on where it is.
  void (*activate[kActivations])(void* y, int64_t n);
  void (*add)(void* y, const void* other, int64_t n);
  void (*multiply)(void* y, const void* other, int64_t n);
};

struct Kernel {
  const VectorOps* ops;

  // The most vectors of a panel, and a panel should not be larger than `panel_bytes` as long as it
  // has one vector.
  int most_vectors;
  int64_t panel_bytes;

  // Batches of up to `most_few` rows are not made into panels (0: all are). `leftover_few`: so
  // many rows left over by whole vectors are multiplied apart, as few, if they would open a panel.
  int most_few;
  int leftover_few;

  // Bytes of the input that multiply_few wants; 0 if it takes the rows of x as they are.
  int64_t (*few_bytes)(int64_t rows, int64_t cols);
  void (*prepare_few)(const void* x, int64_t stride, int64_t rows, int64_t cols, void* out);
  // As `multiply`; x is what prepare_few made (or a single row as it is), rows <= most_few.
  void (*multiply_few)(const PackedView& w, const void* x, int64_t rows, const void* bias, void* y,
                       int64_t y_stride, int64_t begin, int64_t end);

  // Bytes of working memory `multiply` needs, 64-byte aligned, contents undefined.
  int64_t (*scratch_bytes)(const PackedView& w, int vectors);

  // y[b][n] = bias[n] + sum over k of W[n][k] * panel[k][b], for n in [begin, end), b < rows.
  // `begin` is a row_cut of the format. `bias` may be null. The order of the sum depends on the
  // row of W and on `vectors` alone. x is finite, or the result is corrected by the caller: zeros
  // that are not stored, and lanes that pad, may be multiplied or not.
  void (*multiply)(const PackedView& w, const void* panel, int64_t rows, int vectors,
                   const void* bias, void* y, int64_t y_stride, int64_t begin, int64_t end,
                   void* scratch);

  // The most vectors of a panel for this weight, where that depends on it; null: most_vectors.
  int (*vectors_for)(const PackedView& w) = nullptr;

  // As `multiply`, into the rows [begin, end) of a panel, in the computing type and not rounded to
  // the stored one. `out` has room for one row more than the weight. Null where the format has
  // nothing faster than rows of y made into a panel.
  void (*multiply_to_panel)(const PackedView& w, const void* panel, int vectors, const void* bias,
                            void* out, int64_t begin, int64_t end) = nullptr;
};

}  // namespace fxsparse
