// The state of a tensor at one moment.
//
// Note: [read once]
// While a copy runs without the GIL, another thread may call set_() or resize_() on its
// tensors. So a snapshot keeps the storage itself, and sizes that were read once and
// checked against that storage. The tensor is not read again. To resize the storage
// object in place during a copy (untyped_storage().resize_(), or a resize_() beyond its
// size) frees memory that is being read. Snapshots do not protect from that, and
// neither do torch's own operators.
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

  // Returns the first byte of the elements; null without elements. Requires a snapshot
  // without gaps, such as a contiguous one.
  const uint8_t* data() const;
  uint8_t* mutable_data() const;
};

// Tensors that the caller keeps alive. A short-lived reference would cost more than all
// reads of a tensor, because it touches the Python object.
using TensorRefs = c10::ArrayRef<const at::Tensor*>;

// Returns true if the bytes of a tensor are simply its elements: it is strided, has a
// storage, and no pending conjugation or negation.
bool is_plain(const at::Tensor& tensor);

// Returns true if there are tensors, and all are plain and on one device.
bool are_on_one_device(TensorRefs tensors);

// Throws TypeError with the reason unless is_plain(tensor).
void check_plain(const at::Tensor& tensor, const Where& where);

// Returns true if the storage contains all `nbytes` of a plain contiguous tensor.
bool holds(const at::Tensor& tensor, int64_t nbytes);

// Returns true if a tensor is plain, contiguous and within its storage.
bool is_compact(const at::Tensor& tensor);

// Reads `tensor` into a fresh snapshot. Throws TypeError unless it is plain. Does not
// check the size of the storage.
void take_snapshot(const at::Tensor& tensor, const Where& where, Snapshot* snapshot);

// Throws ValueError unless all elements are within the storage.
void check_storage(const Snapshot& snapshot, const Where& where);

// Returns the functions for the device of a snapshot. Throws NotImplementedError if the
// device is not registered.
const Backend* backend_of(const Snapshot& snapshot, const Where& where);

// Returns true if the bytes of two snapshots without gaps overlap. `dst` is about to be
// written: if its storage is a lazy clone, it gets its own memory first.
bool overlap(const Snapshot& source, const Snapshot& dst);
bool overlap(const uint8_t* source, int64_t nbytes, const Snapshot& dst);

// Throws ValueError if the bytes of `source` and `dst`, both contiguous, overlap.
void check_apart(const Snapshot& source, const Snapshot& dst, const Where& where);
void check_apart(const uint8_t* source, int64_t nbytes, const Snapshot& dst,
                 const Where& where);

// Throws ValueError unless this is a contiguous torch.uint8 tensor of one dimension,
// with `on_cpu` on the CPU.
void check_slab(const Snapshot& slab, const Where& where, bool on_cpu);

// Returns the contiguous bytes of a snapshot; copies a strided one first. Needs no GIL.
const uint8_t* contiguous_bytes(Snapshot* snapshot, const Backend& backend);

}  // namespace pyparallel::ops
