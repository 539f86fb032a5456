// A compiled attention in a C++ program: load an artifact, call it.
//
//     mhsa::Attention attention("artifact", 2);                       // the folder, threads of a call
//     mhsa::Tensors inputs{{"x", mhsa::new_tensor("float32", {1, 128, 512})}};
//     mhsa::Tensors outputs = attention(inputs);                      // {"y", (1, 128, 512)}
//
// C++17, the headers of tvm_ffi, and lib/ of the bundle to link with. Weights are bound when it is loaded: others of the
// same shapes are a third argument. An object belongs to the thread that made it, as TVM's workers do.
#pragma once

#include <sched.h>
#include <stdlib.h>

#include <tvm/ffi/extra/module.h>

#include <set>
#include <string>
#include <vector>

#include "features.h"
#include "tensors.h"

namespace mhsa {

// An input, an output or a weight. A dim is a size or, in letters, a symbol: the same symbol is the same size in a call.
struct TensorInfo {
  std::string name, dtype;
  std::vector<std::string> dims;
  explicit TensorInfo(const Json& entry)
      : name(at(entry, "name").cast<ffi::String>()), dtype(at(entry, "dtype").cast<ffi::String>()) {
    for (const ffi::Any& dim : at(entry, "dims").cast<ffi::Array<ffi::Any>>()) {
      if (auto fixed = dim.as<int64_t>()) dims.push_back(std::to_string(*fixed));
      else dims.push_back(dim.cast<ffi::String>());
    }
  }
};

inline bool is_number(const std::string& dim) { return dim.find_first_not_of("0123456789") == std::string::npos; }
inline bool is_symbol(const std::string& dim) { return dim.find(' ') == std::string::npos && !is_number(dim); }

class Attention {
 public:
  explicit Attention(const std::string& folder, int threads = 0, const Tensors* weights = nullptr) {
    const Json manifest = parse_json(read_text(folder + "/manifest.json"));
    if (at(manifest, "format_version").cast<int64_t>() != kFormat)
      throw Error(folder + ": expected format version " + std::to_string(kFormat) + ", got another one");
    check_cpu(at(manifest, "target").cast<Json>());
    inputs = infos(manifest, "inputs");
    outputs = infos(manifest, "outputs");
    weights_ = infos(manifest, "weights");
    for (const auto& [symbol, most] : at(manifest, "limits").cast<Json>())
      limits_[symbol.cast<ffi::String>()] = most.cast<int64_t>();
    for (const auto& [output, input] : at(manifest, "in_place").cast<Json>())
      in_place_[output.cast<ffi::String>()] = input.cast<ffi::String>();
    use_threads(threads);
    const ffi::Any library = call(global("ffi.ModuleLoadFromFile"), ffi::String(folder + "/module.so"));
    machine_ = call(function(library, "vm_load_executable"));
    call(function(machine_, "vm_initialization"), static_cast<int>(kDLCPU), 0, kPooled);
    main_ = function(machine_, "main");
    bind(weights ? *weights : weights_.empty() ? Tensors() : read_safetensors(folder + "/weights.safetensors"));
  }

  // Inputs by name, outputs by name; inputs are read in place. Throws Error and tvm::ffi::Error.
  Tensors operator()(const Tensors& given) {
    std::map<std::string, int64_t> sizes;
    std::vector<ffi::Any> arguments;
    for (const TensorInfo& info : inputs) {
      const auto found = given.find(info.name);
      if (found == given.end()) throw Error("input " + info.name + ": expected a tensor, got none");
      check("input ", info, found->second, sizes);
      arguments.push_back(found->second);
    }
    for (const auto& [symbol, most] : limits_)
      if (sizes.count(symbol) && sizes[symbol] > most)
        throw Error("dim " + symbol + ": expected at most " + std::to_string(most) + ", got " +
                    std::to_string(sizes[symbol]));
    if (sizes != sizes_) call(global("vm.builtin.memory_manager.clear"));  // the pool keeps buffers by their exact size
    sizes_ = sizes;
    arguments.insert(arguments.end(), packed_.begin(), packed_.end());
    const ffi::Any result = call_all(main_, arguments);
    Tensors named;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto written = in_place_.find(outputs[i].name);
      if (written != in_place_.end()) named.emplace(outputs[i].name, given.at(written->second));
      else if (outputs.size() == 1) named.emplace(outputs[i].name, result.cast<ffi::Tensor>());
      else named.emplace(outputs[i].name, result.cast<ffi::Array<ffi::Tensor>>()[i]);
    }
    return named;
  }

