// What a call brings, held against the manifest as `mhsa_compile.load` does it in Python, and copied only where compiled
// code could not read it in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dims.h"
#include "errors.h"
#include "manifest.h"
#include "tensors.h"

namespace mhsa {

// One input or weight. `owners`: the first tensor of each size that it shares. `written`: a call writes into it.
class Argument {
 public:
  Argument(const TensorInfo& info, const std::string& role, const std::map<std::string, std::string>& owners, bool written)
      : info_(info), label_(role + " " + in_quotes(info.name)), owners_(owners), written_(written) {
    for (const std::string& dim : info.dims)
      if (!is_number(dim) && !is_symbol(dim)) composed_.push_back(dim);
  }

  // The tensor as it is passed on; its symbolic dims join `sizes`. Throws Error.
  ffi::Tensor ready(const ffi::Tensor* argument, Sizes& sizes) const {
    if (!argument || !argument->defined()) throw Error(label_, described(), "nothing", "Pass a tensor by this name.");
    ffi::Tensor tensor = *argument;
    if (tensor.device().device_type != kDLCPU || !tensor.IsContiguous())
      throw Error(label_, "a dense tensor in CPU memory", "another one", "Copy it into one of mhsa::new_tensor.");
    if (dtype_of(tensor) != info_.dtype) wrong(tensor, sizes, "Convert it to " + info_.dtype + ".");
    if (info_.broadcast) tensor = at_full_rank(tensor, sizes);
    if (!fits(tensor, sizes)) wrong(*argument, sizes);
    if (info_.most || info_.rows) check_values(tensor, sizes);
    // Compiled code takes no offsets, and elements at any multiple of their size.
    const bool is_readable = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % find_dtype(info_.dtype)->bytes == 0;
    return written_ || (is_readable && !tensor.byte_offset()) ? tensor : copy(tensor);
  }

  // Axes that symbols make, "P + S", once all symbols are known.
  void check_expressions(const ffi::Tensor& tensor, Sizes& sizes) const {
    for (const std::string& dim : composed_) {
      const std::optional<int64_t> made = Expression(dim, sizes).value();
      if (made && *made != sizes.at(dim)) sizes[dim] = *made, wrong(tensor, sizes);
    }
  }

  const std::string& label() const { return label_; }

 private:
  // Axes of 1 are put in front, and stay where they are, but the last: where it is short compiled code takes it as padded.
  ffi::Tensor at_full_rank(const ffi::Tensor& tensor, const Sizes& sizes) const {
    Shape shape = shape_of(tensor);
    if (shape.size() > info_.dims.size()) wrong(tensor, sizes);
    shape.insert(shape.begin(), info_.dims.size() - shape.size(), 1);
    std::vector<std::optional<int64_t>> full;
    for (const std::string& dim : *info_.broadcast) full.push_back(size_of(dim, sizes));
    const bool repeats = shape.back() == 1 && info_.dims.back() != "1" && full.back().value_or(1) != 1 && !info_.pads;
    const int64_t last = repeats ? *full.back() : shape.back();
    if (info_.pads && full.back()) full.back() = std::min(*full.back(), last);
    for (size_t i = 0; i + 1 < shape.size(); ++i)
      if (shape[i] != 1 && full[i] && *full[i] != shape[i]) wrong(tensor, sizes);
    if (last != 1 && full.back() && *full.back() != last) wrong(tensor, sizes);
    if (repeats && last > 0) return repeated(tensor, shape, last);
    Shape strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    return tensor.as_strided(ffi::Shape(shape.begin(), shape.end()), ffi::Shape(strides.begin(), strides.end()));
  }

  ffi::Tensor repeated(const ffi::Tensor& single, Shape shape, int64_t last) const {
    const int64_t bytes = find_dtype(info_.dtype)->bytes, rows = bytes_of(single) / bytes;
    shape.back() = last;
    ffi::Tensor tensor = new_tensor(info_.dtype, shape, label_);
    char* to = data_of(tensor);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < last; ++i, to += bytes) std::memcpy(to, data_of(single) + row * bytes, bytes);
    return tensor;
  }

