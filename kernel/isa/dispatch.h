#pragma once

#include "export.h"
#include "isa/kernel.h"

namespace fxsparse {

struct CpuFeature {
  const char* name;
  bool present;  // in the CPU and enabled by the operating system
};

// What was looked for on this architecture; the last entry has a null name.
FXSPARSE_EXPORT const CpuFeature* cpu_features();

// A line of table.inc. `kernels` holds one a value type, or is null where it was not compiled.
struct KernelLine {
  const char* format_name;
  const char* isa_name;
  FormatId format;
  Isa isa;
  const Kernel* kernels;
  bool usable;  // compiled in and supported by this CPU
};

#define FXSPARSE_KERNEL(format, isa) +1
constexpr int kKernelLines =
#include "isa/table.inc"
    ;
#undef FXSPARSE_KERNEL
FXSPARSE_EXPORT const KernelLine* kernel_lines();

FXSPARSE_EXPORT const char* isa_name(Isa isa);
FXSPARSE_EXPORT bool isa_usable(Isa isa);
FXSPARSE_EXPORT Isa isa_from_name(const char* name);  // throws Error if unknown

// The instruction set in use: the best usable one, or what FXSPARSE_ISA says. Throws Error, each
// time, while FXSPARSE_ISA names one that is unknown or not usable here.
FXSPARSE_EXPORT Isa chosen_isa();

// The kernel of `isa`, or where the format has none for it the best usable one.
FXSPARSE_EXPORT const Kernel& find_kernel(FormatId format, Isa isa, ValueType value);

}  // namespace fxsparse
