// Runs the kernel bodies on CPU threads. Uses no torch.
#pragma once

#include "core/boxes.h"
#include "core/pack.h"

namespace pyparallel::cpu {

// Fills a mask of the data too if `mask` has boxes.
void pad_copy(BoxTable table, BoxTable mask);

// Returns true if pad_copy writes this table past the caches: its destination is larger
// than half of the last cache, because the sources need room too, and its rows are
// long.
bool is_nontemporal(const BoxTable& table);

// Sets body.piece.
void pack(Pack body);

}  // namespace pyparallel::cpu
