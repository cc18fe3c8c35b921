// The loops of core/cast.h, compiled for the instructions of this CPU.
#pragma once

#include <cstddef>

#include "core/cast.h"

namespace pyparallel::cpu {

// The number of variants that this CPU can run. Variant 0 is the fastest.
size_t num_cast_variants();

// Returns the loops of all casts, in their order. That of Cast::kNone is null.
const CastLoop* cast_loops(size_t variant = 0);

}  // namespace pyparallel::cpu
