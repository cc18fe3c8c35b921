#include <cstring>

#include "cuda/launch.cuh"
#include "cuda/pack.h"

namespace pyparallel::cuda {
namespace {

// For every lane, the number of words that `move_words` reads before it writes. In a
// small slab each lane has one word, so that the slab occupies the whole GPU.
constexpr int64_t kSmallPiece = kWarpSize * kWordBytes;
constexpr int64_t kLargePiece = kWordsAhead * kSmallPiece;
constexpr int64_t kLargeSlab = 4096 * kSmallPiece;
// The parameters of a launch beside the slots.
constexpr int64_t kOtherBytes = sizeof(Pack) + sizeof(int64_t);
// Every device takes 168 slots, and those with large parameters 1362. Each launch
// copies its parameters, so a small table uses the small size.
constexpr int64_t kFew = (kFewBytes - kOtherBytes) / sizeof(Slot);
constexpr int64_t kMany = (kManyBytes - kOtherBytes) / sizeof(Slot);

// A body and its slots, as parameters of a launch.
template <int64_t kMost>
struct InlinePack {
  Pack body;
  Slot slots[kMost];

  __device__ void operator()(Rows rows, Lane lane) const {
    Pack local = body;
    local.slots = slots;
    local(rows, lane);
  }
};

template <int64_t kMost>
cudaError_t launch_pack(const Pack& part, cudaStream_t stream) {
  static_assert(sizeof(InlinePack<kMost>) + sizeof(int64_t) <=
                (kMost == kFew ? kFewBytes : kManyBytes));
  InlinePack<kMost> body;
  body.body = part;
  memcpy(body.slots, part.slots, static_cast<size_t>(part.num_slots) * sizeof(Slot));
  return launch(body, part.num_pieces(), stream);
}

}  // namespace

cudaError_t pack(const Pack& body, cudaStream_t stream) {
  const bool small = body.end - body.begin < kLargeSlab;
  const int64_t most = body.num_slots > kFew && takes_many_bytes() ? kMany : kFew;
  int64_t first = 0;
  do {
    Pack part = slice(body, first, most);
    part.piece = small ? kSmallPiece : kLargePiece;
    const cudaError_t error = part.num_slots > kFew ? launch_pack<kMany>(part, stream)
                                                    : launch_pack<kFew>(part, stream);
    if (error != cudaSuccess) return error;
    first += most;
  } while (first < body.num_slots);
  return cudaSuccess;
}

}  // namespace pyparallel::cuda
