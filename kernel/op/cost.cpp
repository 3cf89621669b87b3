#include "op/cost.h"

#include <algorithm>
#include <cmath>

#include "error.h"

namespace fxsparse {
namespace {

constexpr FormatId kFormat_dense{0};
constexpr FormatId kFormat_csr = FormatId::kCsr;
constexpr FormatId kFormat_bitmap = FormatId::kBitmap;
constexpr FormatId kFormat_tiles = FormatId::kTiles;
constexpr FormatId kFormat_pairs = FormatId::kPairs;
constexpr Isa kIsa_generic = Isa::kGeneric;
constexpr Isa kIsa_avx2 = Isa::kAvx2;
constexpr Isa kIsa_avx512 = Isa::kAvx512;

bool same_block(const CostLine& a, const CostLine& b) {
  return a.isa == b.isa && a.format == b.format;
}

bool before(const CostLine& a, const CostLine& b) {
  if (a.isa != b.isa) return a.isa < b.isa;
  if (a.format != b.format) return a.format < b.format;
  if (a.elements != b.elements) return a.elements < b.elements;
  return a.batch < b.batch;
}

std::vector<CostLine> built_in() {
  std::vector<CostLine> lines = {
#define FXSPARSE_COST(isa, format, elements, batch, ...) \
  {kIsa_##isa, kFormat_##format, elements, batch, {__VA_ARGS__}},
#include "op/costs.inc"
#undef FXSPARSE_COST
  };
  std::sort(lines.begin(), lines.end(), before);
  return lines;
}

// Made on loading, as a fork during a first call would copy a half-made local static.
std::vector<CostLine> table = built_in();

// From one point of a curve to the next, and beyond both ends.
double line_through(double x0, double y0, double x1, double y1, double x) {
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

double at_density(const CostLine& line, double density) {
  int i = 1;  // the right end of the segment
  while (i + 1 < kCostDensities && kCostDensity[i] > density) ++i;
  const double ps = line_through(kCostDensity[i - 1], line.picoseconds[i - 1], kCostDensity[i],
                                 line.picoseconds[i], density);
  // Beyond the sparsest column something remains: loops, and y to be written.
  return std::max(ps, line.picoseconds[kCostDensities - 1] / 4);
}

// Lines [begin, end) differ in batch only. Beyond the largest batch a row costs what it did there.
double at_batch(const CostLine* begin, const CostLine* end, double density, double batch) {
  const CostLine* right = begin;
  while (right + 1 < end && right->batch < batch) ++right;
  const double y1 = at_density(*right, density);
  if (right == begin || right->batch <= batch) return y1 * batch / right->batch;
  const CostLine* left = right - 1;
  return line_through(left->batch, at_density(*left, density), right->batch, y1, batch);
}

}  // namespace

const std::vector<CostLine>& costs() { return table; }

void set_costs(const std::vector<CostLine>& lines) {
  std::vector<CostLine> merged = lines;
  for (const CostLine& line : lines) {
    if (line.elements < 1 || line.batch < 1) fail("costs: expected positive sizes");
    for (const double ps : line.picoseconds)
      if (!(ps > 0)) fail("costs: expected positive times, got %g", ps);
  }
  for (const CostLine& old : table)
    if (std::none_of(lines.begin(), lines.end(),
                     [&](const CostLine& line) { return same_block(line, old); }))
      merged.push_back(old);
  std::sort(merged.begin(), merged.end(), before);
  table = std::move(merged);
}

double expected_ns(Isa isa, FormatId format, int64_t rows, int64_t cols, int64_t nonzeros,
                   int64_t batch) {
  const double elements = static_cast<double>(rows) * static_cast<double>(cols);
  if (elements == 0 || batch == 0) return 0;
  const auto find = [&](Isa wanted) {
    const CostLine key{wanted, format, 0, 0, {}};
    const auto first = std::lower_bound(table.begin(), table.end(), key, before);
    return first != table.end() && same_block(*first, key) ? &*first : nullptr;
  };
  const CostLine* first = find(isa);
  // NEON has not been measured on a CPU of its own.
  if (first == nullptr && isa != Isa::kGeneric) first = find(Isa::kAvx2);
  if (first == nullptr) first = find(Isa::kGeneric);
  if (first == nullptr)
    fail("costs: expected lines for format %d, got none", static_cast<int>(format));
  const CostLine* const table_end = table.data() + table.size();
  const auto end_of_size = [&](const CostLine* line) {
    const CostLine* end = line;
    while (end < table_end && same_block(*end, *line) && end->elements == line->elements) ++end;
    return end;
  };
  const double density = static_cast<double>(nonzeros) / elements;
  const CostLine* end = end_of_size(first);
  double ps = at_batch(first, end, density, static_cast<double>(batch));
  for (; end < table_end && same_block(*end, *first) && elements > first->elements;) {
    const CostLine* next = end;
    end = end_of_size(next);
    const double next_ps = at_batch(next, end, density, static_cast<double>(batch));
    const double share =
        std::min(1.0, std::log(elements / first->elements) /
                          std::log(static_cast<double>(next->elements) / first->elements));
    ps += share * (next_ps - ps);
    first = next;
  }
  return ps * elements * 1e-3;
}

}  // namespace fxsparse
