// Streams of bytes, as TVM's runtime reads its executables from them.
#pragma once
#include <tvm/support/serializer.h>

#include <cstddef>

namespace tvm::support {

class Stream {
 public:
  virtual ~Stream() = default;
  virtual size_t Read(void* data, size_t size) = 0;
  virtual size_t Write(const void* data, size_t size) = 0;
  virtual size_t Left() const = 0;  // bytes that could still be read

  template <typename T>
  void Write(const T& value) {
    Serializer<T>::Write(this, value);
  }
  template <typename T>
  bool Read(T* value) {
    return Serializer<T>::Read(this, value);
  }
  template <typename T>
  void WriteArray(const T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) Write(values[i]);
  }
  template <typename T>
  bool ReadArray(T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!Read(&values[i])) return false;
    }
    return true;
  }
};

}  // namespace tvm::support
