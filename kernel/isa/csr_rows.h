// Reading a weight in CSR. Included like csr_kernel.h.
#pragma once

#include "isa/panel_kernel.h"

namespace fxsparse {
namespace FXSPARSE_ISA_NAMESPACE {

template <class S, class Index>
struct Csr {
  const uint8_t* offsets;
  const Index* indices;
  const S* values;
  Width width;

  explicit Csr(const PackedView& w)
      : offsets(w.section[0]),
        indices(reinterpret_cast<const Index*>(w.section[1])),
        values(reinterpret_cast<const S*>(w.section[2])),
        width(w.offset_width) {}

  int64_t offset(int64_t row) const { return read_offset(offsets, width, row); }
};

// Picks the instantiation for the blob's index width.
#define FXSPARSE_BY_INDEX(function, w, ...)           \
  switch ((w).index_width) {                          \
    case Width::k8:                                   \
      return function<S, uint8_t>((w), __VA_ARGS__);  \
    case Width::k16:                                  \
      return function<S, uint16_t>((w), __VA_ARGS__); \
    default:                                          \
      return function<S, uint32_t>((w), __VA_ARGS__); \
  }

}  // namespace FXSPARSE_ISA_NAMESPACE
}  // namespace fxsparse
