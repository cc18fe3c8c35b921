// The host as a device to send to: copies are done when they are queued. Knows no
// torch.
#pragma once

#include "transfer/runtime.h"

namespace pyparallel::cpu {

transfer::Runtime* runtime();

}  // namespace pyparallel::cpu
