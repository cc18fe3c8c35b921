// The entry of libFuzzer and fuzz_replay.cpp. A failed check ends the process.
#include <cstdlib>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pyparallel::testing::FuzzedNumbers numbers(data, size);
  pyparallel::testing::fuzz(&numbers);
  if (num_failures > 0) std::abort();
  return 0;
}
