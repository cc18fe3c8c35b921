// The functions that tests/support/devices/fake_cuda.py calls by ctypes.
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "calls.h"
#include "capture.h"
#include "kernels.h"
#include "streams.h"

namespace {

void write_lines(const std::vector<std::string>& lines, char* text, int nbytes) {
  std::string joined;
  for (const std::string& line : lines) joined += line + "\n";
  snprintf(text, static_cast<size_t>(nbytes), "%s", joined.c_str());
}

}  // namespace

extern "C" {

void fakecuda_problems(char* text, int nbytes) {
  write_lines(fakecuda::take_problems(), text, nbytes);
}

void fakecuda_unknown(char* text, int nbytes) {
  write_lines(fakecuda::take_unknown_kernels(), text, nbytes);
}

void fakecuda_calls(char* text, int nbytes) {
  write_lines(fakecuda::logged_calls(), text, nbytes);
}

// An allocator for torch.cuda.memory.CUDAPluggableAllocator.
void* fakecuda_plain_malloc(ssize_t nbytes, int device, void*) {
  void* memory = nullptr;
  cudaSetDevice(device);
  cudaMalloc(&memory, static_cast<size_t>(nbytes));
  return memory;
}
void fakecuda_plain_free(void* memory, ssize_t, int, void*) { cudaFree(memory); }

void fakecuda_log(int on) { fakecuda::log_calls(on != 0); }

int fakecuda_contexts() { return static_cast<int>(fakecuda::contexts()); }

void fakecuda_fail(const char* name, int nth, int code) {
  fakecuda::inject_failure(name, nth, static_cast<cudaError_t>(code));
}

void fakecuda_only(const char* path_part) { fakecuda::set_watched_caller(path_part); }

void fakecuda_unlocked(const char* path_part) {
  fakecuda::set_unlocked_caller(path_part);
}

uint64_t fakecuda_injected() { return fakecuda::num_injected(); }

void fakecuda_break(int code) {
  fakecuda::break_device(static_cast<cudaError_t>(code));
}

void fakecuda_delay(int microseconds) { fakecuda::set_delay(microseconds); }

void fakecuda_hold(void* stream, int device, int on) {
  fakecuda::Stream* const held =
      stream == nullptr
          ? fakecuda::legacy_stream(device)
          : fakecuda::find_stream(static_cast<cudaStream_t>(stream), "fakecuda_hold");
  if (held != nullptr) held->hold(on != 0);
}

uint64_t fakecuda_interpreted() { return fakecuda::num_interpreted_kernels(); }

void fakecuda_reset() {
  fakecuda::reset_streams();
  fakecuda::reset_calls();
}

}  // extern "C"
