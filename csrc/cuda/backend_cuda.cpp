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
// boxes may be released as soon as the kernel is queued. The copy of them comes from
// pageable memory, which has been read when the call returns.
void queue(BoxTable table, Writes writes, cudaStream_t stream) {
  if (table.num_boxes == 0) return;
  const int word = common_word(table);
  if (fits_parameters(table)) {
    C10_CUDA_CHECK(pad_copy(table, word, writes, stream));
    return;
  }
  const auto upload = [&](const void* from, int64_t nbytes) {
    const auto size = static_cast<size_t>(nbytes);
    c10::DataPtr to = c10::cuda::CUDACachingAllocator::get()->allocate(size);
    C10_CUDA_CHECK(
        cudaMemcpyAsync(to.get(), from, size, cudaMemcpyHostToDevice, stream));
    return to;
  };
  const c10::DataPtr boxes = upload(table.boxes, box_nbytes(table));
  table.boxes = static_cast<const Box*>(boxes.get());
  c10::DataPtr starts;
  if (table.starts != nullptr) {
    starts = upload(table.starts, start_nbytes(table));
    table.starts = static_cast<const Start*>(starts.get());
  }
  C10_CUDA_CHECK(pad_copy(table, word, writes, stream));
}

void pad_copy_glue(const BoxTable& table, const BoxTable& mask, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  queue(table, Writes::kBytes, stream);
  queue(mask, Writes::kMarks, stream);
}

at::Tensor contiguous_glue(const at::Tensor& strided) { return strided.contiguous(); }

[[maybe_unused]] const bool kRegistered = ops::register_backend(
    c10::DeviceType::CUDA, {pad_copy_glue, contiguous_glue, nullptr});

}  // namespace
}  // namespace pyparallel::cuda
