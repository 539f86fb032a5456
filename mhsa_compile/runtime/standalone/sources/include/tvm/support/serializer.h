// How TVM writes values into a stream: little-endian, counts as 64 bits.
#pragma once
#include <dlpack/dlpack.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace tvm::support {

template <typename T, typename = void>
struct Serializer {  // numbers, enums, DLDataType: as they lie in memory
  static_assert(std::is_trivially_copyable_v<T>);
  template <typename Stream>
  static void Write(Stream* stream, const T& value) {
    stream->Write(&value, sizeof(T));
  }
  template <typename Stream>
  static bool Read(Stream* stream, T* value) {
    return stream->Read(value, sizeof(T)) == sizeof(T);
  }
};

template <>
struct Serializer<std::string> {
  template <typename Stream>
  static void Write(Stream* stream, const std::string& text) {
    stream->template Write<uint64_t>(text.size());
    stream->Write(text.data(), text.size());
  }
  template <typename Stream>
  static bool Read(Stream* stream, std::string* text) {
    uint64_t size;
    if (!stream->Read(&size) || size > stream->Left()) return false;
    text->resize(size);
    return stream->Read(text->data(), size) == size;
  }
};

template <typename T>
struct Serializer<std::vector<T>> {
  template <typename Stream>
  static void Write(Stream* stream, const std::vector<T>& values) {
    stream->template Write<uint64_t>(values.size());
    for (const T& value : values) stream->Write(value);
  }
  template <typename Stream>
  static bool Read(Stream* stream, std::vector<T>* values) {
    uint64_t size;
    if (!stream->Read(&size) || size > stream->Left()) return false;
    values->resize(size);
    for (T& value : *values) {
      if (!stream->Read(&value)) return false;
    }
    return true;
  }
};

}  // namespace tvm::support
