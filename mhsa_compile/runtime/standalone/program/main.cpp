// Loads the artifact beside this program and calls it: on random inputs, or on those of a file.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "attention.h"
#include "drawing.h"

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

struct Options {
  std::string artifact, inputs, outputs, weights;
  mhsa::Sizes dims;
  int threads = 0, repeat = 10;
};

int64_t number(const std::string& option, const std::string& text) {
  if (text.empty() || text.size() > 9 || !mhsa::is_number(text) || std::stol(text) < 1)
    throw mhsa::Error(option, "a number from 1 to 999999999", mhsa::in_quotes(text), "Correct it: --help lists the options.");
  return std::stol(text);
}

Options parse(int count, char** words) {
  Options options;
  const std::string program = words[0];
  const size_t slash = program.find_last_of(mhsa::kSeparators);
  options.artifact = (slash == std::string::npos ? std::string() : program.substr(0, slash + 1)) + "artifact";
  for (int i = 1; i < count; ++i) {
    const std::string option = words[i];
    if (option == "--help" || option == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    const std::string name = "option " + mhsa::in_quotes(option);
    if (i + 1 == count) throw mhsa::Error(name, "one of those below, and its value", "no value", kUsage);
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
    else throw mhsa::Error(name, "one of those below, and its value", mhsa::in_quotes(value), kUsage);
  }
  return options;
}

// A name that nobody asks for is a mistake, and its default would be used in silence.
void require_known(const std::string& what, const std::string& name, const std::set<std::string>& known) {
  if (known.count(name)) return;
  std::string words;
  for (const std::string& word : known) words += (words.empty() ? "" : ", ") + mhsa::shown(word);
  throw mhsa::Error(what, "one of " + (words.empty() ? "none" : words), mhsa::shown(name), "Correct the name.");
}

void check_names(const std::vector<mhsa::TensorInfo>& wanted, const mhsa::Tensors& inputs, const mhsa::Sizes& sizes) {
  std::set<std::string> names, dims;
  for (const mhsa::TensorInfo& info : wanted) {
    names.insert(info.name);
    for (const std::string& dim : info.dims)
      if (!mhsa::is_number(dim)) dims.insert(dim), dims.insert(dim.rfind("mask_", 0) == 0 ? dim.substr(5) : dim);
  }
  for (const auto& [name, tensor] : inputs) require_known("--inputs", name, names);
  for (const auto& [dim, size] : sizes) require_known("--dim", dim, dims);
}

// Those of the file, and random ones that fit them.
mhsa::Tensors inputs_of(const mhsa::Attention& attention, const Options& options) {
  mhsa::Tensors inputs;
  if (!options.inputs.empty()) inputs = mhsa::read_safetensors("--inputs", options.inputs);
  check_names(attention.inputs, inputs, options.dims);
  mhsa::Sizes sizes = options.dims;
  for (const mhsa::TensorInfo& info : attention.inputs) {
    if (!inputs.count(info.name) || info.broadcast) continue;
    const mhsa::Shape shape = mhsa::shape_of(inputs.at(info.name));
    for (size_t i = 0; i < std::min(info.dims.size(), shape.size()); ++i)
      if (!mhsa::is_number(info.dims[i])) sizes[info.dims[i]] = shape[i];
  }
  std::mt19937 random(0);
  for (const mhsa::TensorInfo& info : attention.inputs)
    if (!inputs.count(info.name)) inputs.emplace(info.name, mhsa::drawn(info, sizes, random));
  return inputs;
}

void run(const Options& options) {
  std::unique_ptr<mhsa::Tensors> weights;
  if (!options.weights.empty())
    weights = std::make_unique<mhsa::Tensors>(mhsa::read_safetensors("--weights", options.weights));
  mhsa::Attention attention(options.artifact, options.threads, weights.get());
  const mhsa::Tensors inputs = inputs_of(attention, options);

  mhsa::Tensors outputs = attention(inputs);  // the first call is not timed
  std::vector<double> milliseconds;
  for (int i = 0; i < options.repeat; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    outputs = attention(inputs);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  if (!options.outputs.empty()) {
    mhsa::NewFile file("--outputs", options.outputs);
    mhsa::write_safetensors(file, outputs);
    file.commit();
  }
  std::printf("%.3f ms a call, the median of %d, %d threads\n", milliseconds[milliseconds.size() / 2], options.repeat,
              attention.threads);
  for (const auto& [name, tensor] : outputs) mhsa::report(name, tensor);
  if (std::fflush(stdout)) throw mhsa::Error("standard output", "room for what is said", "none", "Redirect it elsewhere.");
}

}  // namespace

int main(int count, char** words) {
  mhsa::let_writes_fail();
  try {
    run(parse(count, words));
    return 0;
  } catch (const std::bad_alloc&) {
    std::fputs("Error: memory: expected room for the tensors of a call, got none. Choose smaller sizes.\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "Error: %s\n", error.what());
  }
  return 2;
}
