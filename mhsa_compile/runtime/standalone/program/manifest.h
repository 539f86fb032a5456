// manifest.json of an artifact, read into types: what it does not say, or says of a type that it is not, is refused.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dims.h"
#include "errors.h"
#include "cpu_features.h"
#include "json.h"
#include "sha256.h"
#include "tensors.h"
#include "tile_permission.h"

namespace mhsa {

// An input, an output or a weight. A dim is a size or, in letters, a symbol: the same symbol is the same size in a call.
// `broadcast`, of a mask, is the full size of each axis, of which a call brings all or 1; with `pads` the last may also be
// shorter. `most`, of whole numbers, is the largest that they may be; `rows`, of ids, how many rows the table has that they
// pick from.
struct TensorInfo {
  std::string name, dtype;
  std::vector<std::string> dims;
  std::optional<std::vector<std::string>> broadcast;
  std::optional<std::string> most;
  std::optional<int64_t> rows;
  bool pads = false;

  explicit TensorInfo(const Json& entry)
      : name(entry["name"].text()), dtype(entry["dtype"].text()), dims(dims_of(entry["dims"])) {
    const auto has = [&](const char* key) { return entry.has(key) && !entry[key].is_null(); };
    if (!find_dtype(dtype)) entry["dtype"].refuse("a dtype such as float32", in_quotes(dtype));
    if (has("broadcast")) broadcast = dims_of(entry["broadcast"]);
    if (broadcast && (broadcast->size() != dims.size() || dims.empty()))
      entry["broadcast"].refuse("as many axes as there are dims", std::to_string(broadcast->size()));
    if (has("most")) most = dim_of(entry["most"]);
    if (most && ((dtype != "int64" && dtype != "int32") || broadcast))
      entry["most"].refuse("int64 or int32 that it bounds", dtype);
    if (has("rows")) rows = entry["rows"].size();
    if (rows && dtype != "int64" && dtype != "int32") entry["rows"].refuse("int64 or int32 that picks from them", dtype);
    if (has("pads")) pads = entry["pads"].truth();
  }

 private:
  static std::vector<std::string> dims_of(const Json& entry) {
    std::vector<std::string> dims;
    for (const Json& dim : entry.list()) dims.push_back(dim_of(dim));
    return dims;
  }

  static std::string dim_of(const Json& entry) {
    constexpr size_t kLongest = 256;
    if (!entry.is_text()) return std::to_string(entry.size());
    const std::string name = entry.text();
    if (is_number(name) || name.size() > kLongest) entry.refuse("a size, or the name of one", in_quotes(name));
    return name;
  }
};

struct Manifest {
  static constexpr int64_t kFormat = 6;

  std::vector<TensorInfo> inputs, outputs, weights;
  std::map<std::string, std::string> in_place;  // output -> the input that a call turns into it
  std::map<std::string, int64_t> limits;        // symbol -> its largest size
  std::map<std::string, std::string> files;     // their sha256

  // Throws Error: damaged, of another version, or for another CPU.
  Manifest(const std::string& argument, const std::string& bytes) {
    const Json all = Json::parse(argument, bytes);
    check_version(argument, all["format_version"].size());
    check_seal(argument, all["sha256"].text(), bytes);
    inputs = infos(all["inputs"]), outputs = infos(all["outputs"]), weights = infos(all["weights"]);
    if (outputs.empty()) all["outputs"].refuse("one at least", "none");
    for (const auto& [symbol, most] : all["limits"].members()) limits[symbol] = most.size();
    for (const auto& [name, digest] : all["files"].members()) files[name] = digest.text();
    for (const auto& [output, input] : all["in_place"].members()) add_in_place(output, input);
    check_cpu(all["target"]);
  }

