#pragma once

// What formats do over their units of rows (a row, a group, a block): run over them in parallel,
// check them, cut them in parts of equal work.

#include <algorithm>
#include <atomic>
#include <cinttypes>

#include "error.h"
#include "format/dense.h"
#include "pool/pool.h"

namespace fxsparse {

// Calls f(begin, end) for ranges of units, on as many threads as pay for `bytes`.
template <class F>
void for_ranges(int64_t units, int64_t bytes, F&& f) {
  const int threads = threads_for_bytes(bytes);
  const int64_t chunks = std::min<int64_t>(units, threads == 1 ? 1 : threads * 4);
  if (chunks == 0) return;
  parallel_for(threads, static_cast<int>(chunks),
               [&](int chunk) { f(units * chunk / chunks, units * (chunk + 1) / chunks); });
}

// The first unit for which holds(unit) is false, or `units`.
template <class F>
int64_t first_failing(int64_t units, int64_t bytes, F&& holds) {
  std::atomic<int64_t> first{units};
  for_ranges(units, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      if (holds(unit)) continue;
      int64_t seen = first.load();
      while (unit < seen && !first.compare_exchange_weak(seen, unit)) {
      }
      return;
    }
  });
  return first.load();
}

// check(unit) throws Error; of several, that of the first unit is thrown here. Returns `units`, or
// the unit that was right when it was looked at again.
template <class F>
int64_t check_units(int64_t units, int64_t bytes, F&& check) {
  const int64_t bad = first_failing(units, bytes, [&](int64_t unit) {
    try {
      check(unit);
      return true;
    } catch (const Error&) {
      return false;
    }
  });
  if (bad != units) check(bad);
  return bad;
}

// What the units before the end of part `part` of `parts` should cost, of `total`.
inline int64_t cost_of_parts(int64_t total, int64_t part, int64_t parts) {
  return static_cast<int64_t>(static_cast<__int128>(total) * part / parts);
}

// The fewest units that cost `target`, where cost(n) is what the first n cost.
template <class F>
int64_t units_that_cost(int64_t units, int64_t target, F&& cost) {
  int64_t low = 0, high = units;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// What pack() says where count and fill disagree.
[[noreturn]] inline void fail_changed(uint64_t nonzeros) {
  fail("pack: expected the %" PRIu64
       " nonzeros counted at first, got others: the weight changed while it was packed",
       nonzeros);
}

}  // namespace fxsparse
