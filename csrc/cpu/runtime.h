// The host as a target of transfers: copies are done when they are queued. Uses no
// torch.
#pragma once

#include "transfer/runtime.h"

namespace pyparallel::cpu {

transfer::Runtime* runtime();

}  // namespace pyparallel::cpu
