// The torch operators that do more than one multiply, or more than multiply, at a time.

#include <memory>
#include <vector>

#include "op/mlp.h"
#include "op/torch_arguments.h"

namespace fxsparse {
namespace {

using torch::stable::detail::to;

// A borrowed string of the operator's stack, deleted at the end.
class Text {
 public:
  explicit Text(StableIValue value) : handle_(to<StringHandle>(value)) {}
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() { torch_delete_string(handle_); }

  const char* c_str() const {
    const char* text;
    check(torch_string_c_str(handle_, &text));
    return text;
  }

 private:
  StringHandle handle_;
};

// The elements of a list of the operator's stack, which is deleted.
std::vector<StableIValue> take_list(StableIValue value) {
  const auto list = to<StableListHandle>(value);
  size_t size;
  check(torch_list_size(list, &size));
  std::vector<StableIValue> elements(size);
  for (size_t i = 0; i < size; ++i) check(torch_list_get_item(list, i, &elements[i]));
  check(torch_delete_list(list));
  return elements;
}

// Complaints of the core are RuntimeError in Python.
Epilogue parse(Epilogue (*parser)(const char*), const Text& text) {
  try {
    return parser(text.c_str());
  } catch (const Error& error) {
    throw std::runtime_error(error.what());
  }
}

// What joins y, which has the rows of x in another length.
std::optional<Rows> open_other(std::optional<Tensor> other, const Rows& x, int64_t length,
                               int32_t dtype, const char* name) {
  if (!other) return std::nullopt;
  const std::string got = shape_text(*other);
  const int64_t dim = x.tensor.dim();
  bool same = other->dim() == dim && other->sizes()[dim - 1] == length;
  for (int64_t d = 0; same && d < dim - 1; ++d) same = other->sizes()[d] == x.tensor.sizes()[d];
  if (!same)
    refuse("expected %s of the result's shape (x of shape %s, %" PRId64 " features), got shape %s",
           name, shape_text(x.tensor).c_str(), length, got.c_str());
  return open_rows(*std::move(other), length, dtype, {name, "out_features"});
}

StableIValue run_linear_fused(Tensor x, const Packed& packed, std::optional<Tensor> bias,
                              std::optional<Tensor> other, int64_t threads, const Text& text,
                              bool more) {
  const int64_t out = packed.view.rows;
  const int32_t dtype = dtype_of(packed.view.value);
  bias = open_bias(std::move(bias), out, dtype);
  check_threads(threads);
  const Epilogue epilogue = parse(parse_epilogue, text);
  const Rows rows = open_rows(std::move(x), packed.view.cols, dtype, {"x", "in_features"});
  if (other.has_value() != (epilogue.join != Epilogue::Join::kNone))
    refuse("expected other with \"add\" and \"mul\" and with nothing else, got epilogue \"%s\" %s",
           text.c_str(), other ? "with it" : "without it");
  const std::optional<Rows> joined = open_other(std::move(other), rows, out, dtype, "other");

  Tensor y = empty_rows(rows, out, dtype);
  LinearCall call = make_call(packed, rows, y, out, threads);
  call.bias = bias ? bias->data() : nullptr;
  call.epilogue = epilogue;
  call.other = joined ? joined->tensor.data() : nullptr;
  call.other_stride = joined ? joined->stride : 0;
  call.more = more;
  linear(kernel_of(call), call);
  return y.release();
}

// linear_fused(x, packed, bias, other, out_features, in_features, dtype, threads, epilogue, more)
void boxed_linear_fused(StableIValue* stack, uint64_t, uint64_t) {
  Tensor x(stack[0]), packed(stack[1]);
  std::optional<Tensor> bias = to_optional(stack[2]), other = to_optional(stack[3]);
  const Text text(stack[8]);
  const Packed opened =
      open_checked(packed, to<int64_t>(stack[4]), to<int64_t>(stack[5]), to<int32_t>(stack[6]));
  stack[0] = run_linear_fused(std::move(x), opened, std::move(bias), std::move(other),
                              to<int64_t>(stack[7]), text, to<bool>(stack[9]));
}

// linear_fused.no_grad(x, packed, bias, other, out_features, threads, epilogue, more)
void boxed_linear_fused_no_grad(StableIValue* stack, uint64_t, uint64_t) {
  Tensor x(stack[0]), packed(stack[1]);
  std::optional<Tensor> bias = to_optional(stack[2]), other = to_optional(stack[3]);
  const Text text(stack[6]);
  const Packed opened = open_checked(packed, to<int64_t>(stack[4]));
  stack[0] = run_linear_fused(std::move(x), opened, std::move(bias), std::move(other),
                              to<int64_t>(stack[5]), text, to<bool>(stack[7]));
}

// The first four arguments of linears.
struct Siblings {
  Tensor x;
  std::vector<Tensor> packed;
  std::vector<std::optional<Tensor>> biases;
  std::vector<int64_t> outs;

