// A batch through the body of pad-copy, as CPU threads and as CUDA warps run it.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"

namespace pyparallel::testing {

// The variants to run: all combinations.
struct PadRuns {
  std::vector<int64_t> limits{int64_t{1} << 40, 64, 16};  // bytes of a piece of a row
  std::vector<int64_t> threads{1, 2, 3, 7};
  std::vector<int64_t> warps{1, 2, 5};
  std::vector<int> lanes{1, 2, 3, 32};
};

// Also checks the masks and each byte that lanes read. The destination begins `shift`
// bytes after a multiple of 64.
void check_batch(const Batch& batch, int64_t shift, const PadRuns& runs);

}  // namespace pyparallel::testing
