// What this CPU is and has, in the words of LLVM and of /proc/cpuinfo, which are those of an artifact's manifest. The CPU
// or the auxiliary vector is asked.
#pragma once

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <set>
#include <sstream>
#include <string>

namespace mhsa {

// As triples of Zig's name it.
#if defined(_WIN32)
constexpr const char* kSystem = "windows";
#elif defined(__APPLE__)
constexpr const char* kSystem = "macos";
#else
constexpr const char* kSystem = "linux";
#endif

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

#if defined(__APPLE__) && defined(__aarch64__)
// macOS 12 and later tell each by a name of Arm's. As hardware/mac_cpu.py has them.
struct AppleFeature {
  const char *word, *name;
};
constexpr AppleFeature kAppleFeatures[] = {
    {"fp", "hw.optional.floatingpoint"}, {"asimd", "hw.optional.arm64"}, {"crc32", "hw.optional.armv8_crc32"},
    {"atomics", "hw.optional.arm.FEAT_LSE"}, {"fphp", "hw.optional.arm.FEAT_FP16"}, {"asimdhp", "hw.optional.arm.FEAT_FP16"},
    {"asimdrdm", "hw.optional.arm.FEAT_RDM"}, {"jscvt", "hw.optional.arm.FEAT_JSCVT"}, {"fcma", "hw.optional.arm.FEAT_FCMA"},
    {"lrcpc", "hw.optional.arm.FEAT_LRCPC"}, {"ilrcpc", "hw.optional.arm.FEAT_LRCPC2"}, {"sha3", "hw.optional.arm.FEAT_SHA3"},
    {"asimddp", "hw.optional.arm.FEAT_DotProd"}, {"asimdfhm", "hw.optional.arm.FEAT_FHM"}, {"uscat", "hw.optional.arm.FEAT_LSE2"},
    {"flagm", "hw.optional.arm.FEAT_FlagM"}, {"flagm2", "hw.optional.arm.FEAT_FlagM2"}, {"frint", "hw.optional.arm.FEAT_FRINTTS"},
    {"i8mm", "hw.optional.arm.FEAT_I8MM"}, {"bf16", "hw.optional.arm.FEAT_BF16"},
};

inline std::set<std::string> cpu_features() {
  std::set<std::string> features;
  for (const AppleFeature& one : kAppleFeatures) {
    int has = 0;
    size_t size = sizeof has;
    if (!sysctlbyname(one.name, &has, &size, nullptr, 0) && has) features.insert(one.word);
  }
  return features;
}
#elif defined(__aarch64__) || defined(__arm__) || defined(__riscv)
// From the auxiliary vector, bit by bit (arch/*/include/uapi/asm/hwcap.h of Linux): emulators show it rightly, and not
// always the file.
#if defined(__aarch64__)
constexpr const char* kFirst =
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg";
constexpr const char* kSecond =
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 "
    "dgh rng bti mte";
#elif defined(__riscv)
constexpr const char* kFirst = "a b c d e f g h i j k l m n o p q r s t u v w x y z";
constexpr const char* kSecond = "";
#else
constexpr const char* kFirst =
    "swp half thumb 26bit fastmult fpa vfp edsp java iwmmxt crunch thumbee neon vfpv3 vfpv3d16 tls vfpv4 idiva idivt "
    "vfpd32 lpae evtstrm";
constexpr const char* kSecond = "aes pmull sha1 sha2 crc32";
#endif

inline void add_features(std::set<std::string>& features, const char* names, unsigned long bits) {
  std::istringstream words(names);
  for (std::string name; words >> name; bits >>= 1)
    if (bits & 1) features.insert(name);
}

inline std::set<std::string> cpu_features() {
  std::set<std::string> features;
  add_features(features, kFirst, getauxval(AT_HWCAP));
  add_features(features, kSecond, getauxval(AT_HWCAP2));
  return features;
}
#elif defined(__x86_64__)
// Asked of the CPU itself, bit by bit: {leaf, subleaf, register (EAX to EDX), bit, word, the state in XCR0 that the system
// must save for it}. As hardware/cpuid.py has them, whose words a manifest takes.
struct X86Feature {
  unsigned leaf, subleaf, place, bit;
  const char* word;
  unsigned state;
};
enum : unsigned { kEax, kEbx, kEcx, kEdx };
constexpr unsigned kSse = 0b10, kAvx = 0b110, kAvx512 = 0b11100110, kTiles = 0b11 << 17, kAmd = 1u << 31 | 1;
constexpr X86Feature kX86Features[] = {
    {1, 0, kEcx, 0, "pni", 0}, {1, 0, kEcx, 1, "pclmulqdq", 0}, {1, 0, kEcx, 9, "ssse3", 0}, {1, 0, kEcx, 12, "fma", kAvx},
    {1, 0, kEcx, 13, "cx16", 0}, {1, 0, kEcx, 19, "sse4_1", 0}, {1, 0, kEcx, 20, "sse4_2", 0}, {1, 0, kEcx, 22, "movbe", 0},
    {1, 0, kEcx, 23, "popcnt", 0}, {1, 0, kEcx, 25, "aes", 0}, {1, 0, kEcx, 26, "xsave", kSse}, {1, 0, kEcx, 28, "avx", kAvx},
    {1, 0, kEcx, 29, "f16c", kAvx}, {1, 0, kEcx, 31, "hypervisor", 0}, {1, 0, kEdx, 0, "fpu", 0}, {1, 0, kEdx, 4, "tsc", 0},
    {1, 0, kEdx, 8, "cx8", 0}, {1, 0, kEdx, 15, "cmov", 0}, {1, 0, kEdx, 19, "clflush", 0}, {1, 0, kEdx, 23, "mmx", 0},
    {1, 0, kEdx, 24, "fxsr", 0}, {1, 0, kEdx, 25, "sse", 0}, {1, 0, kEdx, 26, "sse2", 0}, {7, 0, kEbx, 0, "fsgsbase", 0},
    {7, 0, kEbx, 3, "bmi1", 0}, {7, 0, kEbx, 5, "avx2", kAvx}, {7, 0, kEbx, 8, "bmi2", 0}, {7, 0, kEbx, 9, "erms", 0},
    {7, 0, kEbx, 16, "avx512f", kAvx512}, {7, 0, kEbx, 17, "avx512dq", kAvx512}, {7, 0, kEbx, 19, "adx", 0},
    {7, 0, kEbx, 21, "avx512ifma", kAvx512}, {7, 0, kEbx, 23, "clflushopt", 0}, {7, 0, kEbx, 24, "clwb", 0},
    {7, 0, kEbx, 26, "avx512pf", kAvx512}, {7, 0, kEbx, 27, "avx512er", kAvx512}, {7, 0, kEbx, 28, "avx512cd", kAvx512},
    {7, 0, kEbx, 29, "sha_ni", 0}, {7, 0, kEbx, 30, "avx512bw", kAvx512}, {7, 0, kEbx, 31, "avx512vl", kAvx512},
    {7, 0, kEcx, 1, "avx512vbmi", kAvx512}, {7, 0, kEcx, 6, "avx512_vbmi2", kAvx512}, {7, 0, kEcx, 8, "gfni", 0},
    {7, 0, kEcx, 9, "vaes", kAvx}, {7, 0, kEcx, 10, "vpclmulqdq", kAvx}, {7, 0, kEcx, 11, "avx512_vnni", kAvx512},
    {7, 0, kEcx, 12, "avx512_bitalg", kAvx512}, {7, 0, kEcx, 14, "avx512_vpopcntdq", kAvx512},
    {7, 0, kEcx, 27, "movdiri", 0}, {7, 0, kEcx, 28, "movdir64b", 0}, {7, 0, kEdx, 2, "avx512_4vnniw", kAvx512},
    {7, 0, kEdx, 3, "avx512_4fmaps", kAvx512}, {7, 0, kEdx, 4, "fsrm", 0}, {7, 0, kEdx, 8, "avx512_vp2intersect", kAvx512},
    {7, 0, kEdx, 14, "serialize", 0}, {7, 0, kEdx, 22, "amx_bf16", kTiles}, {7, 0, kEdx, 23, "avx512_fp16", kAvx512},
    {7, 0, kEdx, 24, "amx_tile", kTiles}, {7, 0, kEdx, 25, "amx_int8", kTiles}, {7, 1, kEax, 4, "avx_vnni", kAvx},
    {7, 1, kEax, 5, "avx512_bf16", kAvx512}, {7, 1, kEax, 21, "amx_fp16", kTiles}, {7, 1, kEax, 23, "avx_ifma", kAvx},
    {kAmd, 0, kEcx, 0, "lahf_lm", 0}, {kAmd, 0, kEcx, 5, "abm", 0}, {kAmd, 0, kEcx, 6, "sse4a", 0},
    {kAmd, 0, kEcx, 7, "misalignsse", 0}, {kAmd, 0, kEcx, 8, "3dnowprefetch", 0}, {kAmd, 0, kEcx, 11, "xop", kAvx},
    {kAmd, 0, kEcx, 16, "fma4", kAvx}, {kAmd, 0, kEcx, 21, "tbm", 0}, {kAmd, 0, kEdx, 27, "rdtscp", 0},
    {kAmd, 0, kEdx, 29, "lm", 0},
};

// The bits of XCR0, 0 where the system does not use XSAVE.
inline unsigned long long saved_state() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<unsigned long long>(high) << 32 | low;
}

inline std::set<std::string> cpu_features() {
  const unsigned long long saved = saved_state();
  std::set<std::string> features;
  for (const X86Feature& one : kX86Features) {
    unsigned registers[4] = {}, most_subleaf = 0, b, c, d;
    if (one.subleaf && (!__get_cpuid_count(one.leaf, 0, &most_subleaf, &b, &c, &d) || most_subleaf < one.subleaf)) continue;
    if (!__get_cpuid_count(one.leaf, one.subleaf, &registers[0], &registers[1], &registers[2], &registers[3])) continue;
    if (registers[one.place] >> one.bit & 1 && (saved & one.state) == one.state) features.insert(one.word);
  }
  return features;
}
#endif

}  // namespace mhsa
