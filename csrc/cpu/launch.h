// The kernel bodies over CPU threads. Knows no torch.
#pragma once

#include "core/boxes.h"
#include "core/slots.h"

namespace pyparallel::cpu {

void pad_copy(BoxTable table);

// Chooses body.piece itself.
void pack(Pack body);

}  // namespace pyparallel::cpu
