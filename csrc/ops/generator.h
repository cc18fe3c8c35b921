#pragma once

#include <chrono>

namespace pyparallel::ops {

// Locks the mutex of torch's default CPU generator. Returns false if another thread
// still holds it after that time.
bool lock_generator(std::chrono::duration<double> timeout);

// Unlocks it, in the thread that locked it or in the only thread of its forked child.
void unlock_generator();

}  // namespace pyparallel::ops
