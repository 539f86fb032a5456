// JSON by TVM's own parser, read into types: every value knows its place, and says so where it is something else.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "errors.h"

namespace mhsa {

class Json {
 public:
  // `argument` is what messages call the whole.
  static Json parse(const std::string& argument, const std::string& text) {
    constexpr int kDeepest = 64, kMostMiB = 16;
    const std::string fault = text.size() >> 20 >= kMostMiB ? "more than " + std::to_string(kMostMiB) + " MiB of it"
                              : !is_utf8(text)              ? "bytes that are no UTF-8"
                              : depth(text) > kDeepest ? "brackets more than " + std::to_string(kDeepest) + " deep"
                                                       : "";
    if (!fault.empty()) throw Error(argument, "JSON", fault, kHint);
    try {
      const ffi::Any value = call(global("ffi.json.Parse"), ffi::String(text));
      const std::string twice = repeated_name(text);
      if (!twice.empty()) throw Error(argument, "JSON whose objects name each entry once", twice + " twice", kHint);
      return Json(argument, "", value);
    } catch (const ffi::Error& error) {
      throw Error(argument, "JSON", in_quotes(error.message()), kHint);
    }
  }

  std::string text() const { return as<ffi::String>("a text"); }
  bool truth() const { return as<bool>("true or false"); }

  // A whole number from 0 on.
  int64_t size() const {
    const int64_t number = as<int64_t>("a whole number from 0 on");
    if (number < 0) refuse("a whole number from 0 on", std::to_string(number));
    return number;
  }

  bool is_text() const { return value_.as<ffi::String>().has_value(); }
  bool is_null() const { return value_ == nullptr; }

  std::vector<Json> list() const {
    std::vector<Json> entries;
    for (const ffi::Any& entry : as<ffi::Array<ffi::Any>>("a list"))
      entries.push_back(Json(argument_, place_ + "[" + std::to_string(entries.size()) + "]", entry));
    return entries;
  }

  std::map<std::string, Json> members() const {
    std::map<std::string, Json> members;
    for (const auto& [key, value] : as<ffi::Map<ffi::Any, ffi::Any>>("an object")) {
      const std::string name = key.cast<ffi::String>();
      members.emplace(name, Json(argument_, place_ + "." + name, value));
    }
    return members;
  }

  Json operator[](const char* key) const {
    const auto object = as<ffi::Map<ffi::Any, ffi::Any>>("an object");
    const ffi::Any name = ffi::String(key);
    if (!object.count(name)) refuse(std::string("a member ") + key, "none");
    return Json(argument_, place_ + "." + key, object.at(name));
  }

  bool has(const char* key) const {
    return as<ffi::Map<ffi::Any, ffi::Any>>("an object").count(ffi::Any(ffi::String(key)));
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw Error(argument_ + (place_.empty() ? "" : ", " + in_quotes(place_.substr(place_[0] == '.'))), expected, got, kHint);
  }

 private:
  static constexpr const char* kHint = "The file is damaged, or no file of this kind: bring it again.";

  Json(std::string argument, std::string place, ffi::Any value)
      : argument_(std::move(argument)), place_(std::move(place)), value_(std::move(value)) {}

  template <typename Type>
  Type as(const char* expected) const {
    if (auto content = value_.as<Type>()) return *std::move(content);
    refuse(expected, "something else");
  }

  // The parser descends by recursion, without a limit of its own.
  static int depth(const std::string& text) {
    int now = 0, deepest = 0;
    bool inside = false;  // of a string
    for (size_t i = 0; i < text.size(); ++i) {
      const char letter = text[i];
      if (letter == '"') inside = !inside;
      else if (inside) i += letter == '\\';
      else if (letter == '[' || letter == '{') deepest = std::max(deepest, ++now);
      else if (letter == ']' || letter == '}') --now;
    }
    return deepest;
  }

  // The first name, in quotes as it is written, that an object has twice; empty where there is none. The text is JSON.
  static std::string repeated_name(const std::string& text) {
    struct Open {
      bool is_object;
      std::set<std::string> names;
    };
    std::vector<Open> open;
    bool name_comes = false;
    for (size_t i = 0; i < text.size(); ++i) {
      const char letter = text[i];
      if (letter == '{' || letter == '[') {
        open.push_back({letter == '{', {}});
        name_comes = letter == '{';
      } else if (letter == '}' || letter == ']') {
        open.pop_back();
        name_comes = false;
      } else if (letter == ',') {
        name_comes = !open.empty() && open.back().is_object;
      } else if (letter == '"') {
        const size_t begin = i++;
        while (text[i] != '"') i += text[i] == '\\' ? 2 : 1;
        if (!std::exchange(name_comes, false)) continue;
        const std::string written = text.substr(begin, i + 1 - begin);  // an escape may spell the same name
        const std::string name = call(global("ffi.json.Parse"), ffi::String(written)).cast<ffi::String>();
        if (!open.back().names.insert(name).second) return written;
      }
    }
    return "";
  }

  static bool is_utf8(const std::string& text) {
    for (size_t i = 0; i < text.size();) {
      const auto byte = [&](size_t at) -> uint32_t { return at < text.size() ? static_cast<uint8_t>(text[at]) : 0; };
      const uint32_t first = byte(i++);
      if (first < 0x80) continue;
      const int more = first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : first >> 3 == 30 ? 3 : 0;
      uint32_t point = first & (0x3f >> more);
      for (int j = 0; j < more; ++j, ++i) {
        if (byte(i) >> 6 != 2) return false;
        point = point << 6 | (byte(i) & 0x3f);
      }
      constexpr uint32_t kLeast[] = {UINT32_MAX, 0x80, 0x800, 0x10000};  // longer forms are none
      if (point < kLeast[more] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff)) return false;
    }
    return true;
  }

  std::string argument_, place_;
  ffi::Any value_;
};

// A text as JSON has it.
inline std::string json_text(const std::string& text) {
  std::string quoted = "\"";
  for (unsigned char letter : text) {
    char code[8];
    if (letter < ' ') std::snprintf(code, sizeof code, "\\u%04x", letter), quoted += code;
    else if (letter == '"' || letter == '\\') quoted += '\\', quoted += static_cast<char>(letter);
    else quoted += static_cast<char>(letter);
  }
  return quoted + '"';
}

}  // namespace mhsa
