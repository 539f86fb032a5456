// SHA-256, as FIPS 180-4 defines it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

namespace mhsa {

class Sha256 {
 public:
  // In 64 lower-case digits, as manifests have it.
  static std::string of(const std::string& bytes) {
    Sha256 digest;
    digest.add(bytes.data(), bytes.size());
    return digest.digits();
  }

  void add(const char* bytes, size_t size) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes);
    length_ += size;
    if (held_) {
      const size_t more = std::min(kBlock - held_, size);
      std::memcpy(tail_ + held_, data, more);
      held_ += more, data += more, size -= more;
      if (held_ < kBlock) return;
      mix(tail_);
      held_ = 0;
    }
    for (; size >= kBlock; size -= kBlock, data += kBlock) mix(data);
    if (size) std::memcpy(tail_, data, size);
    held_ = size;
  }

  // Of all that was added; the last call.
  std::string digits() {
    std::memset(tail_ + held_, 0, sizeof tail_ - held_);
    tail_[held_] = 0x80;  // what is left, a bit of 1, zeros, and the length in bits
    const size_t end = held_ + 9 <= kBlock ? kBlock : 2 * kBlock;
    for (size_t i = 0; i < 8; ++i) tail_[end - 1 - i] = static_cast<uint8_t>(length_ * 8 >> 8 * i);
    for (size_t i = 0; i < end; i += kBlock) mix(tail_ + i);
    std::string text;
    for (uint32_t word : state_)
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
  }

 private:
  static constexpr size_t kBlock = 64;

  static uint32_t turned(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

  void mix(const uint8_t* block) {
    static constexpr std::array<uint32_t, 64> kRounds = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t words[64];
    for (int i = 0; i < 16; ++i)
      words[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
                 block[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t near = words[i - 2], far = words[i - 15];
      words[i] = words[i - 16] + (turned(far, 7) ^ turned(far, 18) ^ far >> 3) + words[i - 7] +
                 (turned(near, 17) ^ turned(near, 19) ^ near >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int i = 0; i < 64; ++i) {
      const uint32_t first =
          h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
      const uint32_t second = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) state_[i] += mixed[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t tail_[2 * kBlock] = {};  // of a block that is not full yet
  size_t held_ = 0;
  uint64_t length_ = 0;
};

}  // namespace mhsa
