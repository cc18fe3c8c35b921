#include "ops/mask.h"

#include <c10/util/Exception.h>

namespace pyparallel::ops {

void check_mask_kind(const Snapshot& mask, const Snapshot& dst, const Where& where) {
  TORCH_CHECK_TYPE(mask.dtype == c10::kBool, where,
                   " must have dtype torch.bool, but has ", dtype_name(mask.dtype),
                   ".");
  TORCH_CHECK_VALUE(mask.device == dst.device, where, " must be on the device of dst, ",
                    dst.device.str(), ", but is on ", mask.device.str(), ".");
}

void check_mask_memory(const Snapshot& mask, const Where& where) {
  TORCH_CHECK_VALUE(mask.contiguous, where, " must be contiguous, but has strides ",
                    Tuple{mask.strides}, " for shape ", Tuple{mask.sizes}, ".");
  check_storage(mask, where);
}

void check_mask_apart(const Snapshot& mask, const Where& where, const Snapshot& other,
                      const Where& other_where) {
  TORCH_CHECK_VALUE(!overlap(other, mask), where, " must not share memory with ",
                    other_where.argument,
                    other_where.index < 0 ? "" : c10::str("[", other_where.index, "]"),
                    ", but overlaps it. Give it memory of its own.");
}

}  // namespace pyparallel::ops
