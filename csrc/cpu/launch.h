// The kernel bodies over CPU threads. Knows no torch.
#pragma once

#include "core/boxes.h"
#include "core/pack.h"

namespace pyparallel::cpu {

// `mask` marks where there is data; without boxes, none is made.
void pad_copy(BoxTable table, BoxTable mask);

// Whether pad_copy writes this table past the caches: its destination is larger than
// half of the last cache, in which the sources need room too, and its rows are long.
bool is_nontemporal(const BoxTable& table);

// Chooses body.piece itself.
void pack(Pack body);

}  // namespace pyparallel::cpu
