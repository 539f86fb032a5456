// Dims of a signature: a size, the name of one, or an expression of names, such as "P + S".
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace mhsa {

using Sizes = std::map<std::string, int64_t>;

inline bool is_number(const std::string& dim) { return dim.find_first_not_of("0123456789") == std::string::npos; }

// What + - * // and brackets make of names and numbers, by Python's rules.
class Expression {
 public:
  using Size = std::optional<int64_t>;  // none where a name has no size, and beyond 64 bits

  Expression(const std::string& text, const Sizes& sizes) : text_(text), sizes_(sizes), value_(sum()) {
    sound_ = sound_ && at_ == text_.size();
  }

  // Whether the text is one; "L" and "c/d" are names.
  bool composed() const { return sound_ && composed_; }
  Size value() const { return value_; }

 private:
  Size sum() {
    Size left = product();
    while (true) {
      if (taken("+")) left = made('+', left, product());
      else if (taken("-")) left = made('-', left, product());
      else return left;
    }
  }

  Size product() {
    Size left = factor();
    while (true) {
      if (taken("//")) left = made('/', left, factor());
      else if (taken("*")) left = made('*', left, factor());
      else return left;
    }
  }

  Size factor() {
    if (taken("(")) {
      const Size inner = sum();
      sound_ = taken(")") && sound_;
      return inner;
    }
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_')) ++at_;
    const std::string word = text_.substr(begin, at_ - begin);
    taken("");  // the spaces behind it
    if (is_number(word)) {
      sound_ = sound_ && !word.empty() && word.size() < 19;
      return sound_ ? Size(std::stoll(word)) : std::nullopt;
    }
    const auto entry = sizes_.find(word);
    return entry == sizes_.end() ? std::nullopt : Size(entry->second);
  }

  Size made(char sign, Size left, Size right) {
    composed_ = true;
    if (!left || !right) return std::nullopt;
    int64_t value = 0;
    bool beyond = false;
    if (sign == '+') beyond = __builtin_add_overflow(*left, *right, &value);
    else if (sign == '-') beyond = __builtin_sub_overflow(*left, *right, &value);
    else if (sign == '*') beyond = __builtin_mul_overflow(*left, *right, &value);
    else if (*right < 1) beyond = true;
    else value = *left / *right - (*left % *right < 0);
    return beyond ? std::nullopt : Size(value);
  }

  // Whether these letters come next; then they are behind us, and the spaces as well.
  bool taken(const std::string& letters) {
    if (text_.compare(at_, letters.size(), letters)) return false;
    at_ = std::min(text_.find_first_not_of(' ', at_ + letters.size()), text_.size());
    return true;
  }

  const std::string& text_;
  const Sizes& sizes_;
  size_t at_ = 0;
  bool sound_ = true, composed_ = false;
  Size value_;
};

// The size of a dim; none where one of its names has none.
inline std::optional<int64_t> size_of(const std::string& dim, const Sizes& sizes) {
  if (is_number(dim)) return std::stoll(dim);
  if (const auto entry = sizes.find(dim); entry != sizes.end()) return entry->second;
  const Expression expression(dim, sizes);
  return expression.composed() ? expression.value() : std::nullopt;
}

inline bool is_symbol(const std::string& dim) { return !is_number(dim) && !Expression(dim, {}).composed(); }

}  // namespace mhsa
