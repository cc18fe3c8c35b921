#pragma once

#include <cstdint>

namespace pyparallel::cpu {

// Returns the bytes of the last cache that one core can fill, or a default if the
// system does not report them.
int64_t last_cache_bytes();

}  // namespace pyparallel::cpu
