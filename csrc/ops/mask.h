// The checks of a mask, for all operators that write one.
#pragma once

#include "ops/snapshot.h"

namespace pyparallel::ops {

// Throws TypeError or ValueError unless the mask has bools on the device of `dst`.
void check_mask_kind(const Snapshot& mask, const Snapshot& dst, const Where& where);

// Throws ValueError unless the mask is contiguous and within its storage.
void check_mask_memory(const Snapshot& mask, const Where& where);

// Throws ValueError if the mask overlaps `other`, which messages call `other_where`.
void check_mask_apart(const Snapshot& mask, const Where& where, const Snapshot& other,
                      const Where& other_where);

}  // namespace pyparallel::ops
