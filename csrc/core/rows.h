// All that a kernel body knows of the worker that runs it.
#pragma once

#include <cstdint>

namespace pyparallel {

// The rows begin, begin + step, ... below end. A CPU thread gets {b, e, 1}, a CUDA
// warp {warp, num_rows, num_warps}.
struct Rows {
  int64_t begin;
  int64_t end;
  int64_t step;
};

// One of `count` workers that share each row: {0, 1} on the CPU, {lane, 32} in a warp.
struct Lane {
  int index;
  int count;
};

}  // namespace pyparallel
