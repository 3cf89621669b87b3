// What the kernels of formats with rows in lanes share. Included after lanes_<isa>.h, which has the
// operations that differ: expand (packed values to the lanes of a mask), transpose_masks, look_up.

#pragma once

#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

constexpr int kGroup = static_cast<int>(kRowGroup);

// Vectors of a group: 16 rows in lanes.
template <class V>
constexpr int kParts = kGroup / V::kLanes;

// A mask in a register of its own: counted from memory, g++ makes it a 16-bit count, which waits
// for the register's old value (1.2x the time of tiles at one batch row).
inline unsigned read_mask(const uint16_t* p) {
  unsigned mask = read(p);
  asm("" : "+r"(mask));
  return mask;
}

// Calls f(part, its bits of the mask, how many bits are before it) for the vectors of a group.
template <class V, class F>
__attribute__((always_inline)) inline void for_parts(unsigned mask, F&& f) {
  constexpr int L = V::kLanes;
  if constexpr (kParts<V> == 1) {
    f(0, mask, 0);
  } else {
    int before = 0;
#pragma GCC unroll 16
    for (int p = 0; p < kParts<V>; ++p) {
      const unsigned bits = mask >> (p * L) & ((1u << L) - 1);
      f(p, bits, before);
      before += __builtin_popcount(bits);
    }
  }
}

// out[part] <- the values of the rows of `mask`, zero elsewhere. Reads 16 values.
template <class S, class V>
__attribute__((always_inline)) inline void expand_group(unsigned mask, const S* packed, V* out) {
  for_parts<V>(
      mask, [&](int p, unsigned bits, int before) __attribute__((always_inline)) {
        V values = V::load(packed + before);
        keep(values);
        out[p] = expand(values, bits);
      });
}

// Copies the `n` entries left before the end of a section to where 16 more can be read.
template <class T>
inline void copy_entries(const T* from, int64_t n, T* to) {
  __builtin_memcpy(to, from, n * sizeof(T));
  __builtin_memset(static_cast<void*>(to + n), 0, kGroup * sizeof(T));
}

// The sums of a group's rows for one batch row, of which n exist.
template <class S, class V>
inline void store_group(const typename V::Scalar* sums, const S* bias, int n, S* y) {
  constexpr int L = V::kLanes;
  if (n == kGroup) {
#pragma GCC unroll 16
    for (int p = 0; p < kParts<V>; ++p)
      V::add(V::load(sums + p * L), bias ? V::load(bias + p * L) : V::zero()).store(y + p * L);
    return;
  }
  for (int r = 0; r < n; ++r) narrow(sums[r] + (bias ? widen(bias[r]) : 0), y + r);
}

// ---- a few batch rows ---------------------------------------------------------------------------

// Batch rows are multiplied `width` at a time, for which there are registers; they are spread
// evenly and padded to a width that is compiled.
template <class V>
constexpr int most_width() {
  constexpr int kWidth = (kRegisters == 32 ? 24 : 12) / kParts<V>;
  return kWidth < 1 ? 1 : kWidth > kMaxFew ? kMaxFew : kWidth;
}

struct FewShape {
  int64_t passes;
  int width;
};
template <class V>
inline FewShape few_shape(int64_t rows) {
  constexpr int kWidths[] = {1, 2, 3, 4, 6, 8, 12, 16};
  const int64_t passes = (rows + most_width<V>() - 1) / most_width<V>();
  for (const int width : kWidths)
    if (width * passes >= rows) return {passes, width};
  return {passes, kMaxFew};
}

// Calls f(constant of width) with the instantiation for a width. What f calls must not be inlined:
// among all the widths g++ spills pointers into vector registers.
template <class V, class F>
inline void with_width(int width, F&& f) {
  const auto call = [&](auto constant) {
    if constexpr (constant.value <= most_width<V>()) f(constant);
  };
  switch (width) {
    case 1:
      return call(Constant<1>());
    case 2:
      return call(Constant<2>());
    case 3:
      return call(Constant<3>());
    case 4:
      return call(Constant<4>());
    case 6:
      return call(Constant<6>());
    case 8:
      return call(Constant<8>());
    case 12:
      return call(Constant<12>());
    default:
      return call(Constant<16>());
  }
}

// Bytes that are asked for ahead of the values in use.
constexpr int64_t kAhead = 3072;

// Asks for the lines of `n` values that are used kAhead later. All of them: what is left to the
// hardware comes late. Bitmaps with 50 % zeros at one batch row, with one line for 8 columns (about
// 4 lines), took 1.25 times as long in cache, 1.35 times from memory.
template <class S>
__attribute__((always_inline)) inline void prefetch_ahead(const S* values, int64_t n) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(S)); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(values) + kAhead + i);
}

