// The micro-kernels of rows in pairs (format/pairs.h), once for all instruction sets and value
// types. Included like csr_kernel.h, after a vector wrapper.
//
// A row of a panel is loaded once for both rows of a pair where they share its column: loads, not
// multiplications, are what limits a product with one row at a time. Sums of a block of rows lie in
// scratch memory, rows of a panel as wide; they are carried from tile to tile in registers.

#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

// The weights of a slot, each in all lanes. A vector wrapper may know better.
template <class S, class V>
inline void broadcast_two(const S* p, V& a, V& b) {
  a = V::broadcast(widen(read(p)));
  b = V::broadcast(widen(read(p + 1)));
}

namespace pairs {

// Where a tile's pairs, indices and values are, or what is left of them.
template <class S>
struct Pairs {
  const uint8_t* headers;
  const uint8_t* indices;
  const S* values;
};

// A few vectors are too few chains of sums to hide the latency of a multiplication.
constexpr int chains_of(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }

// sums[row] += the tile's part, for `count` pairs.
template <class S, int kVectors>
inline void multiply_pairs(Pairs<S>& at, int64_t count,
                           const typename ComputeOf<S>::Vector::Scalar* x,
                           typename ComputeOf<S>::Vector::Scalar* sums) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  constexpr int U = chains_of(kVectors);
  const uint8_t* headers = at.headers;
  const uint8_t* indices = at.indices;
  const S* values = at.values;
  for (; count > 0; --count, headers += 6) {
    int shared = read(reinterpret_cast<const uint16_t*>(headers + 2));
    int single = read(reinterpret_cast<const uint16_t*>(headers + 4));
    Scalar* sum_a = sums + headers[0] * kLanes;
    Scalar* sum_b = sums + headers[1] * kLanes;
    V a[U][kVectors], b[U][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      a[0][v] = V::load(sum_a + v * L);
      b[0][v] = V::load(sum_b + v * L);
      for (int u = 1; u < U; ++u) a[u][v] = b[u][v] = V::zero();
    }
    const auto share = [&](V * to_a, V * to_b, int i) __attribute__((always_inline)) {
      const Scalar* column = x + indices[i] * kLanes;
      V weight_a, weight_b;
      broadcast_two(values + 2 * i, weight_a, weight_b);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        V value = V::load(column + v * L);
        value.pin();
        to_a[v] = V::fma(weight_a, value, to_a[v]);
        to_b[v] = V::fma(weight_b, value, to_b[v]);
      }
    };
    for (; shared >= U; shared -= U, indices += U, values += 2 * U)
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) share(a[u], b[u], u);
    for (; shared > 0; --shared, ++indices, values += 2) share(a[0], b[0], 0);

    const auto step = [&](V * to_a, V * to_b, int i) __attribute__((always_inline)) {
      const Scalar* column_a = x + indices[2 * i] * kLanes;
      const Scalar* column_b = x + indices[2 * i + 1] * kLanes;
      V weight_a, weight_b;
      broadcast_two(values + 2 * i, weight_a, weight_b);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        to_a[v] = V::fma(weight_a, V::load(column_a + v * L), to_a[v]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        to_b[v] = V::fma(weight_b, V::load(column_b + v * L), to_b[v]);
    };
    for (; single >= U; single -= U, indices += 2 * U, values += 2 * U)
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) step(a[u], b[u], u);
    for (; single > 0; --single, indices += 2, values += 2) step(a[0], b[0], 0);

#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      for (int half = U / 2; half > 0; half /= 2)
        for (int u = 0; u < half; ++u) {
          a[u][v] = V::add(a[u][v], a[u + half][v]);
          b[u][v] = V::add(b[u][v], b[u + half][v]);
        }
      a[0][v].store(sum_a + v * L);
      b[0][v].store(sum_b + v * L);
    }
  }
  at = {headers, indices, values};
}

