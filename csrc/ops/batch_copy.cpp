#include "ops/batch_copy.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/pack.h"
#include "ops/cast.h"

namespace pyparallel::ops {
namespace {

constexpr char kSend[] = "send";
// From this number on, the engine queues copies by one call.
constexpr size_t kFewCopies = static_cast<size_t>(transfer::kBatchCopies);
// How many leaves ahead a tensor and its storage are fetched into the cache.
constexpr size_t kTensorAhead = 12;
constexpr size_t kStorageAhead = 6;
constexpr size_t kLine = 64;
constexpr int64_t kMostFetched = 512;  // bytes of a leaf: the hardware sees the rest

void fetch(const void* memory, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(memory) + at);
  }
}

// A span has at most a fourth of excess over the bytes of its leaves.
bool is_dense(int64_t span, int64_t used) { return span - used <= used / 4; }

}  // namespace

BatchCopy::BatchCopy(c10::Stream stream, size_t num,
                     std::optional<c10::ScalarType> dtype)
    : stream_(stream), runtime_(stream.device_type()), dtype_(dtype) {
  leaves_.reserve(num);
  bytes_.emplace(kSend, num, c10::kCPU);
}

std::unique_ptr<BatchCopy> BatchCopy::plan(TensorRefs leaves, c10::Stream stream,
                                           InPlace limits,
                                           std::optional<c10::ScalarType> dtype) {
  std::unique_ptr<BatchCopy> copy(new BatchCopy(stream, leaves.size(), dtype));
  if (!copy->add(leaves)) return nullptr;
  copy->find_sources(leaves, limits);
  return copy;
}

// Plans a slab of all leaves. Returns false if one cannot be packed or cast.
bool BatchCopy::add(TensorRefs leaves) {
  const size_t num = leaves.size();
  const auto tensor = [&](size_t i) { return leaves[i]->unsafeGetTensorImpl(); };
  for (size_t i = 0; i < std::min(num, kTensorAhead); ++i) {
    fetch(tensor(i), sizeof(c10::TensorImpl));
  }
  for (size_t i = 0; i < num; ++i) {
    if (i + kTensorAhead < num) {
      fetch(tensor(i + kTensorAhead), sizeof(c10::TensorImpl));
    }
    if (i + kStorageAhead < num) {
      fetch(tensor(i + kStorageAhead)->unsafe_storage().unsafeGetStorageImpl(),
            sizeof(c10::StorageImpl));
    }
    const at::Tensor& leaf = *leaves[i];
    if (!can_pack(leaf)) return false;
    c10::ScalarType dtype = leaf.scalar_type();
    if (dtype_) {
      given_.push_back(dtype);
      if (c10::isFloatingType(dtype) && dtype != *dtype_) {
        if (cast_of(dtype, *dtype_) == Cast::kNone) return false;
        dtype = *dtype_;
      }
    }
    leaves_.push_back(plan_leaf(leaf, dtype, kSend, i, &nbytes_));
    const PlannedLeaf& planned = leaves_.back();
    const uint8_t* const src = bytes_->add(leaf, planned);
    if (src != nullptr) {
      fetch(src, static_cast<size_t>(std::min(planned.nbytes, kMostFetched)));
    }
  }
  return true;
}

// Looks for memory that need not be packed if it is pinned.
void BatchCopy::find_sources(TensorRefs leaves, InPlace limits) {
  if (nbytes_ == 0) return;
  const auto num = static_cast<int64_t>(leaves_.size());
  const bool has_span = nbytes_ / num >= limits.mean_nbytes && find_span(leaves);
  if (!dtype_ && nbytes_ < limits.leaf_nbytes) return;  // no leaf is large
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const auto nbytes = static_cast<int64_t>(leaves[i]->nbytes());
    if (nbytes < limits.leaf_nbytes || !leaves[i]->is_contiguous()) continue;
    pageable_nbytes_ += nbytes;
    if (has_span) continue;  // all leaves have the memory of the span
    direct_.push_back(i);
    sources_.push_back(leaves[i]->storage());
  }
}

// Finds the span of leaves that are contiguous in one storage or slab, share no bytes,
// and start at multiples of 64 bytes from the first of them. Empty ones may be
// anywhere.
bool BatchCopy::find_span(TensorRefs leaves) {
  if (bytes_->has_strided()) return false;
  const std::vector<Slot>& slots = bytes_->slots();
  const auto size_of = [&](size_t i) {
    return static_cast<int64_t>(leaves[i]->nbytes());
  };
  std::vector<size_t> order;
  order.reserve(slots.size());
  int64_t used = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    used += size_of(i);
    if (size_of(i) > 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t i, size_t j) { return slots[i].src < slots[j].src; });
  const uint8_t* const begin = slots[order.front()].src;
  std::vector<int64_t> offsets(slots.size(), 0);
  int64_t end = 0;
  for (const size_t i : order) {
    const int64_t offset = slots[i].src - begin;
    if (offset < end || !is_aligned(offset)) return false;
    offsets[i] = offset;
    end = offset + size_of(i);
  }
  if (!is_dense(end, used)) return false;
  // The first leaf keeps this memory alive, so no other memory has its addresses.
  c10::Storage memory = memory_storage(*leaves[order.front()]);
  const auto* const first = static_cast<const uint8_t*>(memory.data());
  const auto held = static_cast<int64_t>(memory.nbytes());
  if (begin < first || end > held - (begin - first)) return false;
  span_ = {begin, end, std::move(offsets)};
  sources_.push_back(std::move(memory));
  return true;
}

