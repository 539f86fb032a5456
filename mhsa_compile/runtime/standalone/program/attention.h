// A compiled attention in a C++ program: load an artifact, call it.
//
//     mhsa::Attention attention("artifact", 2);                       // the folder, threads of a call
//     mhsa::Tensors inputs{{"x", mhsa::new_tensor("float32", {1, 128, 512})}};
//     mhsa::Tensors outputs = attention(inputs);                      // {"y", (1, 128, 512)}
//
// C++17, the headers of tvm_ffi, and lib/ of the bundle to link with. Weights are bound when it is loaded: others of the
// same shapes are a third argument. An object belongs to the thread that made it, as TVM's workers do.
#pragma once

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allowed_cpus.h"
#include "manifest.h"
#include "mapped_code.h"
#include "signature.h"
#include "tensors.h"

namespace mhsa {

class Attention {
 public:
  // Every byte is checked before any code is mapped, and what was checked is what is mapped. Throws Error.
  explicit Attention(const std::string& folder, int threads = 0, const Tensors* weights = nullptr)
      : manifest_(label(folder, "manifest.json"), read_file("artifact file", folder + "/manifest.json")),
        signature_(manifest_) {
    inputs = manifest_.inputs, outputs = manifest_.outputs;
    std::string module;
    checked(folder, kModule, [&](InputFile& file) { module = file.rest(); });
    Tensors bound = weights_for(folder, weights);
    refusing({}, [&] {
      const ffi::Any library = mapped(folder, module);
      check_code(library);
      use_threads(library, threads);
      machine_ = call(function(library, "vm_load_executable"));
      call(function(machine_, "vm_initialization"), static_cast<int>(kDLCPU), 0, kPooled);
      main_ = function(machine_, "main");
      bind(std::move(bound));
    });
  }

  // Inputs by name, outputs by name; inputs are read in place where they begin with a cache line. Throws Error.
  Tensors operator()(const Tensors& inputs_by_name) {
    Sizes sizes;
    const std::vector<ffi::Tensor> ready = signature_.tensors(inputs_by_name, sizes);
    if (Tensors nothing; is_empty(sizes, nothing)) return nothing;
    std::vector<ffi::Any> arguments(ready.begin(), ready.end());
    arguments.insert(arguments.end(), packed_.begin(), packed_.end());
    ffi::Any result;
    refusing(sizes, [&] {
      if (told_) tell();
      if (sizes != sizes_) call(global("vm.builtin.memory_manager.clear"));  // the pool keeps buffers by their exact size
      sizes_ = sizes;
      result = call_all(main_, arguments);
    });
    Tensors named;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto written = manifest_.in_place.find(outputs[i].name);
      if (written != manifest_.in_place.end()) named.emplace(outputs[i].name, inputs_by_name.at(written->second));
      else named.emplace(outputs[i].name, output(outputs[i], i, result, sizes));
    }
    return named;
  }

  std::vector<TensorInfo> inputs, outputs;
  int threads = 1;

 private:
  static constexpr const char* kModule = "module.so";
  static constexpr int kPooled = 2;         // the VM's kind of memory allocator
  static constexpr int kShareAllCpus = -3;  // each worker may run on every CPU listed
  static constexpr int kMostThreads = 1024;
  static constexpr std::chrono::microseconds kRested{500};  // from call to call: more than workers look for work
  static constexpr const char* kCompileAgain = "Correct the inputs, or compile the artifact again.";

  static std::string label(const std::string& folder, const char* name) {
    return "artifact file " + in_quotes(folder + "/" + name);
  }

  // Reads a file that the manifest lists, and holds it against its hash.
  template <typename Reader>
  void checked(const std::string& folder, const char* name, Reader read) const {
    const std::string argument = label(folder, name), hint = "The artifact is damaged: copy it again, or compile it again.";
    const auto listed = manifest_.files.find(name);
    if (listed == manifest_.files.end()) throw Error(argument, "a hash of it in the manifest", "none", hint);
    InputFile file("artifact file", folder + "/" + name);
    Sha256 digest;
    file.hash_into(&digest);
    std::exception_ptr unsound;
    try {
      read(file);
    } catch (const Error&) {  // damage comes before what is said of damaged bytes
      unsound = std::current_exception();
    }
    file.skip(file.left());
    if (const std::string sum = digest.digits(); sum != listed->second)
      throw Error(argument, "sha256 " + listed->second, sum, hint);
    if (unsound) std::rethrow_exception(unsound);
  }

  // Its own weights, or those that were given. Tables follow from the spec: nobody has to bring them.
  Tensors weights_for(const std::string& folder, const Tensors* others) const {
    const char* const name = "weights.safetensors";
    const auto own = [&] {
      Tensors stored;
      checked(folder, name, [&](InputFile& file) { stored = Safetensors(label(folder, name)).read(file); });
      return stored;
    };
    if (manifest_.weights.empty() && !others) return {};
    if (!others) return own();
    Tensors tensors = *others;
    for (const char* table : {"rope_cos", "rope_sin", "alibi_slopes"})
      if (wants(table) && !tensors.count(table)) tensors.emplace(table, at(own(), table));
    for (const auto& [extra, tensor] : tensors)
      if (!wants(extra)) throw Error("weights", "only those of the artifact", in_quotes(extra), "Leave it out.");
    return tensors;
  }

