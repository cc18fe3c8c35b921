// An image batch over CPU threads. Knows no torch.
#pragma once

#include "core/image_job.h"

namespace pyparallel::cpu {

// Cuts no rows, whatever job.batch.pieces says.
void image_batch(ImageJob job);

// Whether image_batch writes this one past the caches, as pad_copy does.
bool is_streamed(const ImageJob& job);

}  // namespace pyparallel::cpu
