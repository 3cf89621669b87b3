#include "isa/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "error.h"

namespace fxsparse {

// Kernels that this architecture does not compile are null pointers in the table.
#define FXSPARSE_KERNEL(format, isa) extern const Kernel format##_##isa[kValueTypes];
#include "isa/table.inc"
#undef FXSPARSE_KERNEL

#if defined(__x86_64__)
#define FXSPARSE_COMPILED_avx2(kernels) kernels
#define FXSPARSE_COMPILED_avx512(kernels) kernels
#else
#define FXSPARSE_COMPILED_avx2(kernels) nullptr
#define FXSPARSE_COMPILED_avx512(kernels) nullptr
#endif
#if defined(__aarch64__)
#define FXSPARSE_COMPILED_neon(kernels) kernels
#else
#define FXSPARSE_COMPILED_neon(kernels) nullptr
#endif
#define FXSPARSE_COMPILED_generic(kernels) kernels

namespace {

constexpr FormatId kFormat_csr = FormatId::kCsr;
[[maybe_unused]] constexpr FormatId kFormat_bitmap = FormatId::kBitmap;
[[maybe_unused]] constexpr FormatId kFormat_tiles = FormatId::kTiles;
[[maybe_unused]] constexpr FormatId kFormat_pairs = FormatId::kPairs;
constexpr Isa kIsa_generic = Isa::kGeneric;
constexpr Isa kIsa_avx2 = Isa::kAvx2;
constexpr Isa kIsa_avx512 = Isa::kAvx512;
constexpr Isa kIsa_neon = Isa::kNeon;

// Best first.
constexpr struct {
  Isa isa;
  const char* name;
} kIsas[] = {
    {Isa::kAvx512, "avx512"},
    {Isa::kAvx2, "avx2"},
    {Isa::kNeon, "neon"},
    {Isa::kGeneric, "generic"},
};

struct Features {
  CpuFeature list[9] = {};
  bool usable[4] = {};  // by Isa

  Features() {
    usable[static_cast<int>(Isa::kGeneric)] = true;
#if defined(__x86_64__)
    // The compiler's builtin also asks XGETBV whether the system saves the wider registers.
    __builtin_cpu_init();
    int n = 0;
    const auto add = [&](const char* name, bool present) {
      list[n++] = {name, present};
      return present;
    };
    const bool avx2 = add("avx2", __builtin_cpu_supports("avx2"));
    const bool fma = add("fma", __builtin_cpu_supports("fma"));
    const bool f16c = add("f16c", __builtin_cpu_supports("f16c"));
    const bool bmi = add("bmi", __builtin_cpu_supports("bmi"));
    const bool f = add("avx512f", __builtin_cpu_supports("avx512f"));
    const bool bw = add("avx512bw", __builtin_cpu_supports("avx512bw"));
    const bool dq = add("avx512dq", __builtin_cpu_supports("avx512dq"));
    const bool vl = add("avx512vl", __builtin_cpu_supports("avx512vl"));
    usable[static_cast<int>(Isa::kAvx2)] = avx2 && fma && f16c && bmi;
    usable[static_cast<int>(Isa::kAvx512)] = avx2 && fma && f16c && bmi && f && bw && dq && vl;
#elif defined(__aarch64__)
    list[0] = {"neon", true};  // part of the architecture
    usable[static_cast<int>(Isa::kNeon)] = true;
#endif
  }
};

// Found on loading: a fork during a first call would copy a half-made local static, and its lock.
const Features found_features;
const Features& features() { return found_features; }

std::string usable_names() {
  std::string names;
  for (const auto& entry : kIsas)
    if (isa_usable(entry.isa)) names += (names.empty() ? "" : ", ") + std::string(entry.name);
  return names;
}

Isa choose() {
  const char* asked = std::getenv("FXSPARSE_ISA");
  for (const auto& entry : kIsas) {
    const bool named = asked == nullptr || std::strcmp(asked, entry.name) == 0;
    if (named && isa_usable(entry.isa)) return entry.isa;
  }
  fail("FXSPARSE_ISA: expected one of %s (usable on this CPU), got %s", usable_names().c_str(),
       *asked ? asked : "an empty string");
}

}  // namespace

const CpuFeature* cpu_features() { return features().list; }

bool isa_usable(Isa isa) { return features().usable[static_cast<int>(isa)]; }

const char* isa_name(Isa isa) {
  for (const auto& entry : kIsas)
    if (entry.isa == isa) return entry.name;
  return "unknown";
}

Isa isa_from_name(const char* name) {
  for (const auto& entry : kIsas)
    if (std::strcmp(entry.name, name) == 0) return entry.isa;
  fail("isa: expected one of %s, got %s", usable_names().c_str(), name);
}

const KernelLine* kernel_lines() {
#define FXSPARSE_KERNEL(format, isa)        \
  {#format,                                 \
   #isa,                                    \
   kFormat_##format,                        \
   kIsa_##isa,                              \
   FXSPARSE_COMPILED_##isa(format##_##isa), \
   FXSPARSE_COMPILED_##isa(format##_##isa) != nullptr && isa_usable(kIsa_##isa)},
  static const KernelLine lines[] = {
#include "isa/table.inc"
  };
#undef FXSPARSE_KERNEL
  return lines;
}

Isa chosen_isa() {
  static std::atomic<int> chosen{-1};
  int isa = chosen.load(std::memory_order_relaxed);
  if (isa < 0) {
    isa = static_cast<int>(choose());
    chosen.store(isa, std::memory_order_relaxed);
  }
  return static_cast<Isa>(isa);
}

const Kernel& find_kernel(FormatId format, Isa isa, ValueType value) {
  const KernelLine* lines = kernel_lines();
  const KernelLine* best = nullptr;
  for (int i = 0; i < kKernelLines; ++i) {
    if (lines[i].format != format || !lines[i].usable) continue;
    if (best == nullptr) best = &lines[i];
    if (lines[i].isa == isa) best = &lines[i];
  }
  if (best == nullptr)
    fail("kernel: expected one for format %d, got none", static_cast<int>(format));
  return best->kernels[static_cast<int>(value) - 1];
}

}  // namespace fxsparse
