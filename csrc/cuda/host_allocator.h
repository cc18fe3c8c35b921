// The copies that torch queues from and to memory of the host.
#pragma once

#include "transfer/runtime.h"

namespace pyparallel::cuda {

// Shows the observer each copy of torch whose memory on the host torch did not
// allocate. The observer must live as long as the process. Returns false if this torch
// offers no way: see Note: [host allocator]. To be called once.
bool observe_copies(transfer::CopyObserver* observer);

}  // namespace pyparallel::cuda
