#include "op/planes.h"

#include <algorithm>
#include <cstring>

namespace fxsparse {
namespace {

// Calls f(lane, offset, n) for each run of n rows that lie side by side: the first is `lane` rows
// after the first of all, its first value `offset` bytes into the images.
template <class F>
void for_runs(const PlaneRows& rows, F&& f) {
  const Planes& planes = rows.planes;
  int64_t n;
  for (int64_t lane = 0; lane < rows.rows; lane += n) {
    const int64_t row = rows.first + lane, pixel = row % planes.pixels;
    n = std::min(rows.rows - lane, planes.pixels - pixel);
    f(lane, (row / planes.pixels * planes.image + pixel) * rows.bytes, n);
  }
}

template <class Value>
void gather(const PlaneRows& rows, const uint8_t* x, Value* out) {
  for_runs(rows, [&](int64_t lane, int64_t offset, int64_t n) {
    const Value* from = reinterpret_cast<const Value*>(x + offset);
    for (int64_t k = 0; k < rows.length; ++k)
      for (int64_t i = 0; i < n; ++i)
        out[(lane + i) * rows.length + k] = from[k * rows.planes.channel + i];
  });
}

}  // namespace

void planes_to_panel(const VectorOps& ops, const PlaneRows& rows, const void* x, int vectors,
                     void* panel) {
  const int64_t lanes = static_cast<int64_t>(vectors) * ops.lanes;
  const int64_t step = rows.planes.channel * rows.bytes;
  const int64_t lane_bytes = ops.compute_bytes;
  for_runs(rows, [&](int64_t lane, int64_t offset, int64_t n) {
    const uint8_t* from = static_cast<const uint8_t*>(x) + offset;
    uint8_t* to = static_cast<uint8_t*>(panel) + lane * lane_bytes;
    for (int64_t k = 0; k < rows.length; ++k)
      ops.widen(from + k * step, n, to + k * lanes * lane_bytes);
  });
  if (rows.rows == lanes) return;
  uint8_t* beyond = static_cast<uint8_t*>(panel) + rows.rows * lane_bytes;
  for (int64_t k = 0; k < rows.length; ++k)
    std::memset(beyond + k * lanes * lane_bytes, 0, (lanes - rows.rows) * lane_bytes);
}

void planes_to_rows(const PlaneRows& rows, const void* x, void* out) {
  const uint8_t* from = static_cast<const uint8_t*>(x);
  if (rows.bytes == 2)
    gather(rows, from, static_cast<uint16_t*>(out));
  else if (rows.bytes == 4)
    gather(rows, from, static_cast<uint32_t*>(out));
  else
    gather(rows, from, static_cast<uint64_t*>(out));
}

bool all_finite(const VectorOps& ops, const PlaneRows& rows, const void* x) {
  const int64_t step = rows.planes.channel * rows.bytes;
  bool finite = true;
  for_runs(rows, [&](int64_t, int64_t offset, int64_t n) {
    const uint8_t* from = static_cast<const uint8_t*>(x) + offset;
    for (int64_t k = 0; k < rows.length; ++k) finite &= ops.all_finite(from + k * step, n);
  });
  return finite;
}

void rows_to_planes(const VectorOps& ops, const PlaneRows& rows, const void* in, int64_t stride,
                    void* y, Scratch& scratch) {
  const int64_t vectors = (rows.rows + ops.lanes - 1) / ops.lanes;
  const int64_t lanes = vectors * ops.lanes, step = rows.planes.channel * rows.bytes;
  void* panel = scratch.reserve(rows.length * lanes * ops.compute_bytes);
  ops.pack(in, stride, rows.rows, rows.length, static_cast<int>(vectors), panel);
  for_runs(rows, [&](int64_t lane, int64_t offset, int64_t n) {
    const uint8_t* from = static_cast<const uint8_t*>(panel) + lane * ops.compute_bytes;
    uint8_t* to = static_cast<uint8_t*>(y) + offset;
    for (int64_t k = 0; k < rows.length; ++k)
      ops.narrow(from + k * lanes * ops.compute_bytes, n, to + k * step);
  });
}

}  // namespace fxsparse
