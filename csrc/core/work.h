// The share of work of one worker: the only facts that a kernel body has about it.
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

// Returns the share of `worker` if num_workers workers divide num_items consecutive
// items. Shares ascend, cover every item once, and differ by at most one item. Requires
// num_items >= 0 and 0 <= worker < num_workers. No intermediate value overflows.
inline Rows partition(int64_t num_items, int64_t num_workers, int64_t worker) {
  const int64_t share = num_items / num_workers;
  const int64_t spare = num_items % num_workers;
  const int64_t begin = worker * share + (worker < spare ? worker : spare);
  return {begin, begin + share + (worker < spare ? 1 : 0), 1};
}

}  // namespace pyparallel
