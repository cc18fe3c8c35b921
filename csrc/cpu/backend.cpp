// Registers the device 'cpu' for torch's tensors.
#include "ops/backend.h"

#include <omp.h>

#include "cpu/image.h"
#include "cpu/launch.h"
#include "cpu/parallel_for.h"
#include "cpu/runtime.h"

namespace pyparallel::cpu {
namespace {

// While it lives in a forked process, torch's own operators use one thread, because
// more would hang.
class SerialWhenForked {
 public:
  SerialWhenForked() {
    if (forked()) {
      num_threads_ = omp_get_max_threads();
      omp_set_num_threads(1);
    }
  }
  ~SerialWhenForked() {
    if (num_threads_ > 0) omp_set_num_threads(num_threads_);
  }
  SerialWhenForked(const SerialWhenForked&) = delete;
  SerialWhenForked& operator=(const SerialWhenForked&) = delete;

 private:
  int num_threads_ = 0;
};

void pad_copy_glue(const BoxTable& table, const BoxTable& mask, c10::Device) {
  pad_copy(table, mask);
}

void cast_copy_glue(const BoxTable& table, const BoxTable& mask, Cast cast) {
  pad_copy(table, mask, cast);
}

at::Tensor contiguous_glue(const at::Tensor& strided) {
  const SerialWhenForked serial;
  return strided.contiguous();
}

void pack_glue(const Pack& body, c10::Device) { pack(body); }

void image_batch_glue(const ImageJob& job, c10::Device) { image_batch(job); }

[[maybe_unused]] const bool kRegistered = ops::register_backend(
    c10::DeviceType::CPU, {pad_copy_glue, contiguous_glue, pack_glue, image_batch_glue,
                           runtime, nullptr, cast_copy_glue});

}  // namespace
}  // namespace pyparallel::cpu
