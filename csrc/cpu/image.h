// An image batch over CPU threads. Knows no torch.
#pragma once

#include <cstddef>

#include "core/image/job.h"

namespace pyparallel::cpu {

// The loops come in kinds, one for each instruction set; this CPU can run so many.
size_t num_image_kinds();

// Cuts no rows, whatever job.batch.pieces says. `kind` 0 is the fastest.
void image_batch(ImageJob job, size_t kind = 0);

}  // namespace pyparallel::cpu
