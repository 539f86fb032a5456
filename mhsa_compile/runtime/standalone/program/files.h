// Files: read once, so that what was checked is what is used; written beside their place and renamed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "sha256.h"
#include "system.h"

namespace mhsa {

// Refuses what this machine has no memory for before anything is allocated.
inline void check_memory(const std::string& argument, uint64_t bytes) {
  const uint64_t memory = physical_memory();
  if (bytes > memory || bytes > PTRDIFF_MAX)
    throw Error(argument, "at most the " + std::to_string(memory >> 20) + " MiB of memory that this machine has",
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

// A file that is read once, from its beginning to its end; what is none, such as a FIFO, would hang or never end, and is
// refused.
class InputFile {
 public:
  InputFile(const std::string& argument, const std::string& path)
      : what_(argument + " " + in_quotes(path)), file_(open(path.c_str(), kToRead)) {
    struct stat status;
    if (*file_ < 0 || fstat(*file_, &status)) throw Error(what_, "a file", strerror(errno), kHint);
    if (!S_ISREG(status.st_mode)) throw Error(what_, "a file", kind_of(status.st_mode), kHint);
    size_ = status.st_size;
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
    struct stat status;
    if (!stat(path.c_str(), &status) && !S_ISREG(status.st_mode))
      throw Error(what_, "a file, or a name that is free", kind_of(status.st_mode), kHint);
    if (const std::string target = resolved(path); !target.empty()) path_ = target;  // a link stays one
    draft_ = path_;
    file_ = new_draft(&draft_);
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
    if (!put_in_place(std::exchange(file_, -1), draft_, path_)) refuse();
  }

 private:
  static constexpr const char* kHint = "Nothing was written: choose another place.";

  [[noreturn]] void refuse() const { throw Error(what_, "room for it, and permission", strerror(errno), kHint); }

  std::string what_, path_, draft_;
  int file_ = -1;
};

}  // namespace mhsa
