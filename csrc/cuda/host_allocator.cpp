#include "cuda/host_allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <torch/version.h>

#include <functional>
#include <limits>
#include <utility>

// Note: [host allocator]
// Behind each non-blocking copy, torch passes the address and the stream to its host
// allocator, on any stream and also for memory of other owners. So torch's allocator is
// replaced by one that forwards all calls to it, and shows the observer the copies that
// torch's allocator does not know. torch exports the function for this since 2.11.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11)

namespace pyparallel::cuda {
namespace {

// tests/project/test_csrc_rules.py compares the functions with those of torch.
class ObservedHostAllocator final : public at::HostAllocator {
 public:
  ObservedHostAllocator(at::HostAllocator* inner, transfer::CopyObserver* observer)
      : inner_(inner), observer_(observer) {}

  bool record_event(void* data, void* context, c10::Stream stream) override {
    return inner_->record_event(data, context, stream) ||
           observer_->on_copy(data, {stream.id(), stream.device_index()});
  }

  at::DataPtr allocate(size_t nbytes) override { return inner_->allocate(nbytes); }
  bool is_simple_data_ptr(const at::DataPtr& data) const override {
    return inner_->is_simple_data_ptr(data);
  }
  at::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* dst, const void* src, size_t nbytes) const override {
    inner_->copy_data(dst, src, nbytes);
  }
  void empty_cache() override { inner_->empty_cache(); }
  at::HostStats get_stats() override { return inner_->get_stats(); }
  void reset_accumulated_stats() override { inner_->reset_accumulated_stats(); }
  void reset_peak_stats() override { inner_->reset_peak_stats(); }
  void begin_allocate_to_pool(c10::MempoolId_t pool,
                              std::function<bool(c10::Stream)> filter) override {
    inner_->begin_allocate_to_pool(pool, std::move(filter));
  }
  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    inner_->end_allocate_to_pool(pool);
  }
  void release_pool(c10::MempoolId_t pool) override { inner_->release_pool(pool); }

 private:
  at::HostAllocator* inner_;
  transfer::CopyObserver* observer_;
};

}  // namespace

bool observe_copies(transfer::CopyObserver* observer) {
  constexpr auto kType = c10::DeviceType::CUDA;
  at::HostAllocator* const inner = at::getHostAllocator(kType);
  auto* const observed = new ObservedHostAllocator(inner, observer);  // never freed
  // The highest priority: no later allocator hides the copies.
  at::setHostAllocator(kType, observed, std::numeric_limits<uint8_t>::max());
  return at::getHostAllocator(kType) == observed;
}

}  // namespace pyparallel::cuda

#else

namespace pyparallel::cuda {

bool observe_copies(transfer::CopyObserver*) { return false; }

}  // namespace pyparallel::cuda

#endif
