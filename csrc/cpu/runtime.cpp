#include "cpu/runtime.h"

#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace pyparallel::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

class HostRuntime final : public transfer::Runtime {
 public:
  transfer::Pinned allocate(int64_t nbytes, int64_t) override {
    void* data = ::operator new(static_cast<size_t>(nbytes), kAlignment);
    return {static_cast<uint8_t*>(data), nullptr};
  }

  void free(const transfer::Pinned& memory) noexcept override {
    ::operator delete(memory.data, kAlignment);
  }

  int64_t memory_size(int64_t /*device*/) override { return 0; }
  int pin(void* data, int64_t nbytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    pinned_[data] = nbytes;
    return 0;
  }
  void unpin(void* data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    pinned_.erase(data);
  }
  bool is_pinned(const void* data, int64_t) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = pinned_.upper_bound(data);
    if (after == pinned_.begin()) return false;
    const auto& [begin, nbytes] = *std::prev(after);
    return static_cast<const uint8_t*>(data) - static_cast<const uint8_t*>(begin) <
           nbytes;
  }

  bool observe_copies(transfer::CopyObserver*) override {
    return true;
  }  // all are done

  void copy(const transfer::Copy& copy, const transfer::Stream&) override {
    memcpy(copy.dst, copy.src, static_cast<size_t>(copy.nbytes));
  }

  void copy_batch(const transfer::Copy* copies, int64_t num,
                  const transfer::Stream& stream) override {
    for (int64_t i = 0; i < num; ++i) copy(copies[i], stream);
  }

  transfer::Event create_event(int64_t device) override { return {nullptr, device}; }
  void record(const transfer::Event&, const transfer::Stream&) override {}
  bool is_done(const transfer::Event&) override { return true; }
  void wait(const transfer::Stream&, const transfer::Event&) override {}
  void wait_on_host(const transfer::Event&) override {}
  int refused_batch() override { return 0; }
  int64_t create_stream(int64_t device) override { return device; }
  std::unique_ptr<transfer::CallScope> scope(int64_t /*device*/) override {
    return nullptr;
  }
  int exchange_capture_mode(int /*mode*/, int64_t) override {
    return transfer::kRelaxed;
  }
  bool is_capturing(const transfer::Stream&) override { return false; }
  bool is_idle(const transfer::Stream&) override { return true; }
  std::vector<transfer::Stream> current_streams() override { return {}; }

 private:
  std::mutex mutex_;
  std::map<const void*, int64_t> pinned_;  // addresses and bytes
};

}  // namespace

transfer::Runtime* runtime() {
  static HostRuntime runtime;
  return &runtime;
}

}  // namespace pyparallel::cpu
