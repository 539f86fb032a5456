// Tensors by name, and the file format that holds them: safetensors, also for inputs and outputs.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mhsa {

namespace ffi = tvm::ffi;
using Shape = std::vector<int64_t>;
using Tensors = std::map<std::string, ffi::Tensor>;
using Json = ffi::Map<ffi::Any, ffi::Any>;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls a function of the runtime through its C interface: the runtime may be built with another C++ library, and an
// exception of that one would not be caught here. Errors come as tvm::ffi::Error.
template <typename... Arguments>
ffi::Any call(const ffi::Function& function, Arguments&&... arguments) {
  ffi::AnyView packed[sizeof...(Arguments) + 1];
  ffi::PackedArgs::Fill(packed, std::forward<Arguments>(arguments)...);
  ffi::Any result;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionCall(const_cast<ffi::Object*>(static_cast<const ffi::Object*>(function.get())),
                                             reinterpret_cast<TVMFFIAny*>(packed), sizeof...(Arguments),
                                             reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

inline ffi::Any call_all(const ffi::Function& function, const std::vector<ffi::Any>& arguments) {
  std::vector<ffi::AnyView> packed(arguments.begin(), arguments.end());
  ffi::Any result;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionCall(const_cast<ffi::Object*>(static_cast<const ffi::Object*>(function.get())),
                                             reinterpret_cast<TVMFFIAny*>(packed.data()),
                                             static_cast<int32_t>(packed.size()), reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

inline ffi::Function global(const char* name) { return ffi::Function::GetGlobalRequired(name); }

// Memory that begins with a cache line, as compiled code may ask for.
struct Allocator {
  void AllocData(DLTensor* tensor) {
    size_t bytes = ffi::GetDataSize(*tensor);
    void* data = nullptr;
    if (posix_memalign(&data, 64, bytes ? bytes : 64)) throw Error("out of memory: " + std::to_string(bytes) + " bytes");
    tensor->data = data;
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

inline ffi::Tensor new_tensor(const std::string& dtype, const Shape& shape) {
  return ffi::Tensor::FromNDAlloc(Allocator(), ffi::Shape(shape.begin(), shape.end()), ffi::StringToDLDataType(dtype),
                                  DLDevice{kDLCPU, 0});
}

inline Shape shape_of(const ffi::Tensor& tensor) { return Shape(tensor.shape().begin(), tensor.shape().end()); }

inline std::string dtype_of(const ffi::Tensor& tensor) { return ffi::DLDataTypeToString(tensor.dtype()); }

inline std::string text_of(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

inline ffi::Any at(const Json& object, const char* key) { return object.at(ffi::Any(ffi::String(key))); }

inline Json parse_json(const std::string& text) { return call(global("ffi.json.Parse"), ffi::String(text)).cast<Json>(); }

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

inline File opened(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode), std::fclose);
  if (!file) throw Error(path + ": cannot be opened");
  return file;
}

inline std::string read_text(const std::string& path) {
  File file = opened(path, "rb");
  std::string text;
  char part[4096];
  while (size_t count = std::fread(part, 1, sizeof part, file.get())) text.append(part, count);
  return text;
}

// (safetensors' word, ours)
inline const std::vector<std::pair<std::string, std::string>>& dtypes() {
  static const std::vector<std::pair<std::string, std::string>> known = {
      {"F64", "float64"}, {"F32", "float32"}, {"F16", "float16"}, {"BF16", "bfloat16"}, {"BOOL", "bool"},
      {"I64", "int64"},   {"I32", "int32"},   {"I16", "int16"},   {"I8", "int8"},       {"U8", "uint8"},
  };
  return known;
}

// A header's length in 8 bytes, the header in JSON, then the bytes of all tensors.
inline Tensors read_safetensors(const std::string& path) {
  const Error damaged(path + ": expected safetensors, got something else");
  File file = opened(path, "rb");
  std::fseek(file.get(), 0, SEEK_END);
  const uint64_t total = std::ftell(file.get());
  std::rewind(file.get());
  uint64_t size = 0;  // these are little-endian machines
  if (std::fread(&size, 1, 8, file.get()) != 8 || size > total - 8) throw damaged;
  std::string header(size, ' ');
  if (std::fread(&header[0], 1, size, file.get()) != size) throw damaged;
  Tensors tensors;
  for (const auto& [key, value] : parse_json(header)) {
    const std::string name = key.cast<ffi::String>();
    if (name == "__metadata__") continue;
    const Json entry = value.cast<Json>();
    const std::string word = at(entry, "dtype").cast<ffi::String>();
    std::string dtype;
    for (const auto& [theirs, ours] : dtypes()) dtype = theirs == word ? ours : dtype;
    if (dtype.empty()) throw Error(path + ": " + name + " has the dtype " + word + ", which is not known here");
    Shape shape;
    for (const ffi::Any& dim : at(entry, "shape").cast<ffi::Array<ffi::Any>>()) shape.push_back(dim.cast<int64_t>());
    const auto offsets = at(entry, "data_offsets").cast<ffi::Array<ffi::Any>>();
    const uint64_t begin = offsets[0].cast<int64_t>(), end = offsets[1].cast<int64_t>();
    ffi::Tensor tensor = new_tensor(dtype, shape);
    const size_t bytes = ffi::GetDataSize(*tensor.GetDLTensorPtr());
    if (end < begin || end - begin != bytes || end > total - 8 - size) throw damaged;
    std::fseek(file.get(), static_cast<long>(8 + size + begin), SEEK_SET);
    if (std::fread(tensor.data_ptr(), 1, bytes, file.get()) != bytes) throw damaged;
    tensors.emplace(name, tensor);
  }
  return tensors;
}

inline void write_safetensors(const std::string& path, const Tensors& tensors) {
  std::string header = "{";
  size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    std::string word;
    for (const auto& [theirs, ours] : dtypes()) word = ours == dtype_of(tensor) ? theirs : word;
    std::string shape = text_of(shape_of(tensor));
    shape.front() = '[', shape.back() = ']';
    const size_t begin = end;
    end += ffi::GetDataSize(*tensor.GetDLTensorPtr());
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + word + "\",\"shape\":" + shape +
              ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t size = header.size();
  File file = opened(path, "wb");
  bool whole = std::fwrite(&size, 1, 8, file.get()) == 8 && std::fwrite(header.data(), 1, size, file.get()) == size;
  for (const auto& [name, tensor] : tensors) {
    const size_t bytes = ffi::GetDataSize(*tensor.GetDLTensorPtr());
    whole = whole && std::fwrite(tensor.data_ptr(), 1, bytes, file.get()) == bytes;
  }
  if (!whole || std::fflush(file.get())) throw Error(path + ": could not be written whole");
}

}  // namespace mhsa
