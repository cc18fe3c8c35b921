// Registers the device 'cuda' for torch's tensors.
#include "ops/backend.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/image.h"
#include "cuda/pack.h"
#include "cuda/pad_copy.h"
#include "cuda/runtime.h"

namespace pyparallel::cuda {
namespace {

void pad_copy_glue(const BoxTable& table, const BoxTable& mask, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(pad_copy(table, Writes::kBytes, stream));
  C10_CUDA_CHECK(pad_copy(mask, Writes::kMask, stream));
}

void image_batch_glue(const ImageJob& job, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(image_batch(job, c10::cuda::getCurrentCUDAStream()));
}

at::Tensor contiguous_glue(const at::Tensor& strided) { return strided.contiguous(); }

void pack_glue(const Pack& body, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(pack(body, c10::cuda::getCurrentCUDAStream()));
}

namespace allocator = c10::cuda::CUDACachingAllocator;

// Returns the bytes that torch's allocator may still get from the device.
int64_t num_free(int64_t device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  const c10::cuda::CUDAGuard guard(index);
  size_t free = 0;
  size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto allowed = static_cast<int64_t>(allocator::getMemoryFraction(index) *
                                            static_cast<double>(total));
  const int64_t reserved =
      allocator::getDeviceStats(index).reserved_bytes.front().current;
  return std::min(static_cast<int64_t>(free), allowed - reserved);
}

// Torch's allocator calls this before it asks the current device for more memory.
class Reclaim final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    const c10::Device device(c10::DeviceType::CUDA, c10::cuda::current_device());
    ops::reclaim_memory(device, num_free);
    return true;
  }
};

// Other allocators of torch call no callback.
bool reclaims() { return allocator::name() == "native"; }

[[maybe_unused]] const bool kRegistered = ops::register_backend(
    c10::DeviceType::CUDA,
    {pad_copy_glue, contiguous_glue, pack_glue, image_batch_glue, runtime, reclaims});

}  // namespace
}  // namespace pyparallel::cuda

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("pyparallel", pyparallel::cuda::Reclaim);
}
