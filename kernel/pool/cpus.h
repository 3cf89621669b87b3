#pragma once

#include <string>

#include "export.h"

namespace fxsparse {

// How many CPUs this process may use: its affinity mask, and no more than the CPU quota of its
// control group (v1 or v2, and of every group above), rounded up. `root` stands in for "/" where
// the cgroup files are looked up, for tests.
FXSPARSE_EXPORT int usable_cpus(const std::string& root = "/");

}  // namespace fxsparse
