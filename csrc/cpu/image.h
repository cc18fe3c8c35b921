// An image batch over CPU threads. Uses no torch.
#pragma once

#include <cstddef>

#include "core/image/job.h"

namespace pyparallel::cpu {

// Returns the number of variants of the loops that this CPU can run: one per
// instruction set.
size_t num_image_variants();

// Ignores job.batch.pieces and cuts no rows. Variant 0 is the fastest.
void image_batch(ImageJob job, size_t variant = 0);

}  // namespace pyparallel::cpu
