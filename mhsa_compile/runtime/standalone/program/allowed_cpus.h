// How many CPUs this process can keep busy: those of its affinity, capped by the CPU quotas of its control groups. The rule
// is that of Python's runtime (hardware/host.py): a quota of 2.5 CPUs counts as 2, and there is always one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "system.h"

namespace mhsa {

class CpuQuotas {
 public:
  // `root` is the root of the file system.
  explicit CpuQuotas(std::string root) : root_(std::move(root)) {}

  // The least of those of every control group above this process, of version 2 ("0::/a/b") and 1 ("4:cpu,cpuacct:/a/b"),
  // in whole CPUs; `most` where none is less. Where there is no /proc they are those that are mounted, as containers see
  // their own.
  int64_t least(int64_t most) const {
    std::ifstream groups(root_ + "/proc/self/cgroup");
    std::vector<std::string> lines;
    for (std::string line; std::getline(groups, line);) lines.push_back(line);
    if (lines.empty()) lines = {"0::/", "1:cpu,cpuacct:/"};
    for (const std::string& line : lines) {
      const size_t first = line.find(':'), second = line.find(':', first + 1);
      if (first == std::string::npos || second == std::string::npos) continue;
      const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
      if (controllers.empty()) {
        for (const char* mount : {"", "/unified"}) most = std::min(most, in_group(mount, group, most));
      } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
        for (const std::string& mount : {"/" + controllers, std::string("/cpu")}) most = std::min(most, in_group(mount, group, most));
      }
    }
    return most;
  }

 private:
  // Of a group and those that it lies in. Inside a container the path may be the host's: what is not there grants nothing,
  // and the mount itself counts.
  int64_t in_group(const std::string& mount, std::string group, int64_t most) const {
    while (true) {
      most = std::min(most, of(root_ + "/sys/fs/cgroup" + mount + group, most));
      if (group.empty()) return most;
      group.resize(group.find_last_not_of('/') + 1);  // "/a/b", "/a", "", which is the mount itself
      const size_t slash = group.rfind('/');
      group.resize(slash == std::string::npos ? 0 : slash);
    }
  }

  static int64_t of(const std::string& folder, int64_t most) {
    std::string quota, period;
    std::ifstream both(folder + "/cpu.max");
    if (!(both >> quota >> period)) {
      std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    const int64_t granted = number(quota), of_time = number(period);  // unlimited is "max" in version 2, "-1" in version 1
    return granted >= 0 && of_time > 0 ? granted / of_time : most;
  }

  // -1 for what is no number.
  static int64_t number(const std::string& text) {
    const bool digits = !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
    return digits ? std::stoll(text) : -1;
  }

  std::string root_;
};

// At least 1.
inline int allowed_cpus(const std::string& root = "") {
  const int64_t own = std::max<int64_t>(1, affinity().size());
  return static_cast<int>(std::max<int64_t>(1, CpuQuotas(root).least(own)));
}

}  // namespace mhsa
