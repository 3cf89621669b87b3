#include "pool/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

namespace fxsparse {
namespace {

int affinity_cpus() {
  // The kernel refuses a mask smaller than its own; 1024 bits do nearly everywhere.
  for (int bits = 1024; bits <= 1 << 20; bits *= 2) {
    cpu_set_t* set = CPU_ALLOC(bits);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (known) return std::max(count, 1);
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

constexpr double kNoQuota = 1e9;

// "max 100000" or "150000 100000".
double quota_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota, period;
  if (file >> quota >> period && quota > 0 && period > 0) return quota / period;
  return kNoQuota;
}

double quota_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"),
      period_file(folder + "/cpu.cfs_period_us");
  double quota, period;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0)
    return quota / period;
  return kNoQuota;
}

// The least quota of a group and all above it up to the mount. Folders that are not there are no
// limit: inside a container the path of the group is often the host's.
double least_quota(const std::string& mount, std::string group,
                   double (*quota)(const std::string&)) {
  double least = kNoQuota;
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    least = std::min(least, quota(mount + group));
    if (group.empty()) return least;
    const size_t slash = group.rfind('/');
    group.resize(slash == std::string::npos ? 0 : slash);
  }
}

bool lists_cpu(const std::string& controllers) {
  std::istringstream list(controllers);
  std::string name;
  while (std::getline(list, name, ','))
    if (name == "cpu") return true;
  return false;
}

double cgroup_quota(const std::string& root) {
  const std::string base = root == "/" ? "" : root;
  const std::string mount = base + "/sys/fs/cgroup";
  double least = kNoQuota;
  std::ifstream file(base + "/proc/self/cgroup");
  std::string line;
  // "<hierarchy>:<controllers>:<path>"; version 2 has hierarchy 0 and no controllers.
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      for (const char* place : {"", "/unified"})
        least = std::min(least, least_quota(mount + place, group, quota_v2));
    } else if (lists_cpu(controllers)) {
      for (const std::string& place : {std::string("/cpu"), "/" + controllers})
        least = std::min(least, least_quota(mount + place, group, quota_v1));
    }
  }
  return least;
}

}  // namespace

int usable_cpus(const std::string& root) {
  const int cpus = affinity_cpus();
  const double quota = std::ceil(cgroup_quota(root));
  return quota < cpus ? std::max(1, static_cast<int>(quota)) : cpus;
}

}  // namespace fxsparse
