#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pyparallel::ops {

// See core/ring.h. All of them: ValueError unless `header` is a contiguous torch.uint8
// tensor on the CPU at a multiple of 64 bytes and, but for format_ring, what
// format_ring of either backend made. None waits, so none releases the GIL.

void format_ring(const at::Tensor& header, int64_t num_slots);

// -1 too if pure Python formatted the header.
int64_t claim_slot(const at::Tensor& header, int64_t holder);

bool pass_slot(const at::Tensor& header, int64_t slot, int64_t holder, int64_t to);

// The slots that `holder` held until now.
std::vector<int64_t> reclaim_slots(const at::Tensor& header, int64_t holder);

std::vector<int64_t> slot_holders(const at::Tensor& header);

}  // namespace pyparallel::ops
