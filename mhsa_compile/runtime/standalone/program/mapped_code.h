// Code that was checked, as a file which nobody can change while it is mapped. Each system has its own way:
//
//     Linux     a sealed copy in memory, by the path of its descriptor; without /proc a copy on the disk
//     others    a copy on the disk, in a folder of this process's alone, which is gone once it is mapped
//     Windows   the file itself, held open so that nobody else can write or replace it, and read once more
#pragma once

#include <string>
#include <vector>

#include "errors.h"
#include "files.h"
#include "sha256.h"
#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace mhsa {

#if defined(_WIN32)
// Maps the code in `path` by `open`. It stays open for the rest of the process.
template <typename Open>
auto mapped_code(const std::string& argument, const std::string& path, const std::string& hash, const std::string&, Open open) {
  const HANDLE held = CreateFileA(path.c_str(), GENERIC_READ, FILE_SHARE_READ, nullptr, OPEN_EXISTING, 0, nullptr);
  if (held == INVALID_HANDLE_VALUE)
    throw Error(argument, "a file that nobody writes", "error " + std::to_string(GetLastError()), "End who does.");
  if (Sha256::of(read_file(argument, path)) != hash) throw Error(argument, "what was just checked", "another", "Copy it again.");
  return open(full_path(path));
}
#else
// In a folder of this process's alone; both are gone with this object. Throws Error.
class CodeOnDisk {
 public:
  CodeOnDisk(const std::string& place, const std::string& name, const std::string& bytes) : folder_(place + "/mhsa-XXXXXX") {
    if (!mkdtemp(&folder_[0])) throw Error("folder " + in_quotes(place), "room for code", strerror(errno), kHint);
    path = folder_ + "/" + name;
    const Descriptor file(open(path.c_str(), kToCreate, 0600));
    if (*file >= 0 && write_all(*file, bytes.data(), bytes.size())) return;
    const std::string reason = strerror(errno);
    remove();
    throw Error("folder " + in_quotes(place), "room for code", reason, kHint);
  }
  CodeOnDisk(const CodeOnDisk&) = delete;
  ~CodeOnDisk() { remove(); }

  std::string path;
  static constexpr const char* kHint = "Mount /proc, or point TMPDIR to a folder that is not mounted noexec.";

 private:
  void remove() const {
    unlink(path.c_str());
    rmdir(folder_.c_str());
  }

  std::string folder_;
};

template <typename Open>
auto mapped_from_disk(const std::string& hash, const std::string& bytes, Open open) {
  const char* const temporary = getenv("TMPDIR");
  std::string reasons;
  for (const std::string& place : {std::string(temporary ? temporary : "/tmp"), std::string("/dev/shm")}) {
    try {
      return open(CodeOnDisk(place, hash + ".so", bytes).path);
    } catch (const std::exception& error) {
      reasons += (reasons.empty() ? "" : "; ") + place + ": " + error.what();
    }
  }
  throw Error("/proc", "mounted, or a folder for temporary files from which code may be mapped", reasons, CodeOnDisk::kHint);
}

#if defined(__linux__)
// Bytes as a file in memory that nobody can change any more.
inline Descriptor sealed(const std::string& argument, const std::string& bytes) {
  constexpr unsigned kCloseOnExec = 1, kAllowSealing = 2;              // of <linux/memfd.h>,
  constexpr int kAddSeals = 1024 + 9, kSeal = 1, kShrink = 2, kGrow = 4, kWrite = 8;  // and <linux/fcntl.h>
  Descriptor file(static_cast<int>(syscall(SYS_memfd_create, "module.so", kCloseOnExec | kAllowSealing)));
  if (*file < 0 || !write_all(*file, bytes.data(), bytes.size()) ||
      fcntl(*file, kAddSeals, kSeal | kShrink | kGrow | kWrite))
    throw Error(argument, "room for a copy in memory", strerror(errno), "It needs Linux 3.17 or later, with memfd_create.");
  return file;
}

// The dynamic linker knows libraries by the names they were opened with, and numbers of descriptors come again: so the
// name spells the hash, in slashes and dots that lead nowhere. The copy stays open: the first error that TVM raises opens
// the files of all libraries by name, and would read whatever has the number then.
template <typename Open>
auto mapped_code(const std::string& argument, const std::string&, const std::string& hash, const std::string& bytes, Open open) {
  std::string path = "/proc/self/fd";
  if (access(path.c_str(), X_OK)) return mapped_from_disk(hash, bytes, open);
  static auto& copies = *new std::vector<Descriptor>;
  copies.push_back(sealed(argument, bytes));
  for (char digit : hash.substr(0, 16))
    for (int bit = 8, value = digit > '9' ? digit - 'a' + 10 : digit - '0'; bit; bit >>= 1) path += value & bit ? "/." : "/";
  return open(path + "/" + std::to_string(*copies.back()));
}
#else
template <typename Open>
auto mapped_code(const std::string&, const std::string&, const std::string& hash, const std::string& bytes, Open open) {
  return mapped_from_disk(hash, bytes, open);
}
#endif
#endif

}  // namespace mhsa
