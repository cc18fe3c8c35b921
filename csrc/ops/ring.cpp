#include "ops/ring.h"

#include <c10/util/Exception.h>

#include "core/ring.h"
#include "ops/snapshot.h"

namespace pyparallel::ops {
namespace {

void take_header(const at::Tensor& header, const Where& where, Snapshot* snapshot) {
  take_snapshot(header, where, snapshot);
  check_slab(*snapshot, where, true);
  check_storage(*snapshot, where);
  const auto past =
      reinterpret_cast<uintptr_t>(snapshot->mutable_data()) % uintptr_t{kRingLine};
  TORCH_CHECK_VALUE(past == 0, where, " must start at a multiple of ", kRingLine,
                    " bytes, but starts ", past, " bytes behind one.");
}

// Returns a formatted ring. `snapshot` keeps its memory alive.
Ring open_ring(const at::Tensor& header, const char* op, Snapshot* snapshot) {
  const Where where{op, "header"};
  take_header(header, where, snapshot);
  const int64_t num_slots = snapshot->nbytes / kRingLine - 1;
  const Ring ring(snapshot->mutable_data(), num_slots);
  const bool good = num_slots >= 1 && num_slots <= kMostRingSlots &&
                    snapshot->nbytes == ring_nbytes(num_slots) && ring.is_formatted();
  TORCH_CHECK_VALUE(good, where, " must be what ring_format makes of ",
                    snapshot->nbytes, " bytes, but is not. Format it first.");
  return ring;
}

void check_holder(int64_t holder, const char* op) {
  TORCH_CHECK_VALUE(holder >= 1, op, ": holder must be 1 or more, but is ", holder,
                    ".");
}

}  // namespace

void format_ring(const at::Tensor& header, int64_t num_slots) {
  const Where where{"ring_format", "header"};
  Snapshot snapshot;
  take_header(header, where, &snapshot);
  TORCH_CHECK_VALUE(num_slots >= 1 && num_slots <= kMostRingSlots,
                    "ring_format: num_slots must be between 1 and ", kMostRingSlots,
                    ", but is ", num_slots, ".");
  TORCH_CHECK_VALUE(snapshot.nbytes == ring_nbytes(num_slots), where, " must have ",
                    ring_nbytes(num_slots), " bytes, ", kRingLine, " and ", kRingLine,
                    " for each of ", num_slots, " slots, but has ", snapshot.nbytes,
                    ".");
  Ring(snapshot.mutable_data(), num_slots).format();
}

int64_t claim_slot(const at::Tensor& header, int64_t holder) {
  Snapshot snapshot;
  Ring ring = open_ring(header, "ring_claim", &snapshot);
  check_holder(holder, "ring_claim");
  return ring.is_native() ? ring.claim(holder) : -1;
}

bool pass_slot(const at::Tensor& header, int64_t slot, int64_t holder, int64_t to) {
  Snapshot snapshot;
  Ring ring = open_ring(header, "ring_pass", &snapshot);
  TORCH_CHECK_VALUE(slot >= 0 && slot < ring.num_slots(),
                    "ring_pass: slot must be between 0 and ", ring.num_slots() - 1,
                    ", but is ", slot, ".");
  check_holder(holder, "ring_pass");
  TORCH_CHECK_VALUE(to >= 0, "ring_pass: to must be 0 or more, but is ", to, ".");
  return ring.pass(slot, holder, to);
}

std::vector<int64_t> reclaim_slots(const at::Tensor& header, int64_t holder) {
  Snapshot snapshot;
  Ring ring = open_ring(header, "ring_reclaim", &snapshot);
  check_holder(holder, "ring_reclaim");
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < ring.num_slots(); ++slot) {
    if (ring.pass(slot, holder, kNoHolder)) slots.push_back(slot);
  }
  return slots;
}

std::vector<int64_t> slot_holders(const at::Tensor& header) {
  Snapshot snapshot;
  const Ring ring = open_ring(header, "ring_holders", &snapshot);
  std::vector<int64_t> holders;
  for (int64_t slot = 0; slot < ring.num_slots(); ++slot) {
    holders.push_back(ring.holder(slot));
  }
  return holders;
}

}  // namespace pyparallel::ops