  bool wants(const std::string& weight) const {
    return std::any_of(manifest_.weights.begin(), manifest_.weights.end(),
                       [&](const TensorInfo& info) { return info.name == weight; });
  }

  static ffi::Tensor at(const Tensors& tensors, const std::string& name) {
    const auto entry = tensors.find(name);
    if (entry == tensors.end()) throw Error("weights", "one for " + in_quotes(name), "none", "Bring it, by that name.");
    return entry->second;
  }

  // Mapped once for all who load these bytes, and for ever: the pool of threads in them may be the process's.
  static ffi::Any mapped(const std::string& folder, const std::string& bytes) {
    static std::mutex lock;
    static auto& libraries = *new std::map<std::string, ffi::Any>;
    const std::lock_guard<std::mutex> held(lock);
    const std::string hash = Sha256::of(bytes);
    if (const auto entry = libraries.find(hash); entry != libraries.end()) return entry->second;
    const ffi::Any library = mapped_code(label(folder, kModule), folder + "/" + kModule, hash, bytes, opened);
    return libraries.emplace(hash, library).first->second;
  }

  static ffi::Any opened(const std::string& path) {
    return call(global("ffi.Module.load_from_file.so"), ffi::String(path), ffi::String("so"));
  }

  static ffi::Function function(const ffi::Any& module, const char* name) {
    const ffi::Any exported = call(global("ffi.ModuleGetFunction"), module, ffi::String(name), false);
    if (exported == nullptr) throw Error("artifact file 'module.so'", std::string("a function ") + name, "none", kCompileAgain);
    return exported.cast<ffi::Function>();
  }

  // Features of the CPU are in the code, too, since a manifest can be edited. Code from before that has none.
  static void check_code(const ffi::Any& library) {
    const ffi::Any say = call(global("ffi.ModuleGetFunction"), library, ffi::String("mhsa_cpu_features"), true);
    if (say == nullptr) return;
    Manifest::check_features(reinterpret_cast<const char*>(call(say.cast<ffi::Function>()).cast<int64_t>()));
  }

  // Of the pool that the code brings: workers sleep after 0.2 ms at most. Artifacts from before it run on TVM's, whose pool of
  // the calling thread gets its size when it is first touched.
  void use_threads(const ffi::Any& library, int wanted) {
    if (wanted < 0 || wanted > kMostThreads)
      throw Error("threads", "a number from 1 to " + std::to_string(kMostThreads) + ", or 0 for the CPUs of this process",
                  std::to_string(wanted), "Choose as many as there are CPUs.");
    threads = wanted > 0 ? wanted : std::min(allowed_cpus(), kMostThreads);
    const ffi::Any say = call(global("ffi.ModuleGetFunction"), library, ffi::String("mhsa_threads"), true);
    if (say != nullptr) {
      say_ = say.cast<ffi::Function>();
      told_ = reinterpret_cast<int64_t*>(call(say_, int64_t{threads}).cast<int64_t>());
      return;
    }
    set_default("TVM_THREAD_POOL_SPIN_COUNT", "1000");
    const std::vector<int> own = affinity();
    ffi::Array<ffi::String> cpus;
    for (size_t i = 0; !own.empty() && i < std::max(own.size(), size_t(threads)); ++i)
      cpus.push_back(ffi::String(std::to_string(own[i % own.size()])));
    call(global("runtime.config_threadpool"), kShareAllCpus, threads, cpus);
  }

  // Others of the same code may have said another number. After a rest its workers may sleep: then it is called, and
  // wakes them.
  void tell() {
    const auto now = std::chrono::steady_clock::now();
    if (now - said_ > kRested) call(say_, int64_t{threads});
    else *told_ = threads;
    said_ = now;
  }

  // By the functions bind_weights_0, bind_weights_1, ... of the code: what one is the last to read is let go of before the
  // next begins, so that not all weights lie in memory twice. Their parameters are called weight_N, the N-th of
  // the manifest.
  void bind(Tensors tensors) {
    std::vector<ffi::Tensor> weights;
    Sizes none;
    for (const TensorInfo& info : manifest_.weights) {
      const ffi::Tensor tensor = at(tensors, info.name);
      weights.push_back(Argument(info, "weight", {}, false).ready(&tensor, none));
    }
    tensors.clear();
    std::vector<std::pair<ffi::Function, std::vector<size_t>>> steps;
    std::vector<size_t> last(weights.size(), 0);  // the step behind which nobody reads it
    while (true) {
      const std::string name = "bind_weights_" + std::to_string(steps.size());
      const ffi::Any step = call(global("ffi.ModuleGetFunction"), machine_, ffi::String(name), false);
      if (step == nullptr) break;
      const std::vector<size_t> places = weights_of(name, weights.size());
      for (size_t place : places) last[place] = steps.size();
      steps.emplace_back(step.cast<ffi::Function>(), places);
    }
    for (size_t number = 0; number < steps.size(); ++number) {
      std::vector<ffi::Any> arguments;
      for (size_t place : steps[number].second) arguments.push_back(weights[place]);
      for (size_t place = 0; place < weights.size(); ++place)
        if (last[place] <= number) weights[place] = ffi::Tensor();
      for (const ffi::Any& one : call_all(steps[number].first, arguments).cast<ffi::Array<ffi::Any>>()) packed_.push_back(one);
      arguments.clear();
      call(global("vm.builtin.memory_manager.clear"));  // what lay between weights and packed ones
    }
  }

