#include "host_kernel.h"

#include <dlfcn.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

#include "allocations.h"
#include "calls.h"
#include "capture.h"

namespace fakecuda {
namespace {

constexpr const char* kTorchLibrary = "libtorch_cuda.so";
constexpr const char* kOperators = "libfakecuda_torch.so";

bool is_allocated(const HostKernel::Range& range, int device) {
  if (range.nbytes == 0) return true;
  const auto begin = reinterpret_cast<uintptr_t>(range.begin);
  const auto found = find_allocation(begin);
  return found && begin + range.nbytes <= found->end() &&
         (found->is_host() || found->device == device);
}

void run(const HostKernel& kernel, int device) {
  for (const HostKernel::Range& range : kernel.ranges) {
    if (is_allocated(range, device)) continue;
    add_problem(kernel.name + " uses memory that the device does not have");
    break_device(cudaErrorIllegalAddress);
    return;
  }
  try {
    kernel.body();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    add_problem(kernel.name + " failed: " + text.substr(0, text.find('\n')));
    break_device(cudaErrorAssert);
  }
}

void load() {
  void* const torch = dlopen(kTorchLibrary, RTLD_LAZY | RTLD_NOLOAD);
  Dl_info info{};
  if (torch == nullptr || dladdr(reinterpret_cast<void*>(load), &info) == 0) return;
  const std::string self = info.dli_fname;
  const std::string path = self.substr(0, self.rfind('/') + 1) + kOperators;
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) return;
  add_problem(dlerror());
}

}  // namespace

cudaError_t launch_host_kernel(cudaStream_t handle, HostKernel kernel) {
  FAKECUDA_BEGIN("cudaLaunchKernel", kOpensContext);
  Stream* const stream = find_stream(handle, "cudaLaunchKernel");
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  const int device = stream->device;
  return fail(submit(stream, [=] { run(kernel, device); }));
}

void load_torch_operators() {
  static std::once_flag& once = *new std::once_flag;
  std::call_once(once, load);
}

}  // namespace fakecuda
