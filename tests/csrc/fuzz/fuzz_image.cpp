// A batch of images from any bytes, by one of the variants for a GPU and by all loops
// of the CPU.
#include "fuzz.h"
#include "image_batch.h"
#include "image_check.h"

namespace pyparallel::testing {

void fuzz(FuzzedNumbers* numbers) {
  ImageRuns runs;
  runs.limits = {numbers->one_of({int64_t{1} << 20, 64, 24, 5})};
  runs.warps = {numbers->between(1, 3)};
  runs.lanes = {static_cast<int>(numbers->one_of({1, 2, 3, 32}))};
  const bool wide = numbers->between(0, 9) == 0;
  const int64_t num = numbers->between(0, 2);
  ImageCase made;
  make_case(&made, numbers, num, wide ? 2 : 4, wide ? 150 : 20);
  check_case(made, numbers, runs);
}

}  // namespace pyparallel::testing
