// An image batch over CPU threads. Knows no torch.
#pragma once

#include <cstddef>

#include "core/image/job.h"

namespace pyparallel::cpu {

// The loops come in variants, one for each instruction set; this CPU can run so many.
size_t num_image_variants();

// Cuts no rows, whatever job.batch.pieces says. `variant` 0 is the fastest.
void image_batch(ImageJob job, size_t variant = 0);

}  // namespace pyparallel::cpu
