#pragma once

// How a call is cut: the batch into panels, the rest of the work into chunks.

#include <cstdint>

#include "isa/kernel.h"

namespace fxsparse {

// Batch rows are multiplied a panel at a time. Panels are as even as whole vectors allow, so that
// no batch size ends with a nearly empty one. A few rows, alone or left over by whole vectors, are
// not made into a panel. All of this depends on the batch and the weight alone.
struct Panels {
  int64_t batch;
  int lanes;
  int64_t vectors;  // in panels
  int64_t wide;     // panels of at least a vector
  int64_t count;    // with the few rows after them, if any

  int64_t first_row(int64_t panel) const {
    return panel < wide ? first_vector(panel) * lanes : vectors * lanes;
  }
  bool operator==(const Panels& other) const {
    return batch == other.batch && lanes == other.lanes && vectors == other.vectors &&
           wide == other.wide && count == other.count;
  }

  // In vectors; 0 for few rows that are not transposed.
  int width(int64_t panel) const {
    return panel < wide ? static_cast<int>(first_vector(panel + 1) - first_vector(panel)) : 0;
  }
  int64_t rows(int64_t panel) const {
    const int64_t end = panel + 1 < count ? first_row(panel + 1) : batch;
    return end - first_row(panel);
  }

 private:
  int64_t first_vector(int64_t panel) const {
    const int64_t more = vectors % wide;  // these have one vector more
    return vectors / wide * panel + (panel < more ? panel : more);
  }
};

Panels make_panels(const Kernel& kernel, const PackedView& weight, int64_t batch);

// Of the output gradient; `length` is N.
Panels make_transposed_panels(const VectorOps& ops, int64_t batch, int64_t length);

// Threads worth using for work of `ns` nanoseconds, at most `most` (0: the pool's size), where a
// second one costs `cut_ns` nanoseconds more than waking it. `more` as for the pool.
int choose_threads(double ns, double cut_ns, int most, bool more);

// A few chunks a thread, so that a thread that lost its CPU for a while can be relieved. Columns
// are dear to cut (every row is searched for each cut), so the transposed product makes as few as
// it can.
constexpr int64_t kChunksPerThread = 4;
constexpr int64_t kChunksPerThreadTransposed = 1;
constexpr double kNsPerColumnCut = 30;  // and row

// The transposed product's sums are made in a buffer that the thread keeps: columns are cut so that
// it is not much larger than this. Faster, too: 32 rows of 16 x 1,000,000 take 91 ms, not 134.
constexpr int64_t kOutputBytes = 1 << 20;

// Into how many parts a panel's work is cut, given how many panels there are, for about so many
// chunks. `groups` is the most.
int64_t choose_parts(double chunks, int64_t panels, int64_t groups);

}  // namespace fxsparse
