// Torch glue of CUDA: makes 'cuda' a registered device.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "core/box_plan.h"
#include "cuda/pad_copy.h"
#include "ops/backend.h"

namespace pyparallel::cuda {
namespace {

// The allocator gives a released block only to later work of the same stream, so the
// box table may be released as soon as the kernel is queued. The copy of the table
// comes from pageable memory, which has been read when the call returns.
void pad_copy_glue(const BoxTable& table, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const int word = common_word(table);
  if (table.num_boxes <= kMaxParameterBoxes) {
    C10_CUDA_CHECK(pad_copy(table, word, stream));
    return;
  }
  const size_t nbytes = static_cast<size_t>(table.num_boxes) * sizeof(Box);
  const c10::DataPtr boxes = c10::cuda::CUDACachingAllocator::get()->allocate(nbytes);
  C10_CUDA_CHECK(cudaMemcpyAsync(boxes.get(), table.boxes, nbytes,
                                 cudaMemcpyHostToDevice, stream));
  BoxTable on_device = table;
  on_device.boxes = static_cast<const Box*>(boxes.get());
  C10_CUDA_CHECK(pad_copy(on_device, word, stream));
}

at::Tensor contiguous_glue(const at::Tensor& strided) { return strided.contiguous(); }

[[maybe_unused]] const bool kRegistered = ops::register_backend(
    c10::DeviceType::CUDA, {pad_copy_glue, contiguous_glue, nullptr});

}  // namespace
}  // namespace pyparallel::cuda
