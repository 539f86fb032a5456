// The program's system is Windows 8 or later, with the C library that has been part of it since Windows 10. Paths are in
// the code page of the process, as its arguments are.
#pragma once

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#undef far
#undef near

#include <errno.h>
#include <fcntl.h>
#include <io.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace mhsa {

constexpr const char* kSeparators = "/\\";
constexpr int kToRead = O_RDONLY | O_BINARY | O_NOINHERIT;
constexpr int kToCreate = O_WRONLY | O_CREAT | O_EXCL | O_BINARY | O_NOINHERIT;

inline const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  return S_ISREG(mode) ? "a file" : "a device";
}

inline uint64_t physical_memory() {
  MEMORYSTATUSEX status = {};
  status.dwLength = sizeof status;
  return GlobalMemoryStatusEx(&status) ? status.ullTotalPhys : UINT64_MAX;
}

inline std::string full_path(const std::string& path) {
  char full[32768];
  const DWORD size = GetFullPathNameA(path.c_str(), sizeof full, full, nullptr);
  return size && size < sizeof full ? std::string(full, size) : path;
}

inline std::string resolved(const std::string& path) {
  return GetFileAttributesA(path.c_str()) == INVALID_FILE_ATTRIBUTES ? "" : full_path(path);
}

inline int new_draft(std::string* path) {
  const std::string beginning = *path + "." + std::to_string(GetCurrentProcessId()) + "-";
  int file = -1;
  for (int i = 0; i < 100 && file < 0 && (i == 0 || errno == EEXIST); ++i) {
    *path = beginning + std::to_string(i);
    file = open(path->c_str(), kToCreate, _S_IREAD | _S_IWRITE);
  }
  return file;
}

// There no file can be renamed that is open.
inline bool put_in_place(int file, const std::string& draft, const std::string& path) {
  const bool is_whole = !_commit(file);
  close(file);
  if (is_whole && MoveFileExA(draft.c_str(), path.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return true;
  unlink(draft.c_str());
  errno = EACCES;
  return false;
}

inline std::vector<int> affinity() {
  std::vector<int> cpus;
  DWORD_PTR own = 0, all = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &own, &all))
    for (int cpu = 0; own; ++cpu, own >>= 1)
      if (own & 1) cpus.push_back(cpu);
  return cpus;
}

inline void set_default(const char* name, const char* value) {
  if (!getenv(name)) _putenv_s(name, value);
}

inline void let_writes_fail() {}

}  // namespace mhsa
