// Copies, events and page-locked memory of CUDA.
#pragma once

#include "transfer/runtime.h"

namespace pyparallel::cuda {

transfer::Runtime* runtime();

}  // namespace pyparallel::cuda
