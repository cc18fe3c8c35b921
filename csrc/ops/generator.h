#pragma once

namespace pyparallel::ops {

// Makes fork() hold the mutex of torch's default CPU generator from now on. A forked
// worker sets the seed. It would wait for ever if another thread held the mutex.
void hold_generator_in_forks();

}  // namespace pyparallel::ops
