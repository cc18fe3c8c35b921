// A ragged batch from any bytes, by one of the variants of a pad-copy.
#include "batch.h"
#include "fuzz.h"
#include "pad_copy_check.h"

namespace pyparallel::testing {

constexpr int64_t kMostElements =
    256;  // of a sample: more inputs instead of larger ones

// The variant precedes the batch in the input, so that each can change alone.
void fuzz(FuzzedNumbers* numbers) {
  PadRuns runs;
  runs.limits = {numbers->one_of({int64_t{1} << 40, 16, 48, 64})};
  if (numbers->between(0, 1) == 0) {
    runs.threads = {numbers->between(1, 7)};
    runs.warps.clear();
  } else {
    runs.threads.clear();
    runs.warps = {numbers->between(1, 3)};
    runs.lanes = {static_cast<int>(numbers->one_of({1, 2, 3, 32}))};
  }
  const int64_t shift = numbers->between(0, 63);
  const Batch batch = make_any_batch(numbers, kMostElements);
  const int64_t itemsize = batch.shapes.itemsize;
  check_batch(batch, shift / itemsize * itemsize, runs);
}

}  // namespace pyparallel::testing