// Keeps those sources that are pinned.
void BatchCopy::choose_sources() {
  if (span_.begin != nullptr) {
    if (!runtime_.is_pinned(span_.begin, stream_)) return;
    span_.is_used = true;
    pageable_nbytes_ = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      keep_dtype(i);
      leaves_[i].offset = span_.offsets[i];
    }
    // The last leaf may end before the end of its slot.
    const bool fits = next_slot(0, span_.nbytes, &nbytes_);
    TORCH_INTERNAL_ASSERT(fits);
    return;
  }
  const auto is_pageable = [&](size_t i) {
    return !runtime_.is_pinned(bytes_->slots()[i].src, stream_);
  };
  direct_.erase(std::remove_if(direct_.begin(), direct_.end(), is_pageable),
                direct_.end());
  for (const size_t i : direct_) {
    keep_dtype(i);
    pageable_nbytes_ -= leaves_[i].nbytes;
  }
}

// Gives a leaf that is read in place its own dtype again. The device casts it.
void BatchCopy::keep_dtype(size_t index) {
  if (bytes_->casts().empty()) return;
  leaves_[index].dtype = given_[index];
  leaves_[index].nbytes *= source_ratio(bytes_->casts()[index]);
}

// See Note: [copies on the home stream] in to_device.py.
void BatchCopy::choose_stream(bool waits_here, bool may_go_home) {
  const c10::Stream home = current_stream(stream_.device());
  if (waits_here) runtime_.check_not_capturing(home, "home");
  const bool is_packed = nbytes_ > 0 && !span_.is_used;
  if (waits_here && may_go_home && !is_packed && num_in_place() < kFewCopies &&
      runtime_.is_idle(home)) {
    stream_ = home;
    return;
  }
  runtime_.check_not_capturing(stream_, "copy");
}

// Takes the direct leaves out of the slab. Returns the others.
BatchCopy::Packed BatchCopy::take_direct() {
  const std::vector<Cast>& casts = bytes_->casts();
  Packed packed;
  packed.slots.reserve(leaves_.size() - direct_.size());
  int64_t taken = 0;
  auto next = direct_.begin();
  for (size_t i = 0; i < leaves_.size(); ++i) {
    PlannedLeaf& leaf = leaves_[i];
    if (next == direct_.end() || *next != i) {
      leaf.offset -= taken;
      packed.slots.push_back({bytes_->slots()[i].src, leaf.offset, leaf.nbytes});
      if (!casts.empty()) packed.casts.push_back(casts[i]);
      continue;
    }
    ++next;
    const int64_t end = i + 1 < leaves_.size() ? leaves_[i + 1].offset : nbytes_;
    taken += end - leaf.offset;
    leaf.offset = 0;
  }
  nbytes_ -= taken;
  return packed;
}

void BatchCopy::start(bool waits_here, bool may_go_home) {
  const std::unique_ptr<transfer::CallScope> scope = runtime_.scope(stream_);
  runtime_.check_usable();
  choose_sources();
  const std::vector<Slot>& all = bytes_->read();
  Packed others;
  if (!direct_.empty()) others = take_direct();
  const std::vector<Slot>& slots = direct_.empty() ? all : others.slots;
  const std::vector<Cast>& casts = direct_.empty() ? bytes_->casts() : others.casts;
  choose_stream(waits_here, may_go_home);
  std::vector<int64_t> sizes{nbytes_};
  for (const size_t i : direct_) sizes.push_back(leaves_[i].nbytes);
  blocks_ = runtime_.allocate(sizes, stream_);
  const auto address = [&](size_t block) {
    return static_cast<uint8_t*>(blocks_[block].mutable_data_ptr());
  };
  std::vector<transfer::Copy> copies;
  for (size_t k = 0; k < direct_.size(); ++k) {
    copies.push_back({address(k + 1), all[direct_[k]].src, sizes[k + 1]});
  }
  transfer::Job job{};
  job.is_checked = true;  // by choose_stream
  if (span_.is_used) {
    copies.push_back({address(0), span_.begin, span_.nbytes});
  } else if (nbytes_ > 0) {
    job.dst = address(0);
    job.nbytes = nbytes_;
    job.slots = slots.data();
    job.num_slots = static_cast<int64_t>(slots.size());
    if (!casts.empty()) job.casts = casts.data();
  }
  job.direct = copies.data();
  job.num_direct = static_cast<int64_t>(copies.size());
  event_.emplace(runtime_.send(job, stream_));
}

void BatchCopy::finish() {
  bytes_.reset();
  sources_.clear();
  event_->check();
}

std::vector<at::Tensor> BatchCopy::wait() const {
  const c10::Stream stream = current_stream(stream_.device());
  const bool is_other = stream != stream_;
  const std::unique_ptr<transfer::CallScope> scope =
      is_other ? runtime_.scope(stream_) : nullptr;
  event_->wait(stream);
  if (is_other) {
    std::vector<const at::Tensor*> blocks;
    for (const at::Tensor& block : blocks_) blocks.push_back(&block);
    runtime_.keep(blocks, stream);
  }
  return make_views(blocks_, direct_, leaves_);
}

const RecordedEvent* BatchCopy::reading() const {
  return event_ && num_in_place() > 0 ? &*event_ : nullptr;
}

}  // namespace pyparallel::ops
