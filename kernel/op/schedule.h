#pragma once

// How a call is cut: the batch into panels, the rest of the work into chunks.

#include <cstdint>

#include "isa/kernel.h"

namespace fxsparse {

// Batch rows are multiplied a panel at a time. Panels are as even as whole vectors allow, so that
// no batch size ends with a nearly empty one; their widths depend on the batch and the weight
// alone.
struct Panels {
  int64_t batch;
  int vector_lanes;
  int64_t vectors;  // of the whole batch
  int64_t count;

  int64_t first_vector(int64_t panel) const {
    const int64_t more = vectors % count;  // these have one vector more
    return vectors / count * panel + (panel < more ? panel : more);
  }
  int64_t first_row(int64_t panel) const { return first_vector(panel) * vector_lanes; }
  int width(int64_t panel) const {  // in vectors
    return static_cast<int>(first_vector(panel + 1) - first_vector(panel));
  }
  int64_t rows(int64_t panel) const {
    const int64_t end = first_row(panel + 1);
    return (end < batch ? end : batch) - first_row(panel);
  }
};

// `length` is the number of rows of a panel (K; N when transposed).
Panels make_panels(const Kernel& kernel, int64_t batch, int64_t length);

// Threads worth using for nonzeros x batch, at most `most` (0: the pool's size), where a second one
// costs `cut_ns` nanoseconds more than waking it.
int choose_threads(int64_t nonzeros, int64_t batch, double cut_ns, int most);

// A few chunks a thread, so that a thread that lost its CPU for a while can be relieved. Columns
// are dear to cut (every row is searched for each cut), so the transposed product makes as few as
// it can.
constexpr int64_t kChunksPerThread = 4;
constexpr int64_t kChunksPerThreadTransposed = 1;
constexpr double kNsPerColumnCut = 30;  // and row

// Into how many parts a panel's work is cut, given how many panels there are. `groups` is the most.
int64_t choose_parts(int threads, int64_t panels, int64_t groups, int64_t chunks_per_thread);

}  // namespace fxsparse