  explicit Siblings(StableIValue* stack) : x(stack[0]) {
    for (const StableIValue value : take_list(stack[1])) packed.emplace_back(value);
    for (const StableIValue value : take_list(stack[2])) biases.push_back(to_optional(value));
    for (const StableIValue value : take_list(stack[3])) outs.push_back(to<int64_t>(value));
    const size_t count = packed.size();
    if (count == 0 || biases.size() != count || outs.size() != count)
      refuse(
          "expected as many biases and out_features as packed weights, at least one, got %d, %d, "
          "%d",
          static_cast<int>(biases.size()), static_cast<int>(outs.size()), static_cast<int>(count));
  }

  StableIValue run(int64_t in, int32_t dtype, int64_t threads, bool more) {
    const size_t count = packed.size();
    check_threads(threads);
    std::vector<Packed> opened;
    for (size_t i = 0; i < count; ++i) {
      opened.push_back(open_checked(packed[i], outs[i], in, dtype));
      biases[i] = open_bias(std::move(biases[i]), outs[i], dtype);
    }
    const Rows rows = open_rows(std::move(x), in, dtype, {"x", "in_features"});
    std::vector<Tensor> y;
    std::vector<LinearCall> calls;
    for (size_t i = 0; i < count; ++i) {
      y.push_back(empty_rows(rows, outs[i], dtype));
      calls.push_back(make_call(opened[i], rows, y[i], outs[i], threads));
      calls[i].bias = biases[i] ? biases[i]->data() : nullptr;
      calls[i].more = more;
    }
    linears(calls);

    StableListHandle list;
    check(torch_new_list_reserve_size(count, &list));
    for (Tensor& tensor : y) check(torch_list_push_back(list, tensor.release()));
    return torch::stable::detail::from(list);
  }
};

// linears(x, packed, biases, out_features, in_features, dtype, threads, more)
void boxed_linears(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = Siblings(stack).run(to<int64_t>(stack[4]), to<int32_t>(stack[5]),
                                 to<int64_t>(stack[6]), to<bool>(stack[7]));
}

// linears.no_grad(x, packed, biases, out_features, threads, more)
void boxed_linears_no_grad(StableIValue* stack, uint64_t, uint64_t) {
  Siblings siblings(stack);
  const Packed first = open_checked(siblings.packed[0]);
  stack[0] = siblings.run(first.view.cols, dtype_of(first.view.value), to<int64_t>(stack[4]),
                          to<bool>(stack[5]));
}

// The first eight arguments of mlp.
struct Layer {
  Tensor x;
  std::optional<Tensor> gate, gate_bias;
  Tensor up;
  std::optional<Tensor> up_bias;
  Tensor down;
  std::optional<Tensor> down_bias, residual;

  explicit Layer(StableIValue* stack)
      : x(stack[0]),
        gate(to_optional(stack[1])),
        gate_bias(to_optional(stack[2])),
        up(stack[3]),
        up_bias(to_optional(stack[4])),
        down(stack[5]),
        down_bias(to_optional(stack[6])),
        residual(to_optional(stack[7])) {}

