// Tensors as they were at one moment.
//
// Note: [read once]
// While a copy runs without the GIL another thread may call set_() or resize_() on the
// tensors it was given. A snapshot therefore holds the storage itself, and sizes that
// were read once and checked against that storage; nothing asks the tensor again.
// Resizing the storage object in place during a copy (untyped_storage().resize_(), or a
// resize_() to more than it holds) frees memory that is being read. That is outside
// this promise, as it is for torch's own operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/DimVector.h>

#include <cstdint>

#include "ops/backend.h"
#include "ops/error_format.h"

namespace pyparallel::ops {

struct Snapshot {
  c10::Storage storage;
  c10::DimVector sizes;
  c10::DimVector strides;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;
  int64_t itemsize = 0;
  int64_t offset = 0;  // bytes from the start of the storage
  int64_t nbytes = 0;  // as if contiguous
  bool contiguous = false;
  // A private alias of a tensor that is not contiguous; shares no sizes with it.
  at::Tensor strided;

  // Where the elements are, from the first byte on; null when there are none. Only of
  // snapshots without gaps, such as contiguous ones.
  const uint8_t* data() const;
  uint8_t* mutable_data() const;
};

// Tensors that the caller keeps alive. Even a short-lived reference of our own would
// cost more than all that is read of a tensor: it involves its Python object.
using TensorRefs = c10::ArrayRef<const at::Tensor*>;

// Whether the bytes of a tensor are simply its elements: strided, with a storage of its
// own and no pending conjugation or negation.
bool is_plain(const at::Tensor& tensor);

// TypeError, saying why, unless is_plain(tensor).
void check_plain(const at::Tensor& tensor, const Where& where);

// Whether the storage holds all `nbytes` of a plain contiguous tensor.
bool holds(const at::Tensor& tensor, int64_t nbytes);

// Reads `tensor` into a fresh snapshot. TypeError unless it is plain. Does not look
// at the storage's size.
void take_snapshot(const at::Tensor& tensor, const Where& where, Snapshot* snapshot);

// ValueError unless all elements lie within the storage.
void check_storage(const Snapshot& snapshot, const Where& where);

// The functions for the device of a snapshot; NotImplementedError if there are none.
const Backend* backend_of(const Snapshot& snapshot, const Where& where);

// Whether the bytes of two snapshots without gaps overlap. `dst` will be written: if
// its storage is a lazy clone, it gets its own memory first.
bool overlap(const Snapshot& source, const Snapshot& dst);
bool overlap(const uint8_t* source, int64_t nbytes, const Snapshot& dst);

// ValueError when the bytes of `source` and `dst` overlap; both contiguous.
void check_apart(const Snapshot& source, const Snapshot& dst, const Where& where);
void check_apart(const uint8_t* source, int64_t nbytes, const Snapshot& dst,
                 const Where& where);

// ValueError unless this is a contiguous torch.uint8 tensor with one dimension, on the
// CPU if asked for.
void check_slab(const Snapshot& slab, const Where& where, bool on_cpu);

// The contiguous bytes of a snapshot, copied first if need be. May run without the GIL.
const uint8_t* contiguous_bytes(Snapshot* snapshot, const Backend& backend);

}  // namespace pyparallel::ops
