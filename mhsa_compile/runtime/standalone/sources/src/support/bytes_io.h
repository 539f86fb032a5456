// Streams over bytes in memory.
#pragma once
#include <tvm/ffi/string.h>
#include <tvm/support/io.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace tvm::support {

class BytesInStream : public Stream {
 public:
  explicit BytesInStream(const std::string& bytes) : next_(bytes.data()), left_(bytes.size()) {}
  explicit BytesInStream(const ffi::Bytes& bytes) : next_(bytes.data()), left_(bytes.size()) {}
  size_t Read(void* data, size_t size) final {
    size = std::min(size, left_);
    std::memcpy(data, next_, size);
    next_ += size;
    left_ -= size;
    return size;
  }
  size_t Write(const void*, size_t) final { return 0; }
  size_t Left() const final { return left_; }

 private:
  const char* next_;
  size_t left_;
};

class BytesOutStream : public Stream {
 public:
  explicit BytesOutStream(std::string* bytes) : bytes_(bytes) {}
  size_t Read(void*, size_t) final { return 0; }
  size_t Write(const void* data, size_t size) final {
    bytes_->append(static_cast<const char*>(data), size);
    return size;
  }
  size_t Left() const final { return 0; }

 private:
  std::string* bytes_;
};

}  // namespace tvm::support
