// What this CPU is and has, in the words of LLVM and of /proc/cpuinfo, which are those of an artifact's manifest.
#pragma once

#include <sys/auxv.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace mhsa {

#if defined(__x86_64__)
constexpr const char* kArchitecture = "x86_64";
#elif defined(__aarch64__)
constexpr const char* kArchitecture = "aarch64";
#elif defined(__arm__)
constexpr const char* kArchitecture = "armv7";
#elif defined(__riscv) && __riscv_xlen == 64
constexpr const char* kArchitecture = "riscv64";
#else
#error "an architecture that nobody has tried"
#endif

#if defined(__aarch64__) || defined(__arm__)
// From the auxiliary vector, bit by bit (arch/*/include/uapi/asm/hwcap.h of Linux): emulators show it rightly, and not
// always the file.
#if defined(__aarch64__)
constexpr const char* kFirst =
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg";
constexpr const char* kSecond =
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 "
    "dgh rng bti mte";
#else
constexpr const char* kFirst =
    "swp half thumb 26bit fastmult fpa vfp edsp java iwmmxt crunch thumbee neon vfpv3 vfpv3d16 tls vfpv4 idiva idivt "
    "vfpd32 lpae evtstrm";
constexpr const char* kSecond = "aes pmull sha1 sha2 crc32";
#endif

inline void add_features(std::set<std::string>& found, const char* names, unsigned long bits) {
  std::istringstream words(names);
  for (std::string name; words >> name; bits >>= 1)
    if (bits & 1) found.insert(name);
}

inline std::set<std::string> cpu_features() {
  std::set<std::string> found;
  add_features(found, kFirst, getauxval(AT_HWCAP));
  add_features(found, kSecond, getauxval(AT_HWCAP2));
  return found;
}
#else
inline std::set<std::string> cpu_features() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> found;
    for (std::string name; words >> name;) found.insert(name);
    return found;
  }
  return {};
}
#endif

}  // namespace mhsa
