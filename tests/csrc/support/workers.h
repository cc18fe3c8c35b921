// The workers of a device, one after the other.
#pragma once

#include <cstdint>

#include "core/work.h"

namespace pyparallel::testing {

// CPU threads: consecutive rows, one lane.
template <typename Body>
void run_threads(const Body& body, int64_t num_rows, int64_t num_threads) {
  for (int64_t thread = 0; thread < num_threads; ++thread) {
    body(partition(num_rows, num_threads, thread), Lane{0, 1});
  }
}

// CUDA warps: strided rows, shared by lanes.
template <typename Body>
void run_warps(const Body& body, int64_t num_rows, int64_t num_warps, int num_lanes) {
  for (int64_t warp = 0; warp < num_warps; ++warp) {
    for (int lane = 0; lane < num_lanes; ++lane) {
      body(Rows{warp, num_rows, num_warps}, Lane{lane, num_lanes});
    }
  }
}

}  // namespace pyparallel::testing