  bool fits(const ffi::Tensor& tensor, Sizes& sizes) const {
    const Shape shape = shape_of(tensor);
    if (shape.size() != info_.dims.size()) return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      const std::string& dim = info_.dims[i];
      const int64_t wanted = is_number(dim) ? std::stoll(dim) : sizes.emplace(dim, shape[i]).first->second;
      if (shape[i] != wanted) return false;
    }
    return true;
  }

  void check_values(const ffi::Tensor& tensor, const Sizes& sizes) const {
    const bool wide = info_.dtype == "int64";
    const std::optional<int64_t> most = info_.most ? size_of(*info_.most, sizes) : std::nullopt;
    for (int64_t i = 0, count = bytes_of(tensor) / (wide ? 8 : 4); i < count; ++i) {
      const int64_t value = wide ? reinterpret_cast<const int64_t*>(data_of(tensor))[i]
                                 : reinterpret_cast<const int32_t*>(data_of(tensor))[i];
      if (info_.rows && (value < -*info_.rows || value >= *info_.rows))
        throw Error(label_, "numbers from " + std::to_string(-*info_.rows) + " to " + std::to_string(*info_.rows - 1) +
                                ", as the table that they pick from has " + std::to_string(*info_.rows) + " rows",
                    std::to_string(value), "The tokenizer knows more tokens than the model, if they are its ids.");
      if (info_.most && (value < 0 || (most && value > *most)))
        throw Error(label_, "numbers from 0 to " + *info_.most + (most ? " = " + std::to_string(*most) : ""),
                    std::to_string(value), "Correct its values.");
    }
  }

  ffi::Tensor copy(const ffi::Tensor& tensor) const {
    ffi::Tensor made = new_tensor(info_.dtype, shape_of(tensor), label_);
    std::memcpy(made.data_ptr(), data_of(tensor), bytes_of(tensor));
    return made;
  }

  std::string described() const {
    std::string text = info_.dtype + " of shape (";
    for (size_t i = 0; i < info_.dims.size(); ++i) {
      const std::string& dim = info_.dims[i];
      const bool last = i + 1 == info_.dims.size();
      text += i ? ", " : "";
      if (!info_.broadcast || dim == "1" || dim == (*info_.broadcast)[i]) text += dim;
      else text += (last && info_.pads ? "1 to " : "1 or ") + (*info_.broadcast)[i];
    }
    return text + ")";
  }

  [[noreturn]] void wrong(const ffi::Tensor& tensor, const Sizes& sizes, const std::string& next_step = "") const {
    std::vector<std::string> named = info_.dims;
    if (info_.broadcast) named.insert(named.end(), info_.broadcast->begin(), info_.broadcast->end());
    std::string expected = described();
    for (const std::string& dim : named) {
      const auto first = owners_.find(dim);
      const std::optional<int64_t> size = size_of(dim, sizes);
      if (is_number(dim) || !size || (first != owners_.end() && first->second == info_.name)) continue;
      expected += ", " + dim + " = " + std::to_string(*size);
      if (first != owners_.end()) expected += " as in " + in_quotes(first->second);
    }
    throw Error(label_, expected, text_of(tensor), next_step.empty() ? "The manifest lists what each must be." : next_step);
  }

  TensorInfo info_;
  std::string label_;
  std::map<std::string, std::string> owners_;
  std::vector<std::string> composed_;
  bool written_;
};

class Signature {
 public:
  explicit Signature(const Manifest& manifest) : inputs_(manifest.inputs), limits_(manifest.limits) {
    // What broadcasts or has bounds is checked last, against sizes that the others bring.
    for (bool late : {false, true})
      for (size_t i = 0; i < inputs_.size(); ++i)
        if ((inputs_[i].broadcast || inputs_[i].most) == late) order_.push_back(i);
    std::map<std::string, std::string> owners;
    for (size_t i : order_)
      for (const std::string& dim : inputs_[i].dims) owners.emplace(dim, inputs_[i].name);
    std::set<std::string> written;
    for (const auto& [output, input] : manifest.in_place) written.insert(input);
    for (const TensorInfo& info : inputs_) {
      arguments_.emplace_back(info, "input", owners, written.count(info.name) > 0);
      written_.push_back(written.count(info.name) > 0);
    }
  }

  // In the order of the inputs; `sizes` gets those of the symbolic dims. Throws Error.
  std::vector<ffi::Tensor> tensors(const Tensors& inputs, Sizes& sizes) const {
    check_names(inputs);
    std::vector<std::optional<ffi::Tensor>> placed(inputs_.size());
    for (size_t i : order_) {
      const auto one = inputs.find(inputs_[i].name);
      placed[i] = arguments_[i].ready(one == inputs.end() ? nullptr : &one->second, sizes);
    }
    for (const auto& [symbol, most] : limits_)
      if (sizes.count(symbol) && sizes.at(symbol) > most)
        throw Error("dim " + in_quotes(symbol), "at most " + std::to_string(most) + ", the size of a table of the model",
                    std::to_string(sizes.at(symbol)), "Pass shorter inputs.");
    std::vector<ffi::Tensor> ready;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      arguments_[i].check_expressions(*placed[i], sizes);
      ready.push_back(*placed[i]);
    }
    check_apart(ready);
    return ready;
  }

 private:
  // A name that nobody asks for is a mistake, and what it was meant for would go without.
  void check_names(const Tensors& inputs) const {
    std::string known;
    for (const TensorInfo& info : inputs_) known += (known.empty() ? "" : ", ") + info.name;
    for (const auto& [name, tensor] : inputs) {
      const auto has_it = [&, &name = name](const TensorInfo& info) { return info.name == name; };
      if (std::none_of(inputs_.begin(), inputs_.end(), has_it))
        throw Error("inputs", "some of " + in_quotes(known), in_quotes(name), "Leave it out, or correct its name.");
    }
  }

  // What is written must not lie in another input's memory.
  void check_apart(const std::vector<ffi::Tensor>& ready) const {
    for (size_t i = 0; i < ready.size(); ++i)
      for (size_t j = 0; j < ready.size(); ++j) {
        const char *one = data_of(ready[i]), *other = data_of(ready[j]);
        if (i != j && written_[i] && one < other + bytes_of(ready[j]) && other < one + bytes_of(ready[i]))
          throw Error(arguments_[i].label(), "memory of its own: the call writes into it",
                      "some of that of " + in_quotes(inputs_[j].name), "Allocate it by itself, once.");
      }
  }

  std::vector<TensorInfo> inputs_;
  std::map<std::string, int64_t> limits_;
  std::vector<size_t> order_;
  std::vector<Argument> arguments_;
  std::vector<bool> written_;
};

}  // namespace mhsa
