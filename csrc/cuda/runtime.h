// Copies, events and pinned memory of CUDA.
#pragma once

#include "transfer/runtime.h"

namespace pyparallel::cuda {

transfer::Runtime* runtime();

}  // namespace pyparallel::cuda
