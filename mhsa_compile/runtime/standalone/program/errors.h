// What this program refuses, it refuses in four parts.
#pragma once

#include <stdexcept>
#include <string>

namespace mhsa {

// Text of a file or of the command line, with nothing in it that a terminal obeys.
inline std::string printable(const std::string& text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string printable;
  for (unsigned char letter : text) {
    if (letter >= ' ' && letter <= '~') printable += static_cast<char>(letter);
    else printable += {'\\', 'x', kDigits[letter >> 4], kDigits[letter & 15]};
  }
  return printable;
}

// The same, and not endless.
inline std::string shown(const std::string& text) {
  constexpr size_t kMost = 200;
  return printable(text.substr(0, kMost)) + (text.size() > kMost ? "..." : "");
}

inline std::string in_quotes(const std::string& text) { return "'" + shown(text) + "'"; }

// Which argument, what was expected, what came, and what to do next.
struct Error : std::runtime_error {
  Error(const std::string& argument, const std::string& expected, const std::string& got, const std::string& next_step)
      : std::runtime_error(printable(argument + ": expected " + expected + ", got " + got) + ". " + next_step) {}
};

}  // namespace mhsa
