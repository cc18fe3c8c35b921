#include "ops/snapshot.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "core/checked.h"

namespace pyparallel::ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

struct Defect {
  bool present;
  const char* kind;
  const char* advice;
};

// Tensors whose bytes are not simply their elements.
constexpr DispatchKeySet kSparse({DispatchKey::Sparse, DispatchKey::SparseCsr,
                                  DispatchKey::MkldnnCPU});
constexpr DispatchKeySet kWrapped({DispatchKey::Python, DispatchKey::FuncTorchBatched,
                                   DispatchKey::FuncTorchGradWrapper,
                                   DispatchKey::Functionalize});
constexpr DispatchKeySet kUnusual =
    kSparse | kWrapped |
    DispatchKeySet({DispatchKey::NestedTensor, DispatchKey::Quantized,
                    DispatchKey::Conjugate, DispatchKey::Negative,
                    DispatchKey::ZeroTensor}) |
    DispatchKeySet(c10::BackendComponent::MetaBit);

// As DispatchKeySet::has_any, which does not take functionality and backend bits at
// once.
bool has_any(DispatchKeySet keys, DispatchKeySet wanted) {
  return (keys.raw_repr() & wanted.raw_repr()) != 0;
}

Defect find_defect(const at::Tensor& tensor) {
  const DispatchKeySet keys = tensor.key_set();
  const auto has = [&](DispatchKey key) { return has_any(keys, DispatchKeySet(key)); };
  const bool meta = keys.has_backend(c10::BackendComponent::MetaBit);
  const Defect defects[] = {
      {has(DispatchKey::NestedTensor), "nested", "Call unbind() on it first."},
      {has_any(keys, kSparse), "sparse or opaque", "Call to_dense() on it first."},
      {has(DispatchKey::Quantized), "quantized", "Call dequantize() on it first."},
      {has_any(keys, kWrapped), "a wrapper", "Unwrap it first."},
      {meta, "on the meta device", "Give it data first."},
      {has(DispatchKey::Conjugate), "conjugated", "Call resolve_conj() on it first."},
      {has(DispatchKey::Negative), "negated", "Call resolve_neg() on it first."},
      {has(DispatchKey::ZeroTensor), "a zero tensor", "Call clone() on it first."},
      {!tensor.has_storage(), "a wrapper", "Unwrap it first."},
  };
  for (const Defect& defect : defects) {
    if (defect.present) return defect;
  }
  return {false, "", ""};
}

void read(const at::Tensor& tensor, Snapshot* snapshot) {
  snapshot->storage = tensor.storage();
  snapshot->sizes = tensor.sizes();
  snapshot->strides = tensor.strides();
  snapshot->dtype = tensor.scalar_type();
  snapshot->device = tensor.device();
  snapshot->itemsize = static_cast<int64_t>(tensor.itemsize());
  const int64_t* sizes = snapshot->sizes.data();
  const auto ndim = static_cast<int64_t>(snapshot->sizes.size());
  const bool fits =
      snapshot->strides.size() == snapshot->sizes.size() &&
      checked_nbytes(sizes, ndim, snapshot->itemsize, &snapshot->nbytes) &&
      checked_mul(tensor.storage_offset(), snapshot->itemsize, &snapshot->offset);
  TORCH_CHECK_VALUE(fits,
                    "the bytes of a tensor must fit in 64 bits, but its shape is ",
                    Tuple{snapshot->sizes}, ".");
  snapshot->contiguous = is_contiguous(sizes, snapshot->strides.data(), ndim);
}

}  // namespace

bool is_plain(const at::Tensor& tensor) {
  return !has_any(tensor.key_set(), kUnusual) && tensor.has_storage();
}

bool are_on_one_device(TensorRefs tensors) {
  return !tensors.empty() &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* tensor) {
           return is_plain(*tensor) && tensor->device() == tensors.front()->device();
         });
}

void check_plain(const at::Tensor& tensor, const Where& where) {
  if (is_plain(tensor)) return;
  const Defect defect = find_defect(tensor);
  TORCH_CHECK_TYPE(!defect.present, where, " must be a plain strided tensor, but is ",
                   defect.kind, ". ", defect.advice);
}

