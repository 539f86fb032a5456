// Tensors by name, and the file format that holds them: safetensors, also for inputs and outputs.
#pragma once

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "calls.h"
#include "errors.h"
#include "files.h"
#include "json.h"

namespace mhsa {

using Shape = std::vector<int64_t>;
using Tensors = std::map<std::string, ffi::Tensor>;

constexpr size_t kAlignment = 64;  // a cache line
constexpr size_t kMostAxes = 32;   // as NumPy's arrays may have

struct Dtype {
  const char *name, *in_safetensors;
  int64_t bytes;
};

inline const std::vector<Dtype>& dtypes() {
  static const std::vector<Dtype> known = {
      {"float64", "F64", 8}, {"float32", "F32", 4}, {"float16", "F16", 2}, {"bfloat16", "BF16", 2}, {"bool", "BOOL", 1},
      {"int64", "I64", 8},   {"int32", "I32", 4},   {"int16", "I16", 2},   {"int8", "I8", 1},       {"uint64", "U64", 8},
      {"uint32", "U32", 4},  {"uint16", "U16", 2},  {"uint8", "U8", 1},
  };
  return known;
}

inline const Dtype* find_dtype(const std::string& name) {
  for (const Dtype& dtype : dtypes())
    if (name == dtype.name) return &dtype;
  return nullptr;
}

inline Shape shape_of(const ffi::Tensor& tensor) { return Shape(tensor.shape().begin(), tensor.shape().end()); }

inline std::string dtype_of(const ffi::Tensor& tensor) { return ffi::DLDataTypeToString(tensor.dtype()); }

inline std::string text_of(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

inline std::string text_of(const ffi::Tensor& tensor) {
  return dtype_of(tensor) + " of shape " + text_of(shape_of(tensor));
}

// Of a dense tensor. Refuses sizes below 0, and products beyond what can be counted, also beside a size of 0.
inline int64_t bytes_of(const std::string& argument, const std::string& dtype, const Shape& shape) {
  const Dtype* known = find_dtype(dtype);
  if (!known) throw Error(argument, "a dtype such as float32", in_quotes(dtype), "Convert it.");
  int64_t bytes = known->bytes;
  bool sound = true, empty = false;
  for (int64_t size : shape) {
    sound = sound && size >= 0 && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    empty = empty || size == 0;
  }
  if (!sound)
    throw Error(argument, "sizes from 0 on whose product is less than 2^63 bytes", text_of(shape), "Correct its shape.");
  return empty ? 0 : bytes;
}

inline int64_t bytes_of(const ffi::Tensor& tensor) { return ffi::GetDataSize(*tensor.GetDLTensorPtr()); }

inline char* data_of(const ffi::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(); }

struct Allocator {
  void AllocData(DLTensor* tensor) {
    if (posix_memalign(&tensor->data, kAlignment, std::max(ffi::GetDataSize(*tensor), kAlignment)))
      throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

// Its contents are not set. Throws Error, where `argument` is what the tensor is called, and std::bad_alloc.
inline ffi::Tensor new_tensor(const std::string& dtype, const Shape& shape, const std::string& argument = "tensor") {
  check_memory(argument, bytes_of(argument, dtype, shape));
  return ffi::Tensor::FromNDAlloc(Allocator(), ffi::Shape(shape.begin(), shape.end()), ffi::StringToDLDataType(dtype),
                                  DLDevice{kDLCPU, 0});
}

// The tensors of a file of safetensors: a header's length in 8 bytes, the header in JSON, then the bytes of all tensors,
// one behind the other without gaps. Each is read into memory of its own. What does not fit into the file is refused
// before memory is asked for.
class Safetensors {
 public:
  explicit Safetensors(std::string argument) : argument_(std::move(argument)) {}

  Tensors read(InputFile& file) const {
    uint64_t size = 0;  // these are little-endian machines
    if (file.left() < sizeof size) refuse("a length of 8 bytes in front", std::to_string(file.left()) + " bytes");
    file.read(reinterpret_cast<char*>(&size), sizeof size);
    if (size > file.left()) refuse("a header of " + std::to_string(size) + " bytes", std::to_string(file.left()) + " bytes");
    const std::string header = file.text(size);
    Tensors tensors;
    for (const Part& part : parts(header, file.left())) {
      ffi::Tensor tensor = new_tensor(part.dtype, part.shape, argument_);
      file.read(static_cast<char*>(tensor.data_ptr()), part.end - part.begin);
      if (part.dtype == "bool") check_bools(part.name, tensor);
      tensors.emplace(part.name, tensor);
    }
    return tensors;
  }

 private:
  struct Part {
    std::string name, dtype;
    Shape shape;
    int64_t begin, end;
  };

  // In the order in which they lie in the `bytes` behind the header.
  std::vector<Part> parts(const std::string& header, uint64_t bytes) const {
    std::vector<Part> parts;
    for (const auto& [name, entry] : Json::parse(argument_, header).members())
      if (name != "__metadata__") parts.push_back(part_of(name, entry, bytes));
    std::sort(parts.begin(), parts.end(), [](const Part& one, const Part& other) {
      return std::tie(one.begin, one.end) < std::tie(other.begin, other.end);
    });
    int64_t end = 0;
    for (const Part& part : parts) {
      if (part.begin != end) refuse_place(end, bytes, in_quotes(part.name));
      end = part.end;
    }
    if (static_cast<uint64_t>(end) != bytes) refuse_place(end, bytes, "the end");
    return parts;
  }

  Part part_of(const std::string& name, const Json& entry, uint64_t most) const {
    const std::string word = entry["dtype"].text();
    Part part;
    part.name = name;
    for (const Dtype& known : dtypes())
      if (word == known.in_safetensors) part.dtype = known.name;
    if (part.dtype.empty()) refuse("a dtype known here for " + in_quotes(name), in_quotes(word));
    for (const Json& size : entry["shape"].list()) part.shape.push_back(size.size());
    if (part.shape.size() > kMostAxes)
      refuse("at most " + std::to_string(kMostAxes) + " axes for " + in_quotes(name), std::to_string(part.shape.size()));
    const std::vector<Json> offsets = entry["data_offsets"].list();
    if (offsets.size() != 2) refuse("two offsets for " + in_quotes(name), std::to_string(offsets.size()));
    part.begin = offsets[0].size(), part.end = offsets[1].size();
    const int64_t bytes = bytes_of(argument_ + ", " + in_quotes(name), part.dtype, part.shape);
    if (part.end < part.begin || part.end - part.begin != bytes || static_cast<uint64_t>(part.end) > most)
      refuse(std::to_string(bytes) + " bytes of " + std::to_string(most) + " for " + in_quotes(name),
             std::to_string(part.begin) + " to " + std::to_string(part.end));
    return part;
  }

  // Compiled code may look at one bit of such a byte.
  void check_bools(const std::string& name, const ffi::Tensor& tensor) const {
    for (int64_t i = 0; i < bytes_of(tensor); ++i)
      if (const int value = static_cast<uint8_t>(data_of(tensor)[i]); value > 1)
        refuse("0 or 1 in each byte of " + in_quotes(name), std::to_string(value));
  }

  [[noreturn]] void refuse_place(int64_t end, uint64_t bytes, const std::string& next) const {
    refuse("tensors that lie one behind the other, to its end",
           "a gap or an overlap at byte " + std::to_string(end) + " of " + std::to_string(bytes) + ", before " + next);
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw Error(argument_, "safetensors with " + expected, got, "Write it with safetensors' save_file.");
  }

  std::string argument_;
};

inline Tensors read_safetensors(const std::string& argument, const std::string& path) {
  InputFile file(argument, path);
  return Safetensors(argument + " " + in_quotes(path)).read(file);
}

// Into a file that the caller commits.
inline void write_safetensors(NewFile& file, const Tensors& tensors) {
  std::string header = "{";
  int64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const Dtype* dtype = find_dtype(dtype_of(tensor));
    if (!dtype) throw Error("output " + in_quotes(name), "a dtype of safetensors", dtype_of(tensor), "Convert it.");
    std::string shape = text_of(shape_of(tensor));
    shape.front() = '[', shape.back() = ']';
    const int64_t begin = end;
    end += bytes_of(tensor);
    header += (header.size() > 1 ? "," : "") + json_text(name) + ":{\"dtype\":\"" + dtype->in_safetensors + "\",\"shape\":" + shape +
              ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t size = header.size();
  file.write(&size, sizeof size);
  file.write(header.data(), size);
  for (const auto& [name, tensor] : tensors) file.write(data_of(tensor), bytes_of(tensor));
}

}  // namespace mhsa
