// Random inputs for the program, and lines about its outputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "dims.h"
#include "manifest.h"
#include "tensors.h"

namespace mhsa {

// As `mhsa run` has them: B = 1, L = 128, S = L, C = 2 L; a mask's axis, mask_L, is L.
inline int64_t drawn_size(const std::string& argument, const std::string& dim, const Sizes& sizes) {
  const std::string symbol = dim.rfind("mask_", 0) == 0 ? dim.substr(5) : dim;
  for (const std::string& name : {dim, symbol})
    if (const auto size = size_of(name, sizes)) return *size;
  const int64_t length = sizes.count("L") ? sizes.at("L") : 128;
  if (symbol == "B") return 1;
  if (symbol == "L" || symbol == "S") return length;
  if (symbol == "C") return 2 * length;
  if (symbol != dim) return 1;
  throw Error(argument, "a size for its dim " + in_quotes(dim), "none", "Give it one: --dim " + in_quotes(dim + "=SIZE"));
}

inline uint16_t half_bits(float value, bool bfloat) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (bfloat) return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 112;  // of normal numbers up to 4, which these are
  return exponent < 1 ? 0 : static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

// From the standard normal distribution; True in nine of ten; 0 or 1.
inline ffi::Tensor drawn(const TensorInfo& info, const Sizes& sizes, std::mt19937& random) {
  const std::string argument = "input " + in_quotes(info.name);
  Shape shape;
  for (const std::string& dim : info.dims) shape.push_back(drawn_size(argument, dim, sizes));
  ffi::Tensor tensor = new_tensor(info.dtype, shape, argument);
  void* data = tensor.data_ptr();
  std::normal_distribution<float> normal;
  for (int64_t i = 0, count = bytes_of(tensor) / find_dtype(info.dtype)->bytes; i < count; ++i) {
    if (info.dtype == "float32") static_cast<float*>(data)[i] = normal(random);
    else if (info.dtype == "float64") static_cast<double*>(data)[i] = normal(random);
    else if (info.dtype == "float16" || info.dtype == "bfloat16")
      static_cast<uint16_t*>(data)[i] = half_bits(normal(random), info.dtype == "bfloat16");
    else if (info.dtype == "bool") static_cast<uint8_t*>(data)[i] = i % shape.back() == 0 || random() % 10 > 0;
    else if (info.dtype == "int64") static_cast<int64_t*>(data)[i] = random() % 2;
    else if (info.dtype == "int32") static_cast<int32_t*>(data)[i] = random() % 2;
    else throw Error(argument, "a tensor of --inputs, for nobody draws " + info.dtype, "none", "Bring one: --inputs");
  }
  return tensor;
}

inline double element(const ffi::Tensor& tensor, const std::string& dtype, int64_t i) {
  const char* data = data_of(tensor);
  if (dtype == "float32") return reinterpret_cast<const float*>(data)[i];
  if (dtype == "float64") return reinterpret_cast<const double*>(data)[i];
  if (dtype == "int64") return static_cast<double>(reinterpret_cast<const int64_t*>(data)[i]);
  if (dtype == "uint64") return static_cast<double>(reinterpret_cast<const uint64_t*>(data)[i]);
  if (dtype == "int32") return reinterpret_cast<const int32_t*>(data)[i];
  if (dtype == "uint32") return reinterpret_cast<const uint32_t*>(data)[i];
  if (dtype == "int16") return reinterpret_cast<const int16_t*>(data)[i];
  if (dtype == "uint16") return reinterpret_cast<const uint16_t*>(data)[i];
  if (dtype == "int8") return reinterpret_cast<const int8_t*>(data)[i];
  if (dtype == "bool" || dtype == "uint8") return static_cast<uint8_t>(data[i]);
  const uint32_t half = reinterpret_cast<const uint16_t*>(data)[i];
  if (dtype == "bfloat16") {
    const uint32_t bits = half << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const int exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  const double size = exponent == 31 ? (fraction ? std::nan("") : INFINITY)
                      : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                     : std::ldexp(fraction, -24);
  return half & 0x8000 ? -size : size;
}

inline void report(const std::string& name, const ffi::Tensor& tensor) {
  const std::string dtype = dtype_of(tensor);
  double sum = 0, least = INFINITY, most = -INFINITY;
  for (int64_t i = 0, count = bytes_of(tensor) / find_dtype(dtype)->bytes; i < count; ++i) {
    const double value = element(tensor, dtype, i);
    sum += value, least = std::min(least, value), most = std::max(most, value);
  }
  std::printf("%s: %s %s, sum %.9g, min %.6g, max %.6g\n", shown(name).c_str(), dtype.c_str(),
              text_of(shape_of(tensor)).c_str(), sum, least, most);
}

}  // namespace mhsa
