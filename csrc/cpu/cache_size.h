#pragma once

#include <cstdint>

namespace pyparallel::cpu {

// Bytes of the last cache that one core can fill; a usual size where nothing says.
int64_t last_cache_bytes();

}  // namespace pyparallel::cpu