  // Refuses code for a CPU with features that this one lacks, words with spaces between, and code with tiles where the
  // system refuses them to this process: they are asked for.
  static void check_features(const std::string& needed) {
    const std::set<std::string> present = cpu_features();
    std::istringstream words(needed);
    std::string missing;
    bool has_tiles = false;
    for (std::string feature; words >> feature; has_tiles |= feature == kTileFeature)
      if (!present.count(feature)) missing += " " + feature;
    if (!missing.empty() && present.empty())
      throw Error("artifact", "a CPU with" + needed, "one of which nobody tells what it has: /proc/cpuinfo cannot be read",
                  "Mount /proc.");
    if (!missing.empty())
      throw Error("artifact", "a CPU with" + needed, "one without" + missing,
                  "Compile it for this machine: --target, see `mhsa targets`.");
    if (const std::string reason = has_tiles ? tile_refusal() : ""; !reason.empty())
      throw Error("artifact", std::string("a process that may use matrix tiles (") + kTileFeature + "), as it was compiled for them",
                  "one that may not: " + reason, std::string("Or compile it without them: --target ") + kWithoutTiles + ".");
  }

 private:
  static void check_version(const std::string& argument, int64_t version) {
    if (version != kFormat)
      throw Error(argument, "format version " + std::to_string(kFormat), "format version " + std::to_string(version),
                  version > kFormat ? "Make the bundle again, with the mhsa-compile that wrote the artifact."
                                  : "Compile the artifact again.");
  }

  // The manifest's own hash is of its text as it is with zeros in the place of that hash.
  static void check_seal(const std::string& argument, const std::string& digest, std::string text) {
    constexpr size_t kDigits = 64;
    const std::string hint = "The artifact is damaged: copy it again, or compile it again.";
    if (digest.size() != kDigits || digest.find_first_not_of("0123456789abcdef") != std::string::npos)
      throw Error(argument, "a sha256 of 64 digits", in_quotes(digest), hint);
    for (size_t at = 0; (at = text.find(digest, at)) != std::string::npos; at += kDigits)
      text.replace(at, kDigits, kDigits, '0');
    if (const std::string sum = Sha256::of(text); sum != digest) throw Error(argument, "sha256 " + digest, sum, hint);
  }

  static std::vector<TensorInfo> infos(const Json& entries) {
    std::vector<TensorInfo> tensors;
    std::set<std::string> names;
    for (const Json& entry : entries.list()) {
      tensors.emplace_back(entry);
      const std::string& name = tensors.back().name;
      if (name.find('\0') != std::string::npos || !names.insert(name).second)
        entry["name"].refuse("a name of its own", in_quotes(name));
    }
    return tensors;
  }

  void add_in_place(const std::string& output, const Json& input) {
    const TensorInfo *from = find(inputs, input.text()), *to = find(outputs, output);
    if (!from || !to) input.refuse("an input, for an output", in_quotes(input.text()) + " for " + in_quotes(output));
    if (from->dtype != to->dtype || from->dims != to->dims || from->broadcast)
      input.refuse("an input of the dtype and dims of " + in_quotes(output), in_quotes(input.text()));
    for (const auto& [other, taken] : in_place)
      if (taken == from->name) input.refuse("an input for each output", in_quotes(taken) + " for " + in_quotes(other) + " too");
    in_place[output] = from->name;
  }

  static const TensorInfo* find(const std::vector<TensorInfo>& infos, const std::string& name) {
    for (const TensorInfo& info : infos)
      if (info.name == name) return &info;
    return nullptr;
  }

  // Refuses code for another CPU before it runs, in place of an illegal instruction in the middle.
  static void check_cpu(const Json& target) {
    const std::string hint = "Compile it for this machine: --target, see `mhsa targets`.";
    if (const std::string family = target["family"].text(); family != "cpu")
      throw Error("artifact", "one compiled for a CPU", "one for " + in_quotes(family), hint);
    const std::string triple = target["tvm"]["mtriple"].text();
    const std::string architecture = triple.substr(0, triple.find('-'));
    if (architecture != kArchitecture)
      throw Error("artifact", "a CPU of " + architecture + ", as it was compiled for one", kArchitecture, hint);
    const std::string linked = target["link"]["triple"].text();
    const size_t from = linked.find('-') + 1;
    if (const std::string system = linked.substr(from, linked.find_first_of("-.", from) - from); system != kSystem)
      throw Error("artifact", system + ", as it was compiled for it", kSystem, hint);
    std::string needed;
    for (const Json& word : target["hardware"]["features"].list()) needed += " " + word.text();
    check_features(needed);
  }
};

}  // namespace mhsa
