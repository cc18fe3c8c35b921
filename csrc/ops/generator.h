#pragma once

namespace pyparallel::ops {

// From now on, fork() holds the mutex of torch's default CPU generator. A worker sets
// its seed, and would wait for ever for a mutex that another thread held.
void hold_generator_in_forks();

}  // namespace pyparallel::ops
