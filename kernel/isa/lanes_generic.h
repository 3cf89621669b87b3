#pragma once

// Packed values to lanes and back to columns in portable code: see lanes_kernel.h.

#include "isa/vector_generic.h"

namespace fxsparse {
namespace generic {

constexpr int kRegisters = 16;

#include "isa/lanes_portable.h"

template <class T, int N>
inline Vec<T, N> expand(Vec<T, N> packed, unsigned mask) {
  Vec<T, N> r = Vec<T, N>::zero();
  int next = 0;
  for (int i = 0; i < N; ++i)
    if (mask >> i & 1) r.v[i] = packed.v[next++];
  return r;
}

}  // namespace generic
}  // namespace fxsparse