  StableIValue run(const Packed& opened_up, const Packed& opened_down, int64_t threads,
                   const Text& text, bool more) {
    const int64_t in = opened_up.view.cols, hidden = opened_up.view.rows;
    const int64_t out = opened_down.view.rows;
    const int32_t dtype = dtype_of(opened_up.view.value);
    if (gate_bias && !gate) refuse("expected gate_bias with gate alone, got it without one");
    std::optional<Packed> opened_gate;
    if (gate) opened_gate = open_checked(*gate, hidden, in, dtype);
    gate_bias = open_bias(std::move(gate_bias), hidden, dtype);
    up_bias = open_bias(std::move(up_bias), hidden, dtype);
    down_bias = open_bias(std::move(down_bias), out, dtype);
    check_threads(threads);
    const Epilogue activation = parse(parse_activation, text);
    const Rows rows = open_rows(std::move(x), in, dtype, {"x", "in_features"});
    const std::optional<Rows> added = open_other(std::move(residual), rows, out, dtype, "residual");

    const auto weight = [](const Packed* packed, const std::optional<Tensor>& bias) {
      return Weight{packed, bias ? bias->data() : nullptr};
    };
    Tensor y = empty_rows(rows, out, dtype);
    MlpCall call{};
    call.gate = weight(opened_gate ? &*opened_gate : nullptr, gate_bias);
    call.up = weight(&opened_up, up_bias);
    call.down = weight(&opened_down, down_bias);
    call.activation = activation;
    call.x = rows.tensor.data();
    call.x_stride = rows.stride;
    call.batch = rows.batch;
    call.y = y.data();
    call.y_stride = out;
    call.residual = added ? added->tensor.data() : nullptr;
    call.residual_stride = added ? added->stride : 0;
    call.isa = chosen_isa();
    call.threads = static_cast<int>(threads);
    call.more = more;
    mlp(call);
    return y.release();
  }
};

// mlp(x, gate, gate_bias, up, up_bias, down, down_bias, residual, in_features, hidden,
//     out_features, dtype, threads, activation, more)
void boxed_mlp(StableIValue* stack, uint64_t, uint64_t) {
  Layer layer(stack);
  const Text text(stack[13]);
  const int64_t in = to<int64_t>(stack[8]), hidden = to<int64_t>(stack[9]);
  const int32_t dtype = to<int32_t>(stack[11]);
  const Packed up = open_checked(layer.up, hidden, in, dtype);
  const Packed down = open_checked(layer.down, to<int64_t>(stack[10]), hidden, dtype);
  stack[0] = layer.run(up, down, to<int64_t>(stack[12]), text, to<bool>(stack[14]));
}

// mlp.no_grad(x, gate, gate_bias, up, up_bias, down, down_bias, residual, out_features, threads,
//             activation, more)
void boxed_mlp_no_grad(StableIValue* stack, uint64_t, uint64_t) {
  Layer layer(stack);
  const Text text(stack[10]);
  const Packed up = open_checked(layer.up);
  const Packed down =
      open_checked(layer.down, to<int64_t>(stack[8]), up.view.rows, dtype_of(up.view.value));
  stack[0] = layer.run(up, down, to<int64_t>(stack[9]), text, to<bool>(stack[11]));
}

}  // namespace
}  // namespace fxsparse

STABLE_TORCH_LIBRARY_FRAGMENT(fxsparse, m) {
  m.def(
      "linear_fused(Tensor x, Tensor packed, Tensor? bias, Tensor? other, SymInt out_features, "
      "SymInt in_features, ScalarType dtype, int threads, str epilogue, bool more=False) -> "
      "Tensor");
  m.def(
      "linears(Tensor x, Tensor[] packed, Tensor?[] biases, SymInt[] out_features, SymInt "
      "in_features, ScalarType dtype, int threads, bool more=False) -> Tensor[]");
  m.def(
      "mlp(Tensor x, Tensor? gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, Tensor down, "
      "Tensor? down_bias, Tensor? residual, SymInt in_features, SymInt hidden, SymInt "
      "out_features, ScalarType dtype, int threads, str activation, bool more=False) -> Tensor");
  // For callers that know that no gradient is wanted, as linear.no_grad.
  m.def(
      "linear_fused.no_grad(Tensor x, Tensor packed, Tensor? bias, Tensor? other, SymInt "
      "out_features, int threads, str epilogue, bool more=False) -> Tensor");
  m.def(
      "linears.no_grad(Tensor x, Tensor[] packed, Tensor?[] biases, SymInt[] out_features, int "
      "threads, bool more=False) -> Tensor[]");
  m.def(
      "mlp.no_grad(Tensor x, Tensor? gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, Tensor "
      "down, Tensor? down_bias, Tensor? residual, SymInt out_features, int threads, str "
      "activation, bool more=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fxsparse, CPU, m) {
  m.impl("linear_fused", &fxsparse::boxed_linear_fused);
  m.impl("linears", &fxsparse::boxed_linears);
  m.impl("mlp", &fxsparse::boxed_mlp);
  m.impl("linear_fused.no_grad", &fxsparse::boxed_linear_fused_no_grad);
  m.impl("linears.no_grad", &fxsparse::boxed_linears_no_grad);
  m.impl("mlp.no_grad", &fxsparse::boxed_mlp_no_grad);
}
