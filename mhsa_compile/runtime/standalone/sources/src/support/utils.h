#pragma once
#include <algorithm>
#include <cctype>
#include <string>

namespace tvm::support {

inline bool IsNumber(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
}

}  // namespace tvm::support
