#pragma once

// Tensors through LibTorch's stable ABI: one build serves every torch from 2.10 on. Its C functions
// are used directly: torch::stable::Tensor allocates at every turn, and a call at 64 x 64 takes 2
// microseconds in all.

#define TORCH_TARGET_VERSION 0x020a000000000000ULL
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "format/types.h"

namespace fxsparse {

inline void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error("fxsparse: a call into torch failed");
}

// An owned tensor of the operator's stack.
class Tensor {
 public:
  explicit Tensor(StableIValue value)
      : handle_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  static Tensor empty(int64_t dim, const int64_t* sizes, int32_t dtype,
                      bool channels_last = false) {
    int64_t strides[kMostDims];
    int64_t stride = 1;
    const auto next = [&](int64_t d) {
      strides[d] = stride;
      stride *= sizes[d] > 1 ? sizes[d] : 1;
    };
    if (channels_last) next(1);
    for (int64_t d = dim - 1; d >= 0; --d)
      if (!channels_last || d != 1) next(d);
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0,
                                 &handle) != AOTI_TORCH_SUCCESS)
      throw std::runtime_error("fxsparse: no memory for the result");
    return Tensor(handle);
  }

  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides); }
  int32_t dtype() const { return get<int32_t>(aoti_torch_get_dtype); }
  bool is_cpu() const {
    return get<int32_t>(aoti_torch_get_device_type) == aoti_torch_device_type_cpu();
  }
  bool is_strided() const {
    return get<int32_t>(aoti_torch_get_layout) == aoti_torch_layout_strided();
  }
  void* data() const { return get<void*>(aoti_torch_get_data_ptr); }

  // False where the storage was resized below what the sizes and strides reach.
  bool has_memory() const {
    const int64_t* size = sizes();
    const int64_t* stride = strides();
    int64_t last = get<int64_t>(aoti_torch_get_storage_offset);
    for (int64_t d = dim() - 1; d >= 0; --d) {
      if (size[d] == 0) return true;
      last += (size[d] - 1) * stride[d];
    }
    const int64_t item = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype()));
    return (last + 1) * item <= get<int64_t>(aoti_torch_get_storage_size);
  }

  Tensor contiguous(bool channels_last = false) const {
    Tensor copy = empty(dim(), sizes(), dtype(), channels_last);
    check(aoti_torch_copy_(copy.handle_, handle_, 0));
    return copy;
  }

  StableIValue release() { return torch::stable::detail::from(std::exchange(handle_, nullptr)); }

  static constexpr int64_t kMostDims = 64;

 private:
  template <class T>
  T get(AOTITorchError (*function)(AtenTensorHandle, T*)) const {
    T value;
    check(function(handle_, &value));
    return value;
  }

  AtenTensorHandle handle_;
};

inline std::optional<Tensor> to_optional(StableIValue value) {
  const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
  if (!handle) return std::nullopt;
  return Tensor(*handle);
}

// Errors of the arguments are RuntimeError in Python, as F.linear's are.
template <class... Args>
[[noreturn]] void refuse(const char* format, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, format, args...);
  throw std::runtime_error(text);
}

inline std::string dtype_name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float32(), "float32"},     {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},   {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_uint8(), "uint8"},         {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},         {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},         {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& [known, name] : names)
    if (known == dtype) return name;
  return "dtype " + std::to_string(dtype);
}

inline int32_t dtype_of(ValueType value) {
  switch (value) {
    case ValueType::kFloat32:
      return aoti_torch_dtype_float32();
    case ValueType::kFloat64:
      return aoti_torch_dtype_float64();
    case ValueType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    default:
      return aoti_torch_dtype_float16();
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d)
    text += (d ? ", " : "") + std::to_string(tensor.sizes()[d]);
  return text + "]";
}

inline void check_plain(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) refuse("expected %s on the CPU, got another device", name);
  if (!tensor.is_strided()) refuse("expected %s with a strided layout, got another layout", name);
  if (!tensor.has_memory()) refuse("expected %s with its memory, which was freed", name);
}

[[noreturn]] inline void refuse_dtype(const char* name, int32_t expected, int32_t got) {
  refuse(
      "expected %s of dtype %s (the weight's), got %s; to change a model's dtype, convert the "
      "dense "
      "model and compile that",
      name, dtype_name(expected).c_str(), dtype_name(got).c_str());
}

}  // namespace fxsparse
