// Loads the artifact in a folder again and again, calls it and lets it go: whether all calls gave the same bits, and
// what was left behind. Every tenth cycle is a thread's of its own, which ends.
//
//     load_cycles FOLDER CYCLES THREADS
#include <dirent.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "attention.h"

namespace {

const double kMostGrowth = 64;  // MiB

struct Left {
  int threads, files;
  double mebibytes;
};

int entries(const char* folder) {
  DIR* opened = opendir(folder);
  int count = -2;  // . and ..
  while (readdir(opened)) ++count;
  closedir(opened);
  return count;
}

Left left() {
  long all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return {entries("/proc/self/task"), entries("/proc/self/fd"), resident * (sysconf(_SC_PAGE_SIZE) / 1048576.0)};
}

std::string called(const std::string& folder, int threads, const mhsa::Tensors& inputs) {
  mhsa::Attention attention(folder, threads);
  const tvm::ffi::Tensor y = attention(inputs).at("y");
  return std::string(mhsa::data_of(y), mhsa::bytes_of(y));
}

}  // namespace

int main(int, char** words) {
  const std::string folder = words[1];
  const int cycles = std::stoi(words[2]), threads = std::stoi(words[3]);
  const tvm::ffi::Tensor x = mhsa::new_tensor("float32", {1, 128, 64});
  for (int i = 0; i < 128 * 64; ++i) reinterpret_cast<float*>(mhsa::data_of(x))[i] = static_cast<float>(i % 17) / 17;
  const mhsa::Tensors inputs{{"x", x}};
  const std::string expected = called(folder, threads, inputs);
  int wrong = 0;
  const auto cycle = [&] { wrong += called(folder, threads, inputs) != expected; };
  for (int i = 0; i < 20; ++i) std::thread(cycle).join();
  const Left before = left();
  for (int i = 0; i < cycles; ++i) {
    if (i % 10) cycle();
    else std::thread(cycle).join();
  }
  const Left after = left();
  const double grown = after.mebibytes - before.mebibytes;
  std::printf("%d wrong; %+d threads, %+d open files, %+.1f MiB\n", wrong, after.threads - before.threads,
              after.files - before.files, grown);
  return wrong || after.threads > before.threads || after.files != before.files || grown > kMostGrowth;
}