template <class S, int kVectors>
void multiply_blocks(const PackedView& w, const void* panel, int64_t rows, const void* bias_,
                     void* y_, int64_t y_stride, int64_t begin, int64_t end, void* scratch) {
  using V = typename ComputeOf<S>::Vector;
  using Scalar = typename V::Scalar;
  constexpr int L = V::kLanes;
  constexpr int64_t kLanes = static_cast<int64_t>(kVectors) * L;
  const S* bias = static_cast<const S*>(bias_);
  S* y = static_cast<S*>(y_);
  Scalar* sums = static_cast<Scalar*>(scratch);
  const int64_t tile_rows = int64_t{1} << w.tile_rows_log2;
  const int64_t tile_cols = int64_t{1} << w.tile_cols_log2;
  const int64_t tiles = (w.cols + tile_cols - 1) >> w.tile_cols_log2;

  // Tiles lie one after the other, so that only the first one's place is looked up.
  const int64_t first_tile = (begin >> w.tile_rows_log2) * tiles;
  const uint8_t* starts = w.section[0];
  uint64_t value, index;
  if (w.offset_width == Width::k32) {
    value = read(reinterpret_cast<const uint32_t*>(starts) + 2 * first_tile);
    index = read(reinterpret_cast<const uint32_t*>(starts) + 2 * first_tile + 1);
  } else {
    value = read(reinterpret_cast<const uint64_t*>(starts) + 2 * first_tile);
    index = read(reinterpret_cast<const uint64_t*>(starts) + 2 * first_tile + 1);
  }
  Pairs<S> at = {w.section[1] + first_tile * (tile_rows / 2) * 6, w.section[2] + index,
                 reinterpret_cast<const S*>(w.section[3]) + value};

  for (int64_t block = begin; block < end; block += tile_rows) {
    const int64_t n = end - block < tile_rows ? end - block : tile_rows;
    for (int64_t r = 0; r < n; ++r) {
      const V start = V::broadcast(bias ? widen(read(bias + block + r)) : 0);
      for (int v = 0; v < kVectors; ++v) start.store(sums + r * kLanes + v * L);
    }
    // The row that an odd one is paired with.
    for (int v = 0; v < kVectors; ++v) V::zero().store(sums + n * kLanes + v * L);
    for (int64_t tile = 0; tile < tiles; ++tile)
      multiply_pairs<S, kVectors>(
          at, (n + 1) / 2, static_cast<const Scalar*>(panel) + tile * tile_cols * kLanes, sums);
    // A vector of batch rows at a time: 16 lines of y are open, not 128, and as many as 8 of those
    // may compete for the same place of the cache.
    for (int64_t lane = 0; lane < rows; lane += L)
      store_tile<S, V>(sums + lane, static_cast<int>(n), kLanes, rows - lane < L ? rows - lane : L,
                       y + lane * y_stride + block, y_stride);
  }
}

template <class S>
int64_t scratch_bytes(const PackedView& w, int vectors) {
  using V = typename ComputeOf<S>::Vector;
  return ((int64_t{1} << w.tile_rows_log2) + 1) * vectors * V::kLanes *
         static_cast<int64_t>(sizeof(typename V::Scalar));
}

template <class S>
void multiply(const PackedView& w, const void* panel, int64_t rows, int vectors, const void* bias,
              void* y, int64_t y_stride, int64_t begin, int64_t end, void* scratch) {
  const auto with = [&](auto multiply_some) {
    multiply_some(w, panel, rows, bias, y, y_stride, begin, end, scratch);
  };
  switch (vectors) {
    case 1:
      return with(multiply_blocks<S, 1>);
    case 2:
      return with(multiply_blocks<S, 2>);
    case 3:
      return with(multiply_blocks<S, 3>);
    case 4:
      return with(multiply_blocks<S, 4>);
    case 5:
      return with(multiply_blocks<S, 5>);
    case 6:
      return with(multiply_blocks<S, 6>);
    case 7:
      return with(multiply_blocks<S, 7>);
    default:
      return with(multiply_blocks<S, 8>);
  }
}

template <class S>
constexpr Kernel make_kernel(const VectorOps* ops) {
  return {ops,     kPairVectors, kPairPanelBytes,  0,          0, nullptr,
          nullptr, nullptr,      scratch_bytes<S>, multiply<S>};
}

}  // namespace pairs
}  // namespace FXSPARSE_ISA_NAMESPACE

// A constant: no code of this file runs before dispatch chose it.
#define FXSPARSE_OPS FXSPARSE_JOIN(vector_ops_, FXSPARSE_ISA_NAMESPACE)
extern const Kernel FXSPARSE_JOIN(pairs_, FXSPARSE_ISA_NAMESPACE)[kValueTypes];
constexpr Kernel FXSPARSE_JOIN(pairs_, FXSPARSE_ISA_NAMESPACE)[kValueTypes] = {
    FXSPARSE_ISA_NAMESPACE::pairs::make_kernel<float>(&FXSPARSE_OPS[0]),
    FXSPARSE_ISA_NAMESPACE::pairs::make_kernel<double>(&FXSPARSE_OPS[1]),
    FXSPARSE_ISA_NAMESPACE::pairs::make_kernel<BFloat16>(&FXSPARSE_OPS[2]),
    FXSPARSE_ISA_NAMESPACE::pairs::make_kernel<Float16>(&FXSPARSE_OPS[3]),
};

}  // namespace fxsparse
