// The one partition of work over workers.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace pyparallel {

// The share of `worker` when num_items consecutive items go to num_workers workers.
// Shares ascend, cover every item once, and differ by at most one item. Needs
// num_items >= 0 and 0 <= worker < num_workers; no intermediate value can overflow.
inline Rows partition(int64_t num_items, int64_t num_workers, int64_t worker) {
  const int64_t share = num_items / num_workers;
  const int64_t spare = num_items % num_workers;
  const int64_t begin = worker * share + (worker < spare ? worker : spare);
  return {begin, begin + share + (worker < spare ? 1 : 0), 1};
}

}  // namespace pyparallel
