// The kernel bodies over CPU threads. Knows no torch.
#pragma once

#include "core/boxes.h"
#include "core/slots.h"

namespace pyparallel::cpu {

// `mask` marks where there is data; without boxes, none is made.
void pad_copy(BoxTable table, BoxTable mask);

// Chooses body.piece itself.
void pack(Pack body);

}  // namespace pyparallel::cpu
