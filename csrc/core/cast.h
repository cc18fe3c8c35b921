// Casts of floating-point numbers to smaller dtypes, as Tensor.to makes them: rounded
// to the nearest number, ties to even, with overflow to infinity. NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/host_device.h"
#include "core/image/math.h"

namespace pyparallel {

enum class Cast : uint8_t {
  kNone,
  kFloatToHalf,
  kFloatToBFloat16,
  kDoubleToHalf,
  kDoubleToBFloat16,
  kDoubleToFloat,
};

constexpr size_t kNumCasts = 6;

// Returns the number of source bytes for each byte of the result.
inline int64_t source_ratio(Cast cast) {
  if (cast == Cast::kNone) return 1;
  return cast == Cast::kDoubleToHalf || cast == Cast::kDoubleToBFloat16 ? 4 : 2;
}

// Casts `num` numbers. No alignment is needed.
using CastLoop = void (*)(uint8_t* to, const uint8_t* from, int64_t num);

template <typename Source, typename Value>
PP_HOST_INLINE void cast_loop(uint8_t* __restrict__ to,
                              const uint8_t* __restrict__ from, int64_t num) {
  for (int64_t i = 0; i < num; ++i) {
    Source source;
    memcpy(&source, from + i * static_cast<int64_t>(sizeof(source)), sizeof(source));
    // torch, too, rounds a double to a float first.
    const Value value = HostMath::round(static_cast<float>(source), Value{});
    memcpy(to + i * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
  }
}

// Calls visit(Source{}, Value{}) with the types of a cast; not for kNone.
template <typename Visit>
auto visit_cast(Cast cast, const Visit& visit) {
  switch (cast) {
    case Cast::kFloatToHalf:
      return visit(float{}, Half{});
    case Cast::kFloatToBFloat16:
      return visit(float{}, BFloat16{});
    case Cast::kDoubleToHalf:
      return visit(double{}, Half{});
    case Cast::kDoubleToBFloat16:
      return visit(double{}, BFloat16{});
    default:
      return visit(double{}, float{});
  }
}

// A RowWriter (core/pad_copy.h) that casts its sources. `Writer` writes the results.
template <typename Writer>
class CastWriter : public Writer {
 public:
  static constexpr bool kCasts = true;

  // `loops` are those of all casts, in their order; that of kNone is null.
  explicit CastWriter(const CastLoop* loops, Cast cast = Cast::kNone) : loops_(loops) {
    use(cast);
  }

  // Sets the cast of the next copies.
  void use(Cast cast) {
    loop_ = loops_[static_cast<size_t>(cast)];
    ratio_ = source_ratio(cast);
    const bool is_wide = cast == Cast::kDoubleToFloat;
    itemsize_ = is_wide ? sizeof(float) : sizeof(uint16_t);
  }

  const uint8_t* source(const uint8_t* first, const uint8_t* at) const {
    return first + (at - first) * ratio_;
  }

  void copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    if (loop_ == nullptr) {
      Writer::copy(to, from, nbytes);
      return;
    }
    // The numbers stay in the first-level cache.
    alignas(64) uint8_t cast[kBlockBytes];
    for (int64_t done = 0; done < nbytes; done += kBlockBytes) {
      const int64_t count = lesser(kBlockBytes, nbytes - done);
      loop_(cast, from + done * ratio_, count / itemsize_);
      Writer::copy(to + done, cast, count);
    }
  }

 private:
  static constexpr int64_t kBlockBytes = 4096;

  const CastLoop* loops_;
  CastLoop loop_ = nullptr;
  int64_t ratio_ = 1;
  int64_t itemsize_ = 1;
};

}  // namespace pyparallel
