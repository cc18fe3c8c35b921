// Properties of every call of the CUDA API: counting, injected failures, the last error
// of a thread, the contexts of the process, the state after fork.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fakecuda {

enum CallFlags : unsigned {
  kPlain = 0,
  // Uses the context of the current device: opens it, and fails once the device failed.
  kOpensContext = 1,
  kUnsafe = 2,  // prohibited during a stream capture: see capture.h
};

// Starts a call of the current thread. Returns cudaSuccess, or the error to return:
// after fork, after a device failure, by injection, or because a capture prohibits it.
cudaError_t begin_call(const char* name, unsigned flags, const void* caller);

#define FAKECUDA_BEGIN(name, flags)                                       \
  do {                                                                    \
    const cudaError_t begin_error =                                       \
        ::fakecuda::begin_call(name, flags, __builtin_return_address(0)); \
    if (begin_error != cudaSuccess) return begin_error;                   \
  } while (false)

// Stores an error as the thread's last error, and returns it.
cudaError_t fail(cudaError_t error);
cudaError_t last_error();
cudaError_t take_last_error();

// Makes every later call of this process fail, as a failed kernel does in CUDA.
void break_device(cudaError_t error);
cudaError_t device_failure();

int num_devices();
int current_device();
void set_current_device(int device);

void open_context(int device);
bool has_context(int device);
uint32_t contexts();  // one bit for each device

// True in a child of the process that made the first call.
bool is_forked_child();

// Stores a violation of CUDA's rules for the test to read.
void add_problem(const std::string& text);
std::vector<std::string> take_problems();

// The control of tests. Call `nth` of `name` from now on returns `error`; nth = 0 ends
// it.
void inject_failure(const std::string& name, int nth, cudaError_t error);
// Failures and the log ignore calls from libraries without this text in their path.
void set_watched_caller(const std::string& path_part);
// A driver may block in any call. So a call with the GIL is a problem if it comes from
// a library with this text in its path; by default from our extension.
void set_unlocked_caller(const std::string& path_part);
uint64_t num_injected();  // failures until now
void log_calls(bool on);
std::vector<std::string> logged_calls();
// Ends injected failures, the log, and the state after a device failure. Restores the
// default of set_unlocked_caller.
void reset_calls();

}  // namespace fakecuda
