#include "calls.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "capture.h"
#include "host_kernel.h"

namespace fakecuda {
namespace {

constexpr size_t kMaxProblems = 200;
constexpr char kExtension[] = "pyparallel/backend/_C";

struct Failure {
  int countdown;
  cudaError_t error;
};

// Never destroyed: threads of streams and destructors of libraries outlive main().
struct State {
  std::mutex mutex;
  std::map<std::string, uint64_t> counts;
  std::map<std::string, Failure> failures;
  std::string watched_caller;
  std::string unlocked_caller = kExtension;
  uint64_t num_failed = 0;
  std::vector<std::string> problems;
  bool logging = false;
  std::vector<std::string> log;
  std::atomic<uint32_t> contexts{0};
  std::atomic<int> device_failure{cudaSuccess};
  std::atomic<pid_t> pid{0};
};

State& state() {
  static State& instance = *new State;
  return instance;
}

thread_local int thread_device = 0;
thread_local cudaError_t thread_error = cudaSuccess;

bool is_from(const void* caller, const std::string& path_part) {
  if (path_part.empty()) return true;
  Dl_info info{};
  return dladdr(caller, &info) != 0 && info.dli_fname != nullptr &&
         strstr(info.dli_fname, path_part.c_str()) != nullptr;
}

bool holds_gil() {
  static const auto check =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

void check_gil(const char* name, const void* caller) {
  if (!holds_gil()) return;
  State& s = state();
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (!is_from(caller, s.unlocked_caller)) return;
  }
  add_problem(std::string(name) + " with the GIL");
}

}  // namespace

cudaError_t begin_call(const char* name, unsigned flags, const void* caller) {
  if (is_forked_child()) return fail(cudaErrorInitializationError);
  State& s = state();
  s.pid = getpid();
  check_gil(name, caller);
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    ++s.counts[name];
    const auto found = s.failures.find(name);
    const bool is_watched =
        (s.logging || found != s.failures.end()) && is_from(caller, s.watched_caller);
    if (is_watched && s.logging) s.log.emplace_back(name);
    if (is_watched && found != s.failures.end() && --found->second.countdown == 0) {
      ++s.num_failed;
      return fail(found->second.error);
    }
  }
  if (flags & kOpensContext) {
    open_context(thread_device);
    if (s.device_failure != cudaSuccess) return fail(device_failure());
  }
  if (flags & kUnsafe) return fail(check_capture_permits(name));
  return cudaSuccess;
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) thread_error = error;
  return error;
}

cudaError_t last_error() {
  return device_failure() != cudaSuccess ? device_failure() : thread_error;
}

cudaError_t take_last_error() {
  const cudaError_t error = last_error();
  thread_error = cudaSuccess;
  return error;
}

void break_device(cudaError_t error) {
  int none = cudaSuccess;
  state().device_failure.compare_exchange_strong(none, error);
}

cudaError_t device_failure() {
  return static_cast<cudaError_t>(state().device_failure.load());
}

int num_devices() {
  static const int num = [] {
    const char* const visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible != nullptr && *visible == '\0') return 0;
    const char* const text = getenv("FAKECUDA_DEVICES");
    return text == nullptr ? 1 : atoi(text);
  }();
  return num;
}

int current_device() { return thread_device; }

void set_current_device(int device) { thread_device = device; }

void open_context(int device) {
  if (has_context(device)) return;
  state().contexts |= 1U << device;
  load_torch_operators();
}

bool has_context(int device) { return (state().contexts >> device & 1U) != 0; }

uint32_t contexts() { return state().contexts; }

bool is_forked_child() {
  const pid_t pid = state().pid;
  return pid != 0 && pid != getpid();
}

void add_problem(const std::string& text) {
  if (getenv("FAKECUDA_VERBOSE") != nullptr) {
    fprintf(stderr, "fakecuda: %s\n", text.c_str());
  }
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.problems.size() < kMaxProblems) s.problems.push_back(text);
}

std::vector<std::string> take_problems() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return std::exchange(s.problems, {});
}

void add_to_count(const char* name) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  ++s.counts[name];
}

void inject_failure(const std::string& name, int nth, cudaError_t error) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (nth == 0) {
    s.failures.erase(name);
  } else {
    s.failures[name] = {nth, error};
  }
}

void set_watched_caller(const std::string& path_part) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.watched_caller = path_part;
}

void set_unlocked_caller(const std::string& path_part) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.unlocked_caller = path_part;
}

uint64_t num_injected() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.num_failed;
}

uint64_t num_calls(const std::string& name) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.counts[name];
}

void log_calls(bool on) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.logging = on;
  if (on) s.log.clear();
}

std::vector<std::string> logged_calls() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  return s.log;
}

void reset_calls() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.failures.clear();
  s.watched_caller.clear();
  s.unlocked_caller = kExtension;
  s.logging = false;
  s.log.clear();
  s.device_failure = cudaSuccess;
  thread_error = cudaSuccess;
}

}  // namespace fakecuda
