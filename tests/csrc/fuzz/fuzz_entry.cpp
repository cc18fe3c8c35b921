// What libFuzzer, or fuzz_replay.cpp, calls: a check that fails ends the process.
#include <cstdlib>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pyparallel::testing::FuzzedNumbers numbers(data, size);
  pyparallel::testing::fuzz(&numbers);
  if (num_failures > 0) std::abort();
  return 0;
}
