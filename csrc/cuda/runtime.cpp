#include "cuda/runtime.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/host_allocator.h"

namespace pyparallel::cuda {
namespace {

using transfer::Copy;
using transfer::Event;
using transfer::Pinned;
using transfer::Stream;

c10::DeviceIndex index_of(int64_t device) {
  return static_cast<c10::DeviceIndex>(device);
}

// True while exchange_capture_mode has set the relaxed mode of this thread.
thread_local bool is_relaxed = false;

// Guards every call to a device. It makes the device current, so that no call opens a
// context on another one. The relaxed mode allows calls that a capture in another
// thread forbids by default; none of them is made on a captured stream. The device is
// set first, because the exchange of the mode opens a context on the current device. A
// guard inside another one of the same device has nothing to do.
class CallGuard {
 public:
  explicit CallGuard(int64_t device) : before_(guarded_device) {
    if (before_ == device) return;
    device_.emplace(index_of(device));
    if (!is_relaxed && before_ == kNoDevice) {
      relaxed_.emplace(cudaStreamCaptureModeRelaxed);
    }
    guarded_device = device;
  }
  ~CallGuard() { guarded_device = before_; }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;

 private:
  static constexpr int64_t kNoDevice = -1;
  static thread_local int64_t guarded_device;

  int64_t before_;
  std::optional<c10::cuda::CUDAGuard> device_;
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed_;
};

thread_local int64_t CallGuard::guarded_device = kNoDevice;

class CudaScope final : public transfer::CallScope {
 public:
  explicit CudaScope(int64_t device) : guard_(device) {}