  std::vector<size_t> weights_of(const std::string& step, size_t count) const {
    const std::string prefix = "weight_";
    std::vector<size_t> places;
    const int64_t arity = call(function(machine_, "get_function_arity"), ffi::String(step)).cast<int64_t>();
    for (int64_t i = 0; i < arity; ++i) {
      const std::string name = call(function(machine_, "get_function_param_name"), ffi::String(step), i).cast<ffi::String>();
      const std::string place = name.substr(0, prefix.size()) == prefix ? name.substr(prefix.size()) : "";
      if (place.empty() || place.size() > 9 || !is_number(place) || static_cast<size_t>(std::stol(place)) >= count)
        throw Error("artifact file 'module.so'", "weights of the manifest for " + step, in_quotes(name), kCompileAgain);
      places.push_back(std::stol(place));
    }
    return places;
  }

  // Whether some size is 0 and so there is nothing to compute; `empty` then has the outputs.
  bool is_empty(const Sizes& sizes, Tensors& empty) const {
    if (std::none_of(sizes.begin(), sizes.end(), [](const auto& size) { return size.second == 0; })) return false;
    for (const TensorInfo& info : outputs) {
      Shape shape;
      for (const std::string& dim : info.dims) shape.push_back(size_of(dim, sizes).value_or(-1));
      if (std::count(shape.begin(), shape.end(), -1) || !std::count(shape.begin(), shape.end(), 0)) return false;
      empty.emplace(info.name, new_tensor(info.dtype, shape, "output " + in_quotes(info.name)));
    }
    return true;
  }

  // One of the tensors that `main` returned, if it is what the manifest promises.
  ffi::Tensor output(const TensorInfo& info, size_t i, const ffi::Any& result, Sizes sizes) const {
    ffi::Any one = result;
    if (outputs.size() > 1) {
      const auto all = result.as<ffi::Array<ffi::Any>>();
      one = all && all->size() == outputs.size() ? (*all)[i] : ffi::Any(nullptr);
    }
    const auto tensor = one.as<ffi::Tensor>();
    if (!tensor) throw Error("output " + in_quotes(info.name), "a tensor", "none", kCompileAgain);
    return Argument(info, "output", {}, true).ready(&*tensor, sizes);
  }

  // The sizes of a call's symbols, as a message has them.
  static std::string listed(const Sizes& sizes) {
    std::string all;
    for (const auto& [symbol, size] : sizes) all += (all.empty() ? "" : ", ") + symbol + " = " + std::to_string(size);
    return all.empty() ? "the only sizes there are" : all;
  }

  // Does what TVM does, and says in our words what it refuses: of compiled code's own refusals, the argument, what was
  // expected and what came are three lines, in which {N} is the size of the dim N.
  template <typename Body>
  static void refusing(const Sizes& sizes, Body body) {
    try {
      body();
    } catch (const ffi::Error& error) {
      std::string words = error.message();
      const bool sizes_differ = error.kind() == "ValueError" || words.find("match_cast") != std::string::npos;
      if (sizes_differ) throw Error("inputs", "sizes that fit each other inside the model", listed(sizes), "Correct the inputs.");
      if (error.kind() != "mhsa.InputError") throw Error("artifact", "code that does this call", in_quotes(words), kCompileAgain);
      for (const auto& [symbol, size] : sizes)
        for (size_t place; (place = words.find("{" + symbol + "}")) != std::string::npos;)
          words.replace(place, symbol.size() + 2, std::to_string(size));
      const size_t first = words.find('\n'), second = words.find('\n', first + 1);
      const std::string got = second == std::string::npos ? "" : words.substr(second + 1);
      throw Error(words.substr(0, first), words.substr(first + 1, second - first - 1), got.empty() ? "some beyond" : got,
                  "Correct the inputs.");
    }
  }

  Manifest manifest_;
  Signature signature_;
  Sizes sizes_;
  ffi::Function say_{nullptr};
  int64_t* told_ = nullptr;  // threads of the calling thread's next call
  std::chrono::steady_clock::time_point said_{};
  ffi::Any machine_;
  ffi::Function main_{nullptr};
  std::vector<ffi::Any> packed_;
};

}  // namespace mhsa
