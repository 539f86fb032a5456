// Files: read once, so that what was checked is what is used; written beside their place and renamed.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "sha256.h"

namespace mhsa {

// Refuses what this machine has no memory for before anything is allocated.
inline void check_memory(const std::string& argument, uint64_t bytes) {
  const uint64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  if (bytes > pages * page || bytes > PTRDIFF_MAX)
    throw Error(argument, "at most the " + std::to_string(pages * page >> 20) + " MiB of memory that this machine has",
                std::to_string(bytes >> 20) + " MiB", "Choose smaller sizes.");
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int operator*() const { return number_; }

 private:
  int number_;
};

inline const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return S_ISREG(mode) ? "a file" : "a socket";
}

// A file that is read once, from its beginning to its end; what is none, such as a FIFO, would hang or never end, and is
// refused.
class InputFile {
 public:
  InputFile(const std::string& argument, const std::string& path)
      : what_(argument + " " + in_quotes(path)), file_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    struct stat found;
    if (*file_ < 0 || fstat(*file_, &found)) throw Error(what_, "a file", strerror(errno), kHint);
    if (!S_ISREG(found.st_mode)) throw Error(what_, "a file", kind_of(found.st_mode), kHint);
    size_ = found.st_size;
    check_memory(what_, size_);
  }

  // What is read from now on.
  void hash_into(Sha256* digest) { digest_ = digest; }

  uint64_t left() const { return size_ - done_; }

  // Into memory that is there; no more than is left.
  void read(char* memory, size_t size) {
    while (size) {
      const ssize_t count = ::read(*file_, memory, std::min(size, kBlock));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw Error(what_, "a file of " + std::to_string(size_) + " bytes",
                                  count ? strerror(errno) : std::to_string(done_) + " bytes", kHint);
      if (digest_) digest_->add(memory, count);  // while it is in the CPU's cache
      memory += count, size -= count, done_ += count;
    }
  }

  std::string text(size_t size) {
    std::string bytes(size, '\0');
    read(&bytes[0], size);
    return bytes;
  }

  std::string rest() { return text(left()); }

  void skip(uint64_t size) {
    std::string block(std::min<uint64_t>(size, kBlock), '\0');
    for (; size > block.size(); size -= block.size()) read(&block[0], block.size());
    read(&block[0], size);
  }

 private:
  static constexpr size_t kBlock = 1 << 18;
  static constexpr const char* kHint = "Name a file that is there and can be read.";

  std::string what_;
  Descriptor file_;
  Sha256* digest_ = nullptr;
  uint64_t size_ = 0, done_ = 0;
};

inline std::string read_file(const std::string& argument, const std::string& path) { return InputFile(argument, path).rest(); }

inline bool write_all(int file, const char* data, size_t size) {
  while (size) {
    const ssize_t count = write(file, data, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    data += count, size -= count;
  }
  return true;
}

// A file that is to be written. It is there, under its name, when `commit` was called, and not before.
class NewFile {
 public:
  NewFile(const std::string& argument, const std::string& path) : what_(argument + " " + in_quotes(path)), path_(path) {
    struct stat found;
    if (!stat(path.c_str(), &found) && !S_ISREG(found.st_mode))
      throw Error(what_, "a file, or a name that is free", kind_of(found.st_mode), kHint);
    char target[PATH_MAX];
    if (realpath(path.c_str(), target)) path_ = target;  // a link stays one
    draft_ = path_ + ".XXXXXX";
    file_ = mkostemp(&draft_[0], O_CLOEXEC);
    if (file_ < 0) refuse();
  }
  NewFile(const NewFile&) = delete;
  ~NewFile() {
    if (file_ < 0) return;
    close(file_);
    unlink(draft_.c_str());
  }

  void write(const void* data, size_t size) {
    if (!write_all(file_, static_cast<const char*>(data), size)) refuse();
  }

  void commit() {
    const mode_t hidden = umask(0);
    umask(hidden);
    if (fchmod(file_, 0666 & ~hidden) || fsync(file_) || rename(draft_.c_str(), path_.c_str())) refuse();
    close(std::exchange(file_, -1));
  }

 private:
  static constexpr const char* kHint = "Nothing was written: choose another place.";

  [[noreturn]] void refuse() const { throw Error(what_, "room for it, and permission", strerror(errno), kHint); }

  std::string what_, path_, draft_;
  int file_ = -1;
};

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

}  // namespace mhsa
