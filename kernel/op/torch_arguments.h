#pragma once

// What the torch operators share: their arguments checked, and calls of the driver filled in.

#include <algorithm>
#include <cinttypes>

#include "error.h"
#include "op/linear.h"
#include "op/torch_tensor.h"

namespace fxsparse {

inline Packed open_checked(const Tensor& packed) {
  check_plain(packed, "packed");
  if (packed.dim() != 1 || packed.dtype() != aoti_torch_dtype_uint8() ||
      (packed.sizes()[0] > 1 && packed.strides()[0] != 1))
    refuse("expected packed as a contiguous 1-D uint8 tensor, got %s of shape %s",
           dtype_name(packed.dtype()).c_str(), shape_text(packed).c_str());
  try {
    return open_packed(packed.data(), packed.sizes()[0]);
  } catch (const Error& error) {
    throw std::runtime_error(error.what());
  }
}

inline Packed open_checked(const Tensor& packed, int64_t out_features, int64_t in_features,
                           int32_t dtype) {
  const Packed opened = open_checked(packed);
  if (opened.view.rows != out_features || opened.view.cols != in_features)
    refuse("expected out_features %" PRId64 " and in_features %" PRId64
           " (the packed weight's), got %" PRId64 " and %" PRId64,
           opened.view.rows, opened.view.cols, out_features, in_features);
  if (dtype_of(opened.view.value) != dtype)
    refuse("expected dtype %s (the packed weight's), got %s", value_name(opened.view.value),
           dtype_name(dtype).c_str());
  return opened;
}

// Of an operator that is told no more of the weight than its rows.
inline Packed open_checked(const Tensor& packed, int64_t out_features) {
  const Packed opened = open_checked(packed);
  if (opened.view.rows != out_features)
    refuse("expected out_features %" PRId64 " (the packed weight's), got %" PRId64,
           opened.view.rows, out_features);
  return opened;
}

// A stride that walks all rows of x, if one does: all dimensions but the last, which is contiguous.
inline bool collapses(int64_t dim, const int64_t* sizes, const int64_t* strides,
                      int64_t* row_stride) {
  if (sizes[dim - 1] > 1 && strides[dim - 1] != 1) return false;
  *row_stride = sizes[dim - 1];
  int64_t expected = -1;
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (expected < 0)
      *row_stride = strides[d];
    else if (strides[d] != expected)
      return false;
    expected = strides[d] * sizes[d];
  }
  return true;
}

inline void check_threads(int64_t threads) {
  if (threads < 0 || threads > INT32_MAX)
    refuse("expected threads of zero (any) or more, got %" PRId64, threads);
}

// The bias as the kernels want it.
inline std::optional<Tensor> open_bias(std::optional<Tensor> bias, int64_t out, int32_t dtype) {
  if (!bias) return bias;
  check_plain(*bias, "bias");
  if (bias->dtype() != dtype) refuse_dtype("bias", dtype, bias->dtype());
  if (bias->dim() != 1 || bias->sizes()[0] != out)
    refuse("expected bias of shape [%" PRId64 "], got shape %s", out, shape_text(*bias).c_str());
  if (out > 1 && bias->strides()[0] != 1) return bias->contiguous();
  return bias;
}

struct Names {
  const char* x;
  const char* length;
};

// Rows of a tensor: all dimensions but the last, which is contiguous.
struct Rows {
  Tensor tensor;
  int64_t batch;
  int64_t stride;
};

inline Rows open_rows(Tensor x, int64_t length, int32_t dtype, const Names& names) {
  check_plain(x, names.x);
  const int64_t dim = x.dim();
  if (x.dtype() != dtype) refuse_dtype(names.x, dtype, x.dtype());
  if (dim == 0 || dim > Tensor::kMostDims)
    refuse("expected %s with 1 to %d dimensions, got %d", names.x,
           static_cast<int>(Tensor::kMostDims), static_cast<int>(dim));
  if (x.sizes()[dim - 1] != length)
    refuse("expected %s with %" PRId64 " values in its last dimension (%s), got shape %s", names.x,
           length, names.length, shape_text(x).c_str());
  int64_t batch = 1;
  for (int64_t d = 0; d < dim - 1; ++d) batch *= x.sizes()[d];
  int64_t stride = length;
  if (batch > 0 && !collapses(dim, x.sizes(), x.strides(), &stride)) {
    x = x.contiguous();
    stride = length;
  }
  return {std::move(x), batch, stride};
}

// As many rows of another length.
inline Tensor empty_rows(const Rows& rows, int64_t length, int32_t dtype) {
  int64_t sizes[Tensor::kMostDims];
  const int64_t dim = rows.tensor.dim();
  std::copy(rows.tensor.sizes(), rows.tensor.sizes() + dim, sizes);
  sizes[dim - 1] = length;
  return Tensor::empty(dim, sizes, dtype);
}

inline LinearCall make_call(const Packed& packed, const Rows& x, const Tensor& y, int64_t y_stride,
                            int64_t threads) {
  LinearCall call{};
  call.packed = &packed;
  call.x = x.tensor.data();
  call.x_stride = x.stride;
  call.batch = x.batch;
  call.y = y.data();
  call.y_stride = y_stride;
  call.threads = static_cast<int>(threads);
  call.isa = chosen_isa();
  return call;
}

}  // namespace fxsparse
