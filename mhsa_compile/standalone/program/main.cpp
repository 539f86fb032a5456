// Loads the artifact beside this program and calls it: on random inputs, or on those of a file.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "attention.h"

namespace {

const char* const kUsage =
    "usage: attention [options]\n"
    "  --artifact DIR             the artifact's folder; artifact/ beside this program\n"
    "  --dim NAME=SIZE            the size of a symbolic dim, such as L=197; repeat it\n"
    "  --inputs FILE.safetensors  inputs by name; what it lacks is random\n"
    "  --outputs FILE.safetensors where outputs go\n"
    "  --weights FILE.safetensors instead of the artifact's own\n"
    "  --threads N                of a call; the CPUs that this process may use\n"
    "  --repeat N                 timed calls, 10\n";

using Sizes = std::map<std::string, int64_t>;

struct Options {
  std::string artifact, inputs, outputs, weights;
  Sizes dims;
  int threads = 0, repeat = 10;
};

int64_t number(const std::string& option, const std::string& text) {
  if (text.empty() || text.size() > 9 || !mhsa::is_number(text) || std::stol(text) < 1)
    throw mhsa::Error(option + ": expected a number from 1 on, got '" + text + "'");
  return std::stol(text);
}

Options parse(int count, char** words) {
  Options options;
  const std::string program = words[0];
  const size_t slash = program.rfind('/');
  options.artifact = (slash == std::string::npos ? std::string() : program.substr(0, slash + 1)) + "artifact";
  for (int i = 1; i < count; ++i) {
    const std::string option = words[i];
    if (option == "--help" || option == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    if (i + 1 == count) throw mhsa::Error(option + ": expected a value, or is no option\n" + kUsage);
    const std::string value = words[++i];
    const size_t equals = value.find('=');
    if (option == "--artifact") options.artifact = value;
    else if (option == "--inputs") options.inputs = value;
    else if (option == "--outputs") options.outputs = value;
    else if (option == "--weights") options.weights = value;
    else if (option == "--threads") options.threads = static_cast<int>(number(option, value));
    else if (option == "--repeat") options.repeat = static_cast<int>(number(option, value));
    else if (option == "--dim" && equals != std::string::npos)
      options.dims[value.substr(0, equals)] = number(option, value.substr(equals + 1));
    else throw mhsa::Error(option + ": no option, or no such value\n" + kUsage);
  }
  return options;
}

// As `mhsa run` has them: B = 1, L = 128, S = L, C = 2 L; a mask's axis, mask_L, is L.
int64_t size_of(const std::string& input, const std::string& dim, const Sizes& sizes) {
  if (mhsa::is_number(dim)) return std::stol(dim);
  const std::string symbol = dim.rfind("mask_", 0) == 0 ? dim.substr(5) : dim;
  for (const std::string& name : {dim, symbol})
    if (sizes.count(name)) return sizes.at(name);
  const int64_t length = sizes.count("L") ? sizes.at("L") : 128;
  if (symbol == "B") return 1;
  if (symbol == "L" || symbol == "S") return length;
  if (symbol == "C") return 2 * length;
  if (symbol != dim) return 1;
  throw mhsa::Error("input " + input + ": expected a size for its dim " + dim + ", got none: --dim '" + dim + "=SIZE'");
}

uint16_t half_bits(float value, bool bfloat) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (bfloat) return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 112;  // of normal numbers up to 4, which these are
  return exponent < 1 ? 0 : static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

// From the standard normal distribution; True in nine of ten; 0 or 1.
tvm::ffi::Tensor drawn(const mhsa::TensorInfo& info, const Sizes& sizes, std::mt19937& random) {
  mhsa::Shape shape;
  int64_t count = 1;
  for (const std::string& dim : info.dims) shape.push_back(size_of(info.name, dim, sizes)), count *= shape.back();
  tvm::ffi::Tensor tensor = mhsa::new_tensor(info.dtype, shape);
  void* data = tensor.data_ptr();
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    if (info.dtype == "float32") static_cast<float*>(data)[i] = normal(random);
    else if (info.dtype == "float64") static_cast<double*>(data)[i] = normal(random);
    else if (info.dtype == "float16" || info.dtype == "bfloat16")
      static_cast<uint16_t*>(data)[i] = half_bits(normal(random), info.dtype == "bfloat16");
    else if (info.dtype == "bool") static_cast<uint8_t*>(data)[i] = i % shape.back() == 0 || random() % 10 > 0;
    else if (info.dtype == "int64") static_cast<int64_t*>(data)[i] = random() % 2;
    else if (info.dtype == "int32") static_cast<int32_t*>(data)[i] = random() % 2;
    else throw mhsa::Error("input " + info.name + ": expected a tensor of --inputs, for nobody draws " + info.dtype);
  }
  return tensor;
}

double element(const tvm::ffi::Tensor& tensor, const std::string& dtype, int64_t i) {
  const void* data = tensor.data_ptr();
  if (dtype == "float32") return static_cast<const float*>(data)[i];
  if (dtype == "float64") return static_cast<const double*>(data)[i];
  if (dtype == "int64") return static_cast<double>(static_cast<const int64_t*>(data)[i]);
  if (dtype == "int32") return static_cast<const int32_t*>(data)[i];
  if (dtype != "float16" && dtype != "bfloat16") return static_cast<const uint8_t*>(data)[i];
  const uint32_t half = static_cast<const uint16_t*>(data)[i];
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

void report(const std::string& name, const tvm::ffi::Tensor& tensor) {
  const std::string dtype = mhsa::dtype_of(tensor);
  int64_t count = 1;
  for (int64_t size : tensor.shape()) count *= size;
  double sum = 0, least = INFINITY, most = -INFINITY;
  for (int64_t i = 0; i < count; ++i) {
    const double value = element(tensor, dtype, i);
    sum += value, least = std::min(least, value), most = std::max(most, value);
  }
  std::printf("%s: %s %s, sum %.9g, min %.6g, max %.6g\n", name.c_str(), dtype.c_str(),
              mhsa::text_of(mhsa::shape_of(tensor)).c_str(), sum, least, most);
}

void require_known(const std::string& what, const std::string& name, const std::set<std::string>& known) {
  if (known.count(name)) return;
  std::string words;
  for (const std::string& word : known) words += (words.empty() ? "" : ", ") + word;
  throw mhsa::Error(what + ": expected one of " + (words.empty() ? "none" : words) + ", got " + name);
}

// A name that nobody asks for is a mistake, and its default would be used in silence.
void check_names(const std::vector<mhsa::TensorInfo>& wanted, const mhsa::Tensors& given, const Sizes& sizes) {
  std::set<std::string> names, dims;
  for (const mhsa::TensorInfo& info : wanted) {
    names.insert(info.name);
    for (const std::string& dim : info.dims)
      if (!mhsa::is_number(dim)) dims.insert(dim), dims.insert(dim.rfind("mask_", 0) == 0 ? dim.substr(5) : dim);
  }
  for (const auto& [name, tensor] : given) require_known("--inputs", name, names);
  for (const auto& [dim, size] : sizes) require_known("--dim", dim, dims);
}

int run(const Options& options) {
  mhsa::Tensors weights;
  if (!options.weights.empty()) weights = mhsa::read_safetensors(options.weights);
  mhsa::Attention attention(options.artifact, options.threads, options.weights.empty() ? nullptr : &weights);

  mhsa::Tensors inputs;
  if (!options.inputs.empty()) inputs = mhsa::read_safetensors(options.inputs);
  check_names(attention.inputs, inputs, options.dims);
  Sizes sizes = options.dims;
  for (const mhsa::TensorInfo& info : attention.inputs)
    if (inputs.count(info.name))
      for (size_t i = 0; i < info.dims.size() && i < inputs.at(info.name).shape().size(); ++i)
        sizes[info.dims[i]] = inputs.at(info.name).shape()[i];
  std::mt19937 random(0);
  for (const mhsa::TensorInfo& info : attention.inputs)
    if (!inputs.count(info.name)) inputs.emplace(info.name, drawn(info, sizes, random));

  mhsa::Tensors outputs = attention(inputs);  // the first call is not timed
  std::vector<double> milliseconds;
  for (int i = 0; i < options.repeat; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    outputs = attention(inputs);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::printf("%.3f ms a call, the median of %d, %d threads\n", milliseconds[milliseconds.size() / 2], options.repeat,
              attention.threads);
  for (const auto& [name, tensor] : outputs) report(name, tensor);
  if (!options.outputs.empty()) mhsa::write_safetensors(options.outputs, outputs);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(parse(count, words));
  } catch (const tvm::ffi::Error& error) {
    std::fprintf(stderr, "Error: %s\n", error.message().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "Error: %s\n", error.what());
  }
  return 2;
}
