// The program's system is Linux, macOS, or another with POSIX's files.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace mhsa {

constexpr const char* kSeparators = "/";
constexpr int kToRead = O_RDONLY | O_NONBLOCK | O_CLOEXEC, kToCreate = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;

inline const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return S_ISREG(mode) ? "a file" : "a socket";
}

inline uint64_t physical_memory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
}

inline std::string resolved(const std::string& path) {
  char target[PATH_MAX];
  return realpath(path.c_str(), target) ? target : "";
}

inline int new_draft(std::string* path) {
  *path += ".XXXXXX";
  const int file = mkstemp(&(*path)[0]);
  if (file >= 0) fcntl(file, F_SETFD, FD_CLOEXEC);
  return file;
}

inline bool put_in_place(int file, const std::string& draft, const std::string& path) {
  const mode_t hidden = umask(0);
  umask(hidden);
  const bool is_whole = !fchmod(file, 0666 & ~hidden) && !fsync(file);
  int reason = errno;
  close(file);
  if (is_whole) {
    if (!rename(draft.c_str(), path.c_str())) return true;
    reason = errno;
  }
  unlink(draft.c_str());
  errno = reason;
  return false;
}

inline std::vector<int> affinity() {
  std::vector<int> cpus;
#if defined(__linux__)
  for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {  // the kernel's own set may be larger than the C library's
    cpu_set_t* allowed = CPU_ALLOC(most);
    if (!allowed) break;
    const bool fits = !sched_getaffinity(0, CPU_ALLOC_SIZE(most), allowed);
    const bool is_short = !fits && errno == EINVAL;
    for (int cpu = 0; fits && cpu < most; ++cpu)
      if (CPU_ISSET_S(cpu, CPU_ALLOC_SIZE(most), allowed)) cpus.push_back(cpu);
    CPU_FREE(allowed);
    if (!is_short) break;
  }
#else
  for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); ++cpu) cpus.push_back(cpu);
#endif
  return cpus;
}

inline void set_default(const char* name, const char* value) { setenv(name, value, 0); }

inline void let_writes_fail() { std::signal(SIGXFSZ, SIG_IGN); }

}  // namespace mhsa
