// The Python module _C: everything off the hot path. Tensors come as addresses, so that nothing
// here depends on torch; the callers in fxsparse/ keep them alive.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "error.h"
#include "format/format.h"
#include "isa/dispatch.h"
#include "op/cost.h"
#include "op/epilogue.h"
#include "op/linear.h"
#include "pool/cpus.h"
#include "pool/pool.h"

namespace py = pybind11;

namespace fxsparse {
namespace {

const void* pointer(uintptr_t address) { return reinterpret_cast<const void*>(address); }
void* mutable_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

DenseView dense_view(uintptr_t data, int64_t rows, int64_t cols, int64_t row_stride,
                     int64_t col_stride, const std::string& value) {
  if (rows < 0 || cols < 0 || row_stride < 0 || col_stride < 0)
    fail(
        "dense weight: expected sizes and strides of zero or more, got %lld x %lld with %lld, %lld",
        static_cast<long long>(rows), static_cast<long long>(cols),
        static_cast<long long>(row_stride), static_cast<long long>(col_stride));
  return {pointer(data), rows, cols, row_stride, col_stride, value_from_name(value.c_str())};
}

py::dict features() {
  py::dict found;
  for (const CpuFeature* feature = cpu_features(); feature->name != nullptr; ++feature)
    found[feature->name] = feature->present;
  return found;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; i < kKernelLines; ++i) {
    const KernelLine& line = kernel_lines()[i];
    bool listed = false;
    for (const std::string& name : names) listed |= name == line.isa_name;
    if (isa_usable(line.isa) && !listed) names.push_back(line.isa_name);
  }
  return names;
}

// Of the kernels, in the order of the table.
std::vector<std::string> formats() {
  std::vector<std::string> names;
  for (int i = 0; i < kKernelLines; ++i) {
    const std::string name = kernel_lines()[i].format_name;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

py::list kernels() {
  py::list list;
  for (int i = 0; i < kKernelLines; ++i) {
    const KernelLine& line = kernel_lines()[i];
    for (int v = 1; v <= kValueTypes; ++v) {
      py::dict entry;
      entry["format"] = line.format_name;
      entry["isa"] = line.isa_name;
      entry["value"] = value_name(static_cast<ValueType>(v));
      entry["usable"] = line.usable;
      list.append(entry);
    }
  }
  return list;
}

// A header crosses into Python as its 64 bytes, which only these functions read.
Header to_header(const py::bytes& bytes) {
  const std::string_view view = bytes;
  Header header;
  if (view.size() != sizeof header)
    fail("header: expected %zu bytes, got %zu", sizeof header, view.size());
  std::memcpy(&header, view.data(), sizeof header);
  if (find_format(header.format) == nullptr || !known_value(header.value))
    fail("header: expected one that describe() returned, got another");
  return header;
}

py::bytes describe_weight(uintptr_t data, int64_t rows, int64_t cols, int64_t row_stride,
                          int64_t col_stride, const std::string& value, const std::string& format,
                          uint32_t flags) {
  const DenseView dense = dense_view(data, rows, cols, row_stride, col_stride, value);
  Header header;
  {
    const py::gil_scoped_release no_gil;
    header = describe(dense, format_from_name(format.c_str()), flags);
  }
  return py::bytes(reinterpret_cast<const char*>(&header), sizeof header);
}

void pack_weight(uintptr_t data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                 const std::string& value, const py::bytes& header, uintptr_t out,
                 int64_t out_bytes) {
  const DenseView dense = dense_view(data, rows, cols, row_stride, col_stride, value);
  const Header described = to_header(header);
  const py::gil_scoped_release no_gil;
  pack(dense, described, mutable_pointer(out), out_bytes);
}

FormatId format_id(const std::string& name) {
  return name == "dense" ? FormatId{0} : format_from_name(name.c_str()).id;
}

// (isa, format or "dense", elements, batch, picoseconds by density)
using CostTuple =
    std::tuple<std::string, std::string, int64_t, int64_t, std::array<double, kCostDensities>>;

std::vector<CostTuple> cost_list() {
  std::vector<CostTuple> list;
  for (const CostLine& line : costs()) {
    std::array<double, kCostDensities> ps;
    std::copy(std::begin(line.picoseconds), std::end(line.picoseconds), ps.begin());
    const Format* format = find_format(line.format);
    list.emplace_back(isa_name(line.isa), format ? format->name : "dense", line.elements,
                      line.batch, ps);
  }
  return list;
}

void set_cost_list(const std::vector<CostTuple>& list) {
  std::vector<CostLine> lines;
  for (const auto& [isa, format, elements, batch, ps] : list) {
    CostLine line{isa_from_name(isa.c_str()), format_id(format), elements, batch, {}};
    std::copy(ps.begin(), ps.end(), line.picoseconds);
    lines.push_back(line);
  }
  set_costs(lines);
}

py::dict header(uintptr_t blob, int64_t bytes) {
  const Packed packed = open_packed(pointer(blob), bytes);
  py::dict fields;
  fields["version"] = packed.header.version;
  fields["format"] = packed.format->name;
  fields["value"] = value_name(packed.header.value);
  fields["rows"] = packed.header.rows;
  fields["cols"] = packed.header.cols;
  fields["nnz"] = packed.header.nonzeros;
  fields["transposed"] = (packed.header.flags & kFlagTransposed) != 0;
  fields["is_buffer"] = (packed.header.flags & kFlagBuffer) != 0;
  fields["trailing"] = (packed.header.flags & kFlagsTrailing) >> kTrailingShift;
  fields["requires_grad"] = (packed.header.flags & kFlagRequiresGrad) != 0;
  return fields;
}

LinearCall make_call(const std::string& isa, const Packed& packed, uintptr_t x, int64_t x_stride,
                     int64_t batch, uintptr_t y, int64_t y_stride, int threads) {
  if (batch < 0 || threads < 0)
    fail("run_kernel: expected batch and threads of zero or more, got %lld and %d",
         static_cast<long long>(batch), threads);
  LinearCall call{};
  call.packed = &packed;
  call.x = pointer(x);
  call.x_stride = x_stride;
  call.batch = batch;
  call.y = mutable_pointer(y);
  call.y_stride = y_stride;
  call.isa = isa_from_name(isa.c_str());
  call.threads = threads;
  return call;
}

const Kernel& forced_kernel(const std::string& name, const Packed& packed) {
  const Isa isa = isa_from_name(name.c_str());
  if (!isa_usable(isa)) fail("isa: expected one that this CPU has, got %s", name.c_str());
  return find_kernel(packed.header.format, isa, packed.view.value);
}

void run_kernel(const std::string& isa, uintptr_t blob, int64_t bytes, uintptr_t x,
                int64_t x_stride, int64_t batch, uintptr_t bias, uintptr_t y, int64_t y_stride,
                int threads) {
  const Packed packed = open_packed(pointer(blob), bytes);
  LinearCall call = make_call(isa, packed, x, x_stride, batch, y, y_stride, threads);
  call.bias = pointer(bias);
  linear(forced_kernel(isa, packed), call);
}

void run_kernel_transposed(const std::string& isa, uintptr_t blob, int64_t bytes, uintptr_t grad,
                           int64_t grad_stride, int64_t batch, uintptr_t out, int64_t out_stride,
                           int threads) {
  const Packed packed = open_packed(pointer(blob), bytes);
  linear_transposed(forced_kernel(isa, packed),
                    make_call(isa, packed, grad, grad_stride, batch, out, out_stride, threads));
}

}  // namespace
}  // namespace fxsparse

PYBIND11_MODULE(_C, m) {
  using namespace fxsparse;
  using py::arg;
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.doc() = "The compiled core of fxsparse; see kernel/op/module.cpp.";

  m.def("cpu_features", &features);
  m.def("isas", &isas, "Instruction sets usable here, best first.");
  m.def("isa", [] { return isa_name(chosen_isa()); });
  m.def("kernels", &kernels);
  m.def("set_num_threads", &set_num_threads, arg("n"));
  m.def("get_num_threads", &get_num_threads);
  m.def(
      "run_nothing",
      [](int threads, bool more, int times) {
        for (int i = 0; i < times; ++i) parallel_for(threads, threads, more, [](int) {});
      },
      arg("threads"), arg("more"), arg("times"), "Empty jobs for the pool.", no_gil);
  m.def("usable_cpus", &usable_cpus, arg("root") = "/");

  m.def("formats", &formats);
  m.def("activations", &activation_names, "What an epilogue may do, in the order of its table.");
  m.attr("cost_densities") = std::vector<double>(std::begin(kCostDensity), std::end(kCostDensity));
  m.def("costs", &cost_list);
  m.def("set_costs", &set_cost_list, arg("lines"));
  m.def(
      "expected_ns",
      [](const std::string& isa, const std::string& format, int64_t rows, int64_t cols, int64_t nnz,
         int64_t batch) {
        return expected_ns(isa_from_name(isa.c_str()), format_id(format), rows, cols, nnz, batch);
      },
      arg("isa"), arg("format"), arg("rows"), arg("cols"), arg("nnz"), arg("batch"));

  m.def(
      "count_nonzeros",
      [](uintptr_t data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
         const std::string& value) {
        return count_nonzeros(dense_view(data, rows, cols, row_stride, col_stride, value));
      },
      arg("ptr"), arg("rows"), arg("cols"), arg("row_stride"), arg("col_stride"), arg("value"),
      no_gil);
  m.def(
      "expected_bytes",
      [](const std::string& format, int64_t rows, int64_t cols, int64_t nnz,
         const std::string& value) {
        return expected_bytes(format_from_name(format.c_str()), rows, cols, nnz,
                              value_from_name(value.c_str()));
      },
      arg("format"), arg("rows"), arg("cols"), arg("nnz"), arg("value"));
  m.def("describe", &describe_weight, arg("ptr"), arg("rows"), arg("cols"), arg("row_stride"),
        arg("col_stride"), arg("value"), arg("format"), arg("flags"));
  m.def(
      "packed_bytes", [](const py::bytes& header) { return packed_bytes(to_header(header)); },
      arg("header"));
  m.def("pack", &pack_weight, arg("ptr"), arg("rows"), arg("cols"), arg("row_stride"),
        arg("col_stride"), arg("value"), arg("header"), arg("out_ptr"), arg("out_bytes"));
  m.def(
      "unpack",
      [](uintptr_t blob, int64_t bytes, uintptr_t out, int64_t row_stride, int64_t col_stride) {
        unpack(open_packed(pointer(blob), bytes), mutable_pointer(out), row_stride, col_stride);
      },
      arg("blob_ptr"), arg("blob_bytes"), arg("out_ptr"), arg("row_stride"), arg("col_stride"),
      no_gil);
  m.def(
      "validate",
      [](uintptr_t blob, int64_t bytes) {
        const Packed packed = open_packed(pointer(blob), bytes);
        packed.format->validate(packed.view);
      },
      arg("blob_ptr"), arg("blob_bytes"), no_gil);
  m.def("header", &header, arg("blob_ptr"), arg("blob_bytes"));

  m.def("run_kernel", &run_kernel, arg("isa"), arg("blob_ptr"), arg("blob_bytes"), arg("x_ptr"),
        arg("x_row_stride"), arg("batch"), arg("bias_ptr"), arg("y_ptr"), arg("y_row_stride"),
        arg("threads"), no_gil);
  m.def("run_kernel_transposed", &run_kernel_transposed, arg("isa"), arg("blob_ptr"),
        arg("blob_bytes"), arg("grad_ptr"), arg("grad_row_stride"), arg("batch"), arg("out_ptr"),
        arg("out_row_stride"), arg("threads"), no_gil);
}
