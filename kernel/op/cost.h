#pragma once

// What a multiply is expected to take: the one place that format choice, thread count and
// "slower than dense" come from. The numbers are measurements, in op/costs.inc.

#include <vector>

#include "export.h"
#include "isa/kernel.h"

namespace fxsparse {

constexpr int kCostDensities = 7;
// Columns of the table: the share of zeros is 1 - density.
constexpr double kCostDensity[kCostDensities] = {0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01};

// A line of the table: picoseconds for each element of the dense weight, fp32, one thread.
struct CostLine {
  Isa isa;
  FormatId format;   // FormatId{0}: a dense multiply
  int64_t elements;  // of the weight that was measured
  int64_t batch;
  double picoseconds[kCostDensities];
};

// The table in use. Lines of one instruction set and format are sorted by elements and batch.
FXSPARSE_EXPORT const std::vector<CostLine>& costs();

// Replaces the lines of all instruction sets and formats that `lines` has. Not while operators run.
FXSPARSE_EXPORT void set_costs(const std::vector<CostLine>& lines);

// Expected nanoseconds on one thread of y[batch][rows] = x Wt with a weight of so many nonzeros,
// packed in `format` (FormatId{0}: dense, the fastest way torch has). Interpolated: linear in batch
// and density, and in the logarithm of the weight's size. Other value types are taken to cost what
// fp32 does. An instruction set without measurements counts as the next narrower one.
FXSPARSE_EXPORT double expected_ns(Isa isa, FormatId format, int64_t rows, int64_t cols,
                                   int64_t nonzeros, int64_t batch);

}  // namespace fxsparse