bool holds(const at::Tensor& tensor, int64_t nbytes) {
  if (nbytes == 0) return true;
  int64_t offset = 0;
  int64_t end = 0;
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  return checked_mul(tensor.storage_offset(), itemsize, &offset) &&
         checked_add(offset, nbytes, &end) &&
         static_cast<uint64_t>(end) <= tensor.storage().nbytes();
}

bool is_compact(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_contiguous() &&
         holds(tensor, static_cast<int64_t>(tensor.nbytes()));
}

const uint8_t* Snapshot::data() const {
  if (nbytes == 0) return nullptr;
  return static_cast<const uint8_t*>(storage.data()) + offset;
}

uint8_t* Snapshot::mutable_data() const {
  if (nbytes == 0) return nullptr;
  return static_cast<uint8_t*>(storage.mutable_data()) + offset;
}

void take_snapshot(const at::Tensor& tensor, const Where& where, Snapshot* snapshot) {
  check_plain(tensor, where);
  read(tensor, snapshot);
  if (snapshot->contiguous) return;
  const at::Tensor alias = tensor.detach();
  read(alias, snapshot);
  if (!snapshot->contiguous) snapshot->strided = alias;
}

void check_storage(const Snapshot& snapshot, const Where& where) {
  int64_t end = 0;
  const bool fits =
      checked_extent(snapshot.sizes.data(), snapshot.strides.data(),
                     static_cast<int64_t>(snapshot.sizes.size()),
                     snapshot.offset / snapshot.itemsize, snapshot.itemsize, &end);
  TORCH_CHECK_VALUE(fits, where, " must lie within its storage, but reaches beyond ",
                    "2**63 bytes.");
  const size_t held = snapshot.storage.nbytes();
  TORCH_CHECK_VALUE(static_cast<uint64_t>(end) <= held, where,
                    " must lie within its storage, but needs ", end, " bytes where ",
                    held, " are left. Copy it before its storage is released.");
}

const Backend* backend_of(const Snapshot& snapshot, const Where& where) {
  const Backend* backend = find_backend(snapshot.device.type());
  TORCH_CHECK_NOT_IMPLEMENTED(backend != nullptr, where,
                              " must be on a device that this build knows, but is on ",
                              snapshot.device.str(), ". Use the pure Python backend.");
  return backend;
}

bool overlap(const Snapshot& source, const Snapshot& dst) {
  return overlap(source.data(), source.nbytes, dst);
}

bool overlap(const uint8_t* source, int64_t nbytes, const Snapshot& dst) {
  if (nbytes == 0 || dst.nbytes == 0) return false;
  const auto source_begin = reinterpret_cast<uintptr_t>(source);
  const auto dst_begin = reinterpret_cast<uintptr_t>(dst.mutable_data());
  return source_begin < dst_begin + static_cast<uint64_t>(dst.nbytes) &&
         dst_begin < source_begin + static_cast<uint64_t>(nbytes);
}

void check_apart(const Snapshot& source, const Snapshot& dst, const Where& where) {
  check_apart(source.data(), source.nbytes, dst, where);
}

void check_apart(const uint8_t* source, int64_t nbytes, const Snapshot& dst,
                 const Where& where) {
  TORCH_CHECK_VALUE(
      !overlap(source, nbytes, dst), where,
      " must not share memory with dst, but overlaps it. Clone it first.");
}

void check_slab(const Snapshot& slab, const Where& where, bool on_cpu) {
  const bool good = slab.dtype == c10::kByte && slab.sizes.size() == 1 &&
                    slab.contiguous && (!on_cpu || slab.device.is_cpu());
  TORCH_CHECK_VALUE(good, where, " must be a contiguous torch.uint8 tensor of one ",
                    "dimension", on_cpu ? " on the CPU" : "", ", but has dtype ",
                    dtype_name(slab.dtype), ", shape ", Tuple{slab.sizes}, ", strides ",
                    Tuple{slab.strides}, " and device ", slab.device.str(), ".");
}

const uint8_t* contiguous_bytes(Snapshot* snapshot, const Backend& backend) {
  if (!snapshot->strided.defined()) return snapshot->data();
  snapshot->strided = backend.contiguous(snapshot->strided);
  return static_cast<const uint8_t*>(snapshot->strided.const_data_ptr());
}

}  // namespace pyparallel::ops
