// What is demanded of a mask of where data are, whatever makes it.
#pragma once

#include "ops/snapshot.h"

namespace pyparallel::ops {

// TypeError or ValueError unless these are bools on the device of `dst`.
void check_mask_kind(const Snapshot& mask, const Snapshot& dst, const Where& where);

// ValueError unless it is contiguous, and lies within its storage.
void check_mask_memory(const Snapshot& mask, const Where& where);

// ValueError when it overlaps another snapshot, named `other_where`.
void check_mask_apart(const Snapshot& mask, const Where& where, const Snapshot& other,
                      const Where& other_where);

}  // namespace pyparallel::ops
