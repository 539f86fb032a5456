// The permission to use matrix tiles (AMX), which Linux grants to a process that asks; without it the first tile
// instruction ends the process. As hardware/tile_permission.py has it.
#pragma once

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstring>
#include <string>

namespace mhsa {

constexpr const char* kTileFeature = "amx_tile";    // in the words of a manifest
constexpr const char* kWithoutTiles = "x86-64-v4";  // the target to compile for where they are refused

// Why this process may not use tiles; empty where it may. What is held already is not requested again.
inline std::string tile_refusal() {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kGetPermitted = 0x1022, kRequest = 0x1023, kTileData = 18;
  unsigned long long permitted = 0;
  if (syscall(SYS_arch_prctl, kGetPermitted, &permitted) == 0 && (permitted >> kTileData & 1)) return "";
  if (syscall(SYS_arch_prctl, kRequest, kTileData) == 0) return "";
  switch (errno) {
    case EINVAL:
      return "this kernel grants no tiles: Linux does from 5.16 on";
    case EOPNOTSUPP:
      return "this kernel saves no tiles on this CPU";
    case ENOSPC:
      return "a thread's alternate signal stack (sigaltstack) is too small for a frame with tiles: make it larger, or ask "
             "before that thread begins";
    case EPERM:
    case ENOSYS:
      return "a sandbox keeps this process from asking (arch_prctl): seccomp must allow it";
    default:
      return "this kernel refuses them: " + std::string(strerror(errno));
  }
#else
  return "only Linux on x86-64 grants tiles";
#endif
}

}  // namespace mhsa
