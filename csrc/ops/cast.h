#pragma once

#include <c10/core/ScalarType.h>

#include "core/cast.h"

namespace pyparallel::ops {

// Returns the cast that a copy to host memory can make on its way, or kNone. The pairs
// are those of CASTS in backend/plain.py.
inline Cast cast_of(c10::ScalarType from, c10::ScalarType to) {
  using c10::ScalarType;
  if (from == ScalarType::Float) {
    if (to == ScalarType::Half) return Cast::kFloatToHalf;
    if (to == ScalarType::BFloat16) return Cast::kFloatToBFloat16;
  } else if (from == ScalarType::Double) {
    if (to == ScalarType::Half) return Cast::kDoubleToHalf;
    if (to == ScalarType::BFloat16) return Cast::kDoubleToBFloat16;
    if (to == ScalarType::Float) return Cast::kDoubleToFloat;
  }
  return Cast::kNone;
}

}  // namespace pyparallel::ops
