#pragma once

// Rows of a multiply that are the pixels of images stored channel by channel: the values of a row
// lie apart, but those of neighbouring rows lie side by side, which is how a panel wants them.

#include <cstdint>

#include "isa/kernel.h"
#include "op/scratch.h"

namespace fxsparse {

// Value k of row r is data[r / pixels * image + k * channel + r % pixels], in values.
struct Planes {
  int64_t pixels;  // of an image
  int64_t image;   // values from an image to the next
  int64_t channel;
};

// `rows` rows from `first` on, of `bytes` a value, `length` values each.
struct PlaneRows {
  const Planes& planes;
  int64_t bytes;
  int64_t first;
  int64_t rows;
  int64_t length;
};

// A panel of all of them, lanes beyond them zero.
void planes_to_panel(const VectorOps& ops, const PlaneRows& rows, const void* x, int vectors,
                     void* panel);

// One after the other, `length` values each.
void planes_to_rows(const PlaneRows& rows, const void* x, void* out);

bool all_finite(const VectorOps& ops, const PlaneRows& rows, const void* x);

// The way back: rows `stride` values apart become those of y. y begins at the first channel that
// is written.
void rows_to_planes(const VectorOps& ops, const PlaneRows& rows, const void* in, int64_t stride,
                    void* y, Scratch& scratch);

}  // namespace fxsparse
