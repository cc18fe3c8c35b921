// Runs a fuzz target without a fuzzer: on the inputs of a folder, then on random ones.
//
//   fuzz_pad_copy tests/csrc/fuzz/corpus/pad_copy 1000
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// A function of the sanitizers; null without one.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*)());

namespace {

constexpr int64_t kLongest = 256;

char current[4096];  // the running input, for the report of a failure

void tell() {
  const char text[] = "\nfailed on the input ";
  static_cast<void>(!write(STDERR_FILENO, text, sizeof(text) - 1));
  static_cast<void>(!write(STDERR_FILENO, current, strlen(current)));
  static_cast<void>(!write(STDERR_FILENO, "\n", 1));
}

void tell_abort(int) { tell(); }

void run(const std::string& name, const std::vector<char>& input) {
  snprintf(current, sizeof(current), "%s", name.c_str());
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::vector<char> read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Runs the inputs in the order of their names and returns their number.
size_t run_folder(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) run(path.string(), read(path));
  return paths.size();
}

void run_random(int seed) {
  Random random(static_cast<uint64_t>(seed));
  std::vector<char> input(static_cast<size_t>(random.between(0, kLongest)));
  for (char& byte : input) byte = static_cast<char>(random.next());
  input.shrink_to_fit();
  run("of seed " + std::to_string(seed), input);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("%s must have a folder and a number of random inputs.\n", argv[0]);
    return 2;
  }
  std::signal(SIGABRT, tell_abort);
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(tell);
  const size_t num_kept = run_folder(argv[1]);
  const int num_random = std::atoi(argv[2]);
  for (int seed = 1; seed <= num_random; ++seed) run_random(seed);
  std::printf("%zu kept and %d random inputs: passed\n", num_kept, num_random);
  return num_kept == 0 ? 1 : 0;
}
