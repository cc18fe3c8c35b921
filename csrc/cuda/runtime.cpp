#include "cuda/runtime.h"

#include <ATen/cuda/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <atomic>
#include <memory>
#include <vector>

namespace pyparallel::cuda {
namespace {

using transfer::Copy;
using transfer::Event;
using transfer::Pinned;
using transfer::Stream;

c10::DeviceIndex index_of(int64_t device) {
  return static_cast<c10::DeviceIndex>(device);
}

// Makes the stream's device current: no call may open a context on another one.
c10::cuda::CUDAGuard guard_for(const Stream& stream) {
  return c10::cuda::CUDAGuard(index_of(stream.device));
}

cudaStream_t handle(const Stream& stream) {
  return c10::cuda::CUDAStream::unpack3(stream.id, index_of(stream.device),
                                        c10::DeviceType::CUDA)
      .stream();
}

// Allows, while it lives, calls that a capture in any other thread forbids by default.
// They touch no stream that is captured.
class Beside {
 private:
  c10::cuda::CUDAStreamCaptureModeGuard relaxed_{cudaStreamCaptureModeRelaxed};
};

c10::DataPtr allocate_pinned(size_t nbytes) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  return at::getHostAllocator(c10::DeviceType::CUDA)->allocate(nbytes);
#else
  return at::cuda::getCachingHostAllocator()->allocate(nbytes);
#endif
}

// False, with nothing queued, if the driver or the stream does not take batches.
// Sources are read when the stream has got there, as by cudaMemcpyAsync.
bool copy_at_once([[maybe_unused]] const Copy* copies, [[maybe_unused]] int64_t num,
                  [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  static std::atomic<bool> refused{false};
  if (refused || stream == nullptr || stream == cudaStreamLegacy) return false;
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
  const cudaError_t error = cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(),
                                                 count, &attributes, &first, 1, stream);
#else
  const cudaError_t error =
      cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), count, &attributes,
                           &first, 1, &failed, stream);
#endif
  if (error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver) {
    static_cast<void>(cudaGetLastError());
    refused = true;
    return false;
  }
  C10_CUDA_CHECK(error);
  return true;
#else
  return false;
#endif
}

class CudaRuntime final : public transfer::Runtime {
 public:
  // Of torch's caching allocator, which keeps what is given back to it.
  Pinned allocate(int64_t nbytes) override {
    const Beside beside;
    auto owner =
        std::make_unique<c10::DataPtr>(allocate_pinned(static_cast<size_t>(nbytes)));
    auto* data = static_cast<uint8_t*>(owner->get());
    return {data, owner.release()};
  }

  void free(const Pinned& memory) noexcept override {
    delete static_cast<c10::DataPtr*>(memory.owner);
  }

  void copy(const Copy& copy, const Stream& stream) override {
    const auto guard = guard_for(stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(copy.dst, copy.src, static_cast<size_t>(copy.nbytes),
                                   cudaMemcpyHostToDevice, handle(stream)));
  }

  void copy_batch(const Copy* copies, int64_t num, const Stream& stream) override {
    const auto guard = guard_for(stream);
    if (copy_at_once(copies, num, handle(stream))) return;
    for (int64_t i = 0; i < num; ++i) copy(copies[i], stream);
  }

  Event create_event(int64_t device) override {
    const Beside beside;
    const c10::cuda::CUDAGuard guard(index_of(device));
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }

  void record(Event event, const Stream& stream) override {
    const auto guard = guard_for(stream);
    C10_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), handle(stream)));
  }

  bool is_done(Event event) override {
    const Beside beside;
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // it is no error, but would stay
      return false;
    }
    C10_CUDA_CHECK(error);
    return true;
  }

  void wait(const Stream& stream, Event event) override {
    const auto guard = guard_for(stream);
    C10_CUDA_CHECK(
        cudaStreamWaitEvent(handle(stream), static_cast<cudaEvent_t>(event), 0));
  }

  void wait_on_host(Event event) override {
    const Beside beside;
    C10_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
  }

  bool is_capturing(const Stream& stream) override {
    const auto guard = guard_for(stream);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(handle(stream), &status);
    if (error == cudaErrorStreamCaptureImplicit) {
      // The legacy default stream, while one that synchronises with it is captured.
      static_cast<void>(cudaGetLastError());
      return true;
    }
    C10_CUDA_CHECK(error);
    return status != cudaStreamCaptureStatusNone;
  }
};

}  // namespace

transfer::Runtime* runtime() {
  static CudaRuntime runtime;
  return &runtime;
}

}  // namespace pyparallel::cuda
