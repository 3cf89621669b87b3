#include "op/schedule.h"

#include <algorithm>

#include "pool/pool.h"

namespace fxsparse {
namespace {

// Measured with AVX2 on Zen 3: a nonzero takes 0.26-0.31 ns for one batch row, 0.48 for 8 and 1.37
// for 32.
constexpr double kNsPerNonzero = 0.25;
constexpr double kNsPerMac = 0.035;

// Waking a parked worker takes 11-14 us: below this, one thread is faster.
constexpr double kNsForTwo = 15e3;
// And each further thread should have this much to do.
constexpr double kNsPerThread = 7.5e3;

}  // namespace

Panels make_panels(const Kernel& kernel, int64_t batch, int64_t length) {
  const int64_t lanes = kernel.vector_lanes;
  const int64_t vector_bytes = length * lanes * kernel.compute_bytes;
  const int64_t most =
      std::clamp<int64_t>(kernel.panel_bytes / std::max<int64_t>(vector_bytes, 1), 1, kMaxVectors);
  // A row left over goes alone if a panel would be opened for it.
  const bool alone = batch % lanes == 1 && batch / lanes % most == 0;
  Panels panels;
  panels.batch = batch;
  panels.vector_lanes = kernel.vector_lanes;
  panels.vectors = alone ? batch / lanes : (batch + lanes - 1) / lanes;
  panels.wide = (panels.vectors + most - 1) / most;
  panels.count = panels.wide + alone;
  return panels;
}

int choose_threads(int64_t nonzeros, int64_t batch, double cut_ns, int most) {
  const double ns = static_cast<double>(nonzeros) * (kNsPerNonzero + kNsPerMac * batch);
  if (ns < kNsForTwo + cut_ns || most == 1) return 1;
  const int available = get_num_threads();
  const int limit = most == 0 ? available : std::min(most, available);
  return static_cast<int>(std::clamp<double>(ns / kNsPerThread, 1, limit));
}

int64_t choose_parts(int threads, int64_t panels, int64_t groups, int64_t chunks_per_thread) {
  if (threads == 1) return 1;
  const int64_t parts = (threads * chunks_per_thread + panels - 1) / panels;
  return std::clamp<int64_t>(parts, 1, std::max<int64_t>(groups, 1));
}

}  // namespace fxsparse