  std::vector<TensorInfo> inputs, outputs;
  int threads = 1;

 private:
  static constexpr int64_t kFormat = 3;
  static constexpr int kPooled = 2;           // the VM's kind of memory allocator
  static constexpr int kShareAllCpus = -3;    // each worker may run on every CPU listed

  static std::vector<TensorInfo> infos(const Json& manifest, const char* key) {
    std::vector<TensorInfo> found;
    for (const ffi::Any& entry : at(manifest, key).cast<ffi::Array<ffi::Any>>()) found.emplace_back(entry.cast<Json>());
    return found;
  }

  static ffi::Function function(const ffi::Any& module, const char* name) {
    const ffi::Any found = call(global("ffi.ModuleGetFunction"), module, ffi::String(name), false);
    if (found == nullptr) throw Error(std::string("module.so: expected a function ") + name + ", got none");
    return found.cast<ffi::Function>();
  }

  // Refuses code for another CPU before it runs, in place of an illegal instruction in the middle.
  static void check_cpu(const Json& target) {
    const std::string triple = at(at(target, "tvm").cast<Json>(), "mtriple").cast<ffi::String>();
    const std::string architecture = triple.substr(0, triple.find('-'));
    if (architecture != kArchitecture)
      throw Error("artifact: expected a CPU of " + architecture + ", as it was compiled for one, got " + kArchitecture);
    const std::set<std::string> present = cpu_features();
    std::string needed, missing;
    for (const ffi::Any& word : at(at(target, "hardware").cast<Json>(), "features").cast<ffi::Array<ffi::Any>>()) {
      const std::string feature = word.cast<ffi::String>();
      needed += " " + feature;
      if (!present.count(feature)) missing += " " + feature;
    }
    if (!missing.empty())
      throw Error("artifact: expected a CPU with" + needed + ", got one without" + missing);
  }

  // The pool of the calling thread gets its size when it is first touched; idle workers sleep after about 0.4 ms.
  void use_threads(int wanted) {
    setenv("TVM_THREAD_POOL_SPIN_COUNT", "1000", 0);
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    ffi::Array<ffi::String> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) cpus.push_back(ffi::String(std::to_string(cpu)));
    const int own = static_cast<int>(cpus.size());
    threads = wanted > 0 ? wanted : own > 0 ? own : 1;
    for (int i = 0; own > 0 && static_cast<int>(cpus.size()) < threads; ++i) cpus.push_back(cpus[i % own]);
    call(global("runtime.config_threadpool"), kShareAllCpus, threads, cpus);
  }

  void bind(const Tensors& given) {
    std::map<std::string, int64_t> none;
    std::vector<ffi::Any> arguments;
    for (const TensorInfo& info : weights_) {
      const auto found = given.find(info.name);
      if (found == given.end()) throw Error("weights: expected " + info.name + ", got none of that name");
      check("weight ", info, found->second, none);
      arguments.push_back(found->second);
    }
    if (arguments.empty()) return;
    for (const ffi::Any& one : call_all(function(machine_, "bind_weights"), arguments).cast<ffi::Array<ffi::Any>>())
      packed_.push_back(one);
  }

  static void check(const char* role, const TensorInfo& info, const ffi::Tensor& tensor,
                    std::map<std::string, int64_t>& sizes) {
    const Shape shape = shape_of(tensor);
    bool fits = dtype_of(tensor) == info.dtype && shape.size() == info.dims.size() && tensor.IsContiguous();
    std::string expected = info.dtype + " (";
    for (size_t i = 0; i < info.dims.size(); ++i) {
      const std::string& dim = info.dims[i];
      expected += (i ? ", " : "") + dim;
      if (!fits || shape[i] < 1) fits = false;
      else if (is_number(dim)) fits = std::to_string(shape[i]) == dim;
      else if (is_symbol(dim)) fits = sizes.emplace(dim, shape[i]).first->second == shape[i];  // else the VM checks it
      if (sizes.count(dim)) expected += " = " + std::to_string(sizes.at(dim));
    }
    if (!fits)
      throw Error(role + info.name + ": expected " + expected + "), got " + dtype_of(tensor) + " " + text_of(shape));
  }

  std::vector<TensorInfo> weights_;
  std::map<std::string, std::string> in_place_;
  std::map<std::string, int64_t> limits_, sizes_;
  ffi::Any machine_;
  ffi::Function main_{nullptr};
  std::vector<ffi::Any> packed_;
};

}  // namespace mhsa
