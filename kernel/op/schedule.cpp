#include "op/schedule.h"

#include <algorithm>
#include <cmath>

#include "pool/pool.h"

namespace fxsparse {
namespace {

// Waking a parked worker takes 11-14 us: below this, one thread is faster.
constexpr double kNsForTwo = 15e3;
// And each further thread should have this much to do.
constexpr double kNsPerThread = 7.5e3;

// What waking parked workers costs besides that, unless the next call is to find them awake.
// Without a torch operator before, two threads gain from 60-80 us of work on (on Sapphire Rapids,
// virtual); after one, whose threads spin, 75 us of work took 98 on two threads, 110 took 120 and
// 260 took 190.
constexpr double kNsToWake = 45e3;

Panels cut_batch(const VectorOps& ops, int64_t batch, int64_t length, int64_t panel_bytes,
                 int most_vectors, int most_few, int leftover_few) {
  const int64_t lanes = ops.lanes;
  const int64_t vector_bytes = length * lanes * ops.compute_bytes;
  const int64_t most =
      std::clamp<int64_t>(panel_bytes / std::max<int64_t>(vector_bytes, 1), 1, most_vectors);
  const int64_t left = batch % lanes;
  const bool apart =
      batch <= most_few || (left > 0 && left <= leftover_few && batch / lanes % most == 0);
  Panels panels;
  panels.batch = batch;
  panels.lanes = ops.lanes;
  panels.vectors = batch <= most_few ? 0 : apart ? batch / lanes : (batch + lanes - 1) / lanes;
  panels.wide = (panels.vectors + most - 1) / most;
  panels.count = panels.wide + apart;
  return panels;
}

// The transposed product keeps a panel of the gradient and one of its sums near; it has no
// accumulators, so wider panels than this bring nothing.
constexpr int64_t kTransposedPanelBytes = 256 << 10;

}  // namespace

Panels make_panels(const Kernel& kernel, const PackedView& weight, int64_t batch) {
  const int most = kernel.vectors_for ? kernel.vectors_for(weight) : kernel.most_vectors;
  return cut_batch(*kernel.ops, batch, weight.cols, kernel.panel_bytes, most, kernel.most_few,
                   kernel.leftover_few);
}

Panels make_transposed_panels(const VectorOps& ops, int64_t batch, int64_t length) {
  return cut_batch(ops, batch, length, kTransposedPanelBytes, kScatterVectors, 1, 1);
}

int choose_threads(double ns, double cut_ns, int most, bool more) {
  if (ns < kNsForTwo + cut_ns || most == 1) return 1;
  if (ns < kNsForTwo + cut_ns + kNsToWake && !more && !workers_awake()) return 1;
  const int available = get_num_threads();
  const int limit = most == 0 ? available : std::min(most, available);
  return static_cast<int>(std::clamp<double>(ns / kNsPerThread, 1, limit));
}

int64_t choose_parts(double chunks, int64_t panels, int64_t groups) {
  const auto parts = static_cast<int64_t>(std::ceil(chunks / static_cast<double>(panels)));
  return std::clamp<int64_t>(parts, 1, std::max<int64_t>(groups, 1));
}

}  // namespace fxsparse