// y <- the groups of [begin, end) times `rows` rows of x. Sums is a format's class for one group;
// start(group, b) makes one for the batch rows from b on.
//
// Two groups take turns, half of the rows apart: the hardware prefetches for each of two places in
// memory as much as for one, and the end of one group's row of steps is hidden behind the other's.
// At one batch row weights of 116 to 236 MB were read at 1.2 to 1.4 times the GB/s, and those in L2
// took 0.77 to 0.95 of the time (Sapphire Rapids, AVX-512). Three groups gained nothing more, four
// lost a quarter in L2. Where a group has no sums to spare, two were up to 1.05 times slower.
template <class Sums, class S, class Start>
__attribute__((always_inline)) inline void multiply_groups(int64_t rows, const S* bias, S* y,
                                                           int64_t y_stride, int64_t begin,
                                                           int64_t end, Start&& start) {
  using V = typename ComputeOf<S>::Vector;
  constexpr bool kTwo = Sums::kUnroll > 1 && 2 * Sums::kVectors <= kRegisters / 2;
  const int64_t groups = (end - begin + kGroup - 1) / kGroup;
  const int64_t apart = (kTwo ? (groups + 1) / 2 : groups) * kGroup;
  for (int64_t row = begin; row < begin + apart; row += kGroup) {
    for (int64_t b0 = 0; b0 < rows; b0 += Sums::kWidth) {
      const auto finish = [&](Sums & group, int64_t first) __attribute__((always_inline)) {
        typename V::Scalar sums[Sums::kWidth][kGroup];
        group.finish(sums);
        const int n = end - first < kGroup ? static_cast<int>(end - first) : kGroup;
        for (int64_t b = 0; b < Sums::kWidth && b0 + b < rows; ++b)
          store_group<S, V>(sums[b], bias ? bias + first : nullptr, n,
                            y + (b0 + b) * y_stride + first);
      };
      Sums group = start(row / kGroup, b0);
      if constexpr (kTwo) {
        if (const int64_t other_row = row + apart; other_row < end) {
          Sums other = start(other_row / kGroup, b0);
          const int64_t units = group.units(), other_units = other.units();
          for (int64_t n = units < other_units ? units : other_units; n > 0; --n) {
            group.add_unit();
            other.add_unit();
          }
          finish(other, other_row);
        }
      }
      finish(group, row);
    }
  }
}

// ---- panels -------------------------------------------------------------------------------------

// Asks for `bytes` from p on, into L2: a group goes on where it stopped only after the others of
// its block, which no hardware prefetcher foresees.
inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// Two rows of W times all the vectors of a panel row stay in registers.
constexpr int kMostVectors = kRegisters == 32 ? 8 : 6;

// Sums of so many rows are kept in memory (L2: 128 KB with 8 vectors of 16) while a slice of the
// panel's rows (L1) is multiplied with all of them.
constexpr int64_t kBlockRows = 256;

// Slices of the panel are what has to fit a cache, so the panel may be as large as memory bears.
constexpr int64_t kPanelMemory = 32 << 20;

// Step `kSteps` is zero: an odd number of entries is padded with it.
constexpr int kSteps = 64;

// A slice of a group, expanded.
template <class Scalar>
struct Expanded {
  alignas(64) Scalar values[(kSteps + 1) * kGroup];  // [step][row]
  alignas(64) int32_t places[(kSteps + 1) * kGroup];
  uint64_t rows[kGroup];  // bit t: the row has a value in step t
};

// The next step whose bit is set, or the one that is zero.
inline uint64_t take_step(uint64_t& bits) {
  const uint64_t t = lowest_bit(bits);
  bits &= bits - 1;
  return t;
}

template <class V>
inline int64_t block_bytes(int vectors) {
  return kBlockRows * vectors * V::kLanes * static_cast<int64_t>(sizeof(typename V::Scalar));
}

// Calls slices(first group, groups, sums) for each block of rows, where sums[row][lane] starts as
// the bias, and writes what it leaves there to y.
template <class S, int kVectors, class F>
inline void for_blocks(int64_t rows, const S* bias, S* y, int64_t y_stride, int64_t begin,
                       int64_t end, typename ComputeOf<S>::Vector::Scalar* sums, F&& slices) {
  using V = typename ComputeOf<S>::Vector;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * V::kLanes;
  for (int64_t block = begin; block < end; block += kBlockRows) {
    const int64_t n = end - block < kBlockRows ? end - block : kBlockRows;
    const int64_t groups = (n + kGroup - 1) / kGroup;
    for (int64_t r = 0; r < groups * kGroup; ++r) {
      const V b = V::broadcast(bias && r < n ? widen(bias[block + r]) : 0);
      for (int v = 0; v < kVectors; ++v) b.store(sums + r * kLanes + v * V::kLanes);
    }
    slices(block / kGroup, groups, sums);
    int64_t lanes = kLanes;
    asm("" : "+r"(lanes));  // or there would be a copy of store_tile for each width
    store_tile<S, V>(sums, static_cast<int>(n), lanes, rows, y + block, y_stride);
  }
}

}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
