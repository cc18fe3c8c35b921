#include "cuda/backend_pack.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/pack.h"

namespace pyparallel::cuda {

void pack_glue(const Pack& body, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(pack(body, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace pyparallel::cuda