 private:
  CallGuard guard_;
};

// Returns a device with a context, if there is one, for calls that need any device.
int64_t used_device() {
  const auto used = c10::cuda::getDeviceIndexWithPrimaryContext();
  return used ? *used : c10::cuda::current_device();
}

// Returns true if a call returned the error `expected`, which is a result here. Clears
// it, because it would stay in the thread.
bool is_expected(cudaError_t error, cudaError_t expected) {
  if (error == expected) static_cast<void>(cudaGetLastError());
  return error == expected;
}

cudaStream_t handle(const Stream& stream) {
  return c10::cuda::CUDAStream::unpack3(stream.id, index_of(stream.device),
                                        c10::DeviceType::CUDA)
      .stream();
}

cudaEvent_t handle(const Event& event) {
  return static_cast<cudaEvent_t>(event.handle);
}

#if CUDART_VERSION >= 13000
using CopyBatch = cudaError_t(void* const*, const void* const*, const size_t*, size_t,
                              cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t);
#elif CUDART_VERSION >= 12080
using CopyBatch = cudaError_t(void**, void**, size_t*, size_t, cudaMemcpyAttributes*,
                              size_t*, size_t, size_t*, cudaStream_t);
#endif

// The error with which runtime, driver or device refused a batch of copies.
std::atomic<cudaError_t> batch_refusal{cudaSuccess};

// Queues all copies by one call. If that returns an error, the copies must be queued
// again. Sources are read in stream order, as by cudaMemcpyAsync.
cudaError_t copy_at_once([[maybe_unused]] const Copy* copies,
                         [[maybe_unused]] int64_t num,
                         [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  // Looked up at run time: an older runtime of the same major version may lack it, and
  // this module must load there too.
  static const auto copy_batch =
      reinterpret_cast<CopyBatch*>(dlsym(RTLD_DEFAULT, "cudaMemcpyBatchAsync"));
  if (copy_batch == nullptr) return cudaErrorCallRequiresNewerDriver;
  const auto count = static_cast<size_t>(num);
  std::vector<void*> dsts(count);
  std::vector<size_t> sizes(count);
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  std::vector<const void*> srcs(count);
#else
  std::vector<void*> srcs(count);
  size_t failed = 0;
#endif
  for (size_t i = 0; i < count; ++i) {
    dsts[i] = copies[i].dst;
#if CUDART_VERSION >= 13000
    srcs[i] = copies[i].src;
#else
    srcs[i] = const_cast<uint8_t*>(copies[i].src);
#endif
    sizes[i] = static_cast<size_t>(copies[i].nbytes);
  }
#if CUDART_VERSION >= 13000
  const cudaError_t error = copy_batch(dsts.data(), srcs.data(), sizes.data(), count,
                                       &attributes, &first, 1, stream);
#else
  const cudaError_t error = copy_batch(dsts.data(), srcs.data(), sizes.data(), count,
                                       &attributes, &first, 1, &failed, stream);
#endif
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
#else
  return cudaErrorNotSupported;
#endif
}

class CudaRuntime final : public transfer::Runtime {
 public:
  // Torch keeps the properties, so this calls no device.
  int64_t memory_size(int64_t device) override {
    return static_cast<int64_t>(
        at::cuda::getDeviceProperties(index_of(device))->totalGlobalMem);
  }

  // Uses torch's caching allocator, which keeps freed blocks.
  Pinned allocate(int64_t nbytes, int64_t device) override {
    const CallGuard guard(device);
    auto owner =
        std::make_unique<c10::DataPtr>(at::getHostAllocator(c10::DeviceType::CUDA)
                                           ->allocate(static_cast<size_t>(nbytes)));
    auto* data = static_cast<uint8_t*>(owner->get());
    return {data, owner.release()};
  }

  // Makes no CUDA call, because torch's allocator keeps the memory.
  void free(const Pinned& memory) noexcept override {
    delete static_cast<c10::DataPtr*>(memory.owner);
  }

  int pin(void* data, int64_t nbytes) override {
    const CallGuard guard(used_device());
    const cudaError_t error =
        cudaHostRegister(data, static_cast<size_t>(nbytes), cudaHostRegisterPortable);
    switch (error) {
      case cudaErrorInvalidValue:
      case cudaErrorMemoryAllocation:
      case cudaErrorOperatingSystem:
      case cudaErrorHostMemoryAlreadyRegistered:
      case cudaErrorNotPermitted:
      case cudaErrorNotSupported:
        static_cast<void>(cudaGetLastError());
        return static_cast<int>(error);
      default:  // success, or the failure of an earlier kernel
        C10_CUDA_CHECK(error);
        return 0;
    }
  }

  void unpin(void* data) override {
    const CallGuard guard(used_device());
    C10_CUDA_CHECK(cudaHostUnregister(data));
  }

  bool is_pinned(const void* data, int64_t device) override {
    const CallGuard guard(device);
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
    // Older drivers refuse memory that they do not know.
    if (is_expected(error, cudaErrorInvalidValue)) return false;
    C10_CUDA_CHECK(error);
    return attributes.type == cudaMemoryTypeHost;
  }

  bool observe_copies(transfer::CopyObserver* observer) override {
    static const bool is_observed = cuda::observe_copies(observer);
    return is_observed;
  }

  void copy(const Copy& copy, const Stream& stream) override {
    const CallGuard guard(stream.device);
    C10_CUDA_CHECK(cudaMemcpyAsync(copy.dst, copy.src, static_cast<size_t>(copy.nbytes),
                                   cudaMemcpyHostToDevice, handle(stream)));
  }

  void copy_batch(const Copy* copies, int64_t num, const Stream& stream) override {
    const CallGuard guard(stream.device);
    const cudaStream_t queue = handle(stream);
    const bool may_batch =
        batch_refusal == cudaSuccess && queue != nullptr && queue != cudaStreamLegacy;
    const cudaError_t error =
        may_batch ? copy_at_once(copies, num, queue) : cudaSuccess;
    if (may_batch && error == cudaSuccess) return;
    // After an error of the device itself, these calls fail as well.
    for (int64_t i = 0; i < num; ++i) copy(copies[i], stream);
    if (error != cudaSuccess) batch_refusal = error;
  }

  int refused_batch() override {
    // Another thread may write it.
    return batch_refusal.load();
  }

  Event create_event(int64_t device) override {
    const CallGuard guard(device);
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return {event, device};
  }

  void record(const Event& event, const Stream& stream) override {
    const CallGuard guard(stream.device);
    C10_CUDA_CHECK(cudaEventRecord(handle(event), handle(stream)));
  }

  bool is_done(const Event& event) override {
    const CallGuard guard(event.device);
    const cudaError_t error = cudaEventQuery(handle(event));
    if (is_expected(error, cudaErrorNotReady)) return false;
    C10_CUDA_CHECK(error);
    return true;
  }

  void wait(const Stream& stream, const Event& event) override {
    const CallGuard guard(stream.device);
    C10_CUDA_CHECK(cudaStreamWaitEvent(handle(stream), handle(event), 0));
  }

  void wait_on_host(const Event& event) override {
    const CallGuard guard(event.device);
    C10_CUDA_CHECK(cudaEventSynchronize(handle(event)));
  }

  int64_t create_stream(int64_t device) override {
    const CallGuard guard(device);
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
    return reinterpret_cast<int64_t>(stream);
  }

  std::unique_ptr<transfer::CallScope> scope(int64_t device) override {
    return std::make_unique<CudaScope>(device);
  }

  int exchange_capture_mode(int mode, int64_t device) override {
    if (is_relaxed && mode == transfer::kRelaxed) return mode;
    const c10::cuda::CUDAGuard guard(index_of(device));
    auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
    C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&exchanged));
    // If other code had set it, only that code knows when it ends.
    is_relaxed = mode == transfer::kRelaxed && exchanged != mode;
    return exchanged;
  }

  bool is_capturing(const Stream& stream) override {
    const CallGuard guard(stream.device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(handle(stream), &status);
    // The legacy default stream, while a stream that synchronises with it is captured.
    if (is_expected(error, cudaErrorStreamCaptureImplicit)) return true;
    C10_CUDA_CHECK(error);
    return status != cudaStreamCaptureStatusNone;
  }

  bool is_idle(const Stream& stream) override {
    const CallGuard guard(stream.device);
    const cudaError_t error = cudaStreamQuery(handle(stream));
    if (is_expected(error, cudaErrorNotReady)) return false;
    C10_CUDA_CHECK(error);
    return true;
  }

  // Asks torch only, which opens no context for this.
  std::vector<Stream> current_streams() override {
    std::vector<Stream> streams;
    const c10::DeviceIndex num_devices = c10::cuda::device_count();
    for (c10::DeviceIndex device = 0; device < num_devices; ++device) {
      if (!c10::cuda::hasPrimaryContext(device)) continue;
      streams.push_back({c10::cuda::getCurrentCUDAStream(device).id(), device});
    }
    return streams;
  }
};

}  // namespace

static_assert(transfer::kRelaxed == cudaStreamCaptureModeRelaxed);

transfer::Runtime* runtime() {
  static CudaRuntime runtime;
  return &runtime;
}

}  // namespace pyparallel::cuda
