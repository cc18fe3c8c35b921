#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pyparallel::ops {

// See core/ring.h. All functions throw ValueError unless `header` is a contiguous
// torch.uint8 tensor on the CPU, aligned to 64 bytes. All but format_ring require that
// either backend formatted it. They do not wait, so they keep the GIL.

void format_ring(const at::Tensor& header, int64_t num_slots);

// Returns -1 if no slot is free, or if pure Python formatted the header.
int64_t claim_slot(const at::Tensor& header, int64_t holder);

bool pass_slot(const at::Tensor& header, int64_t slot, int64_t holder, int64_t to);

// Frees the slots of `holder` and returns them.
std::vector<int64_t> reclaim_slots(const at::Tensor& header, int64_t holder);

std::vector<int64_t> slot_holders(const at::Tensor& header);

}  // namespace pyparallel::ops
