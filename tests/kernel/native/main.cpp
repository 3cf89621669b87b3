// The core without torch or Python: every format, instruction set and value type, on random and
// adversarial weights, in memory of exactly its size.
//
//   native [--seconds S] [--case N] [--format NAME] [--isa NAME] [--threads S] [--sabotage NAME]
//
// Basic cases first, then random ones, until the time is over.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "op/cost.h"
#include "pool/pool.h"
#include "report.h"
#include "sabotage.h"
#include "tests.h"

// Instruction sets that the compiler emulates, whatever the CPU has.
#ifndef NATIVE_EMULATED
#define NATIVE_EMULATED ""
#endif

namespace native {
namespace {

struct Options {
  double seconds = 10;
  int64_t only_case = -1;
  std::string format, isa;  // all if empty
  double threads = 0;
};

// Lines of the kernel table that can be called here, of one format.
struct FormatLines {
  const fxsparse::Format* format;
  std::vector<const fxsparse::KernelLine*> lines;
};

std::vector<FormatLines> usable_lines(const Options& options) {
  std::vector<FormatLines> formats;
  for (int i = 0; i < fxsparse::kKernelLines; ++i) {
    const fxsparse::KernelLine& line = fxsparse::kernel_lines()[i];
    const bool emulated = std::strcmp(line.isa_name, NATIVE_EMULATED) == 0;
    if (line.kernels == nullptr || !(line.usable || emulated)) continue;
    if (!options.format.empty() && options.format != line.format_name) continue;
    if (!options.isa.empty() && options.isa != line.isa_name) continue;
    const fxsparse::Format* format = fxsparse::find_format(line.format);
    if (!expect(format != nullptr, "no format %s", line.format_name)) continue;
    if (formats.empty() || formats.back().format != format) formats.push_back({format, {}});
    formats.back().lines.push_back(&line);
  }
  return formats;
}

Kernels kernels_of(const FormatLines& lines, int type) {
  Kernels kernels;
  for (const fxsparse::KernelLine* line : lines.lines)
    kernels.push_back({line->isa, line->isa_name, &line->kernels[type]});
  return kernels;
}

// The weight in each format, and one that takes its results.
void test_fused_calls(const std::vector<FormatLines>& formats, const Weight& weight, int type,
                      Random& random) {
  const Case next{"", below(random, 1000), {1 + below(random, 40), weight.shape.rows}, 1};
  const Weight taking = make_weight(next, kTypes[type]);
  std::vector<Blob> first, last;
  for (const FormatLines& lines : formats) {
    first.push_back(pack(*lines.format, to_dense(weight, Order::kRows, false)));
    last.push_back(pack(*lines.format, to_dense(taking, Order::kRows, false)));
  }
  test_fused(first, last, kTypes[type], kernels_of(formats[0], type), random);
}

// Of one value type, in turn: other weights find more than other types of the same.
void test_case(const std::vector<FormatLines>& formats, int64_t number) {
  const Case c = make_case(number);
  const int t = static_cast<int>(number % fxsparse::kValueTypes);
  const Scope scope("%s, %s", c.name.c_str(), kTypes[t].name);
  const Weight weight = make_weight(c, kTypes[t]);
  for (const FormatLines& lines : formats) {
    const Scope format_scope("%s", lines.format->name);
    Random random(number);
    const Kernels kernels = kernels_of(lines, t);
    test_format(*lines.format, weight, random);
    const Blob blob = pack(*lines.format, to_dense(weight, Order::kRows, false), 0,
                           static_cast<int>(below(random, 8)));
    sabotage_blob(blob.memory);
    test_products(blob, weight, kernels, number);
    if (weight.finite()) test_cuts_of_kernels(blob, weight, kernels, random);
    test_damage(*lines.format, weight, kernels, random);
  }
  Random random(number);
  test_fused_calls(formats, weight, t, random);
}

// As if every multiply took long: all are worth several threads, and a format or instruction set
// needs no measurements to be tested.
void make_everything_dear() {
  std::vector<fxsparse::CostLine> lines;
  for (int i = 0; i < fxsparse::kKernelLines; ++i) {
    const fxsparse::KernelLine& line = fxsparse::kernel_lines()[i];
    fxsparse::CostLine cost{line.isa, line.format, 1, 1, {}};
    for (double& picoseconds : cost.picoseconds) picoseconds = 1e12;
    lines.push_back(cost);
  }
  fxsparse::set_costs(lines);
}

void test_all_vector_ops(const std::vector<FormatLines>& formats) {
  std::set<const fxsparse::VectorOps*> done;
  for (const FormatLines& lines : formats)
    for (const fxsparse::KernelLine* line : lines.lines)
      for (int t = 0; t < fxsparse::kValueTypes; ++t) {
        if (!done.insert(line->kernels[t].ops).second) continue;
        const Scope scope("%s, %s", line->isa_name, kTypes[t].name);
        test_vector_ops(*line->kernels[t].ops, kTypes[t]);
        test_activations(*line->kernels[t].ops, kTypes[t]);
      }
}

void test_until(const std::vector<FormatLines>& formats, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t number = 0;
  do test_case(formats, number++);
  while (std::chrono::steady_clock::now() < end);
  std::printf("%lld cases (%lld basic)\n", static_cast<long long>(number),
              static_cast<long long>(kBasicCases));
}

void run(const Options& options) {
  const std::vector<FormatLines> formats = usable_lines(options);
  for (const FormatLines& lines : formats) {
    std::printf("%s:", lines.format->name);
    for (const fxsparse::KernelLine* line : lines.lines) std::printf(" %s", line->isa_name);
    std::printf("\n");
  }
  if (!expect(!formats.empty(), "nothing to test")) return;
  make_everything_dear();
  fxsparse::set_num_threads(3);
  if (options.threads > 0) return test_threads(options.threads);
  if (options.only_case >= 0) return test_case(formats, options.only_case);
  test_all_vector_ops(formats);
  test_until(formats, options.seconds);
}

bool parse(int count, char** words, Options& options) {
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--seconds")
      options.seconds = std::atof(value.c_str());
    else if (name == "--case")
      options.only_case = std::atoll(value.c_str());
    else if (name == "--format")
      options.format = value;
    else if (name == "--isa")
      options.isa = value;
    else if (name == "--threads")
      options.threads = std::atof(value.c_str());
    else if (name != "--sabotage" || !choose_sabotage(value.c_str()))
      return false;
  }
  return count % 2 == 1;
}

}  // namespace
}  // namespace native

int main(int count, char** words) {
  native::Options options;
  if (!native::parse(count, words, options)) {
    std::fprintf(stderr, "see the top of main.cpp for the arguments\n");
    return 2;
  }
  native::report_crashes();
  native::run(options);
  std::printf("%d failures\n", native::failures());
  return native::failures() != 0;
}
