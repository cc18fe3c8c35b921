// A batch of images through the bodies of an image batch, as CPU threads and as CUDA
// warps run them.
#pragma once

#include <cstdint>
#include <vector>

#include "image_batch.h"

namespace pyparallel::testing {

// The variants to run: all combinations, and every loop of the CPU.
struct ImageRuns {
  std::vector<int64_t> limits{int64_t{1} << 20, 512, 24, 5};  // values of a piece
  std::vector<int64_t> warps{1, 3};
  std::vector<int> lanes{1, 2, 3, 32};
};

// The offsets of destination and mask from a multiple of 64. Below 0: no mask.
struct ImagePlaces {
  int64_t dst;
  int64_t mask;
};

void check_images(const ImageCase& made, ImagePlaces places, const ImageRuns& runs);

template <typename Numbers>
void check_case(const ImageCase& made, Numbers* random, const ImageRuns& runs) {
  const bool masked = random->between(0, 1) == 0;
  const int64_t shift = random->between(0, 20) * made.value_nbytes;
  const int64_t mask_shift = random->between(0, 20);
  check_images(made, {shift, masked ? mask_shift : -1}, runs);
}

}  // namespace pyparallel::testing
