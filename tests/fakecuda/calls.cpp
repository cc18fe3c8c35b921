#include "calls.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "capture.h"
#include "kernels.h"

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

class Locked {
 public:
  State* operator->() const { return &state(); }

 private:
  const std::lock_guard<std::mutex> lock_{state().mutex};
};

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
  if (holds_gil() && is_from(caller, Locked()->unlocked_caller)) {
    add_problem(std::string(name) + " with the GIL");
  }
}

}  // namespace

cudaError_t begin_call(const char* name, unsigned flags, const void* caller) {
  if (is_forked_child()) return fail(cudaErrorInitializationError);
  state().pid = getpid();
  check_gil(name, caller);
  {
    Locked s;
    const auto found = s->failures.find(name);
    const bool fails = found != s->failures.end();
    const bool is_watched = (s->logging || fails) && is_from(caller, s->watched_caller);
    if (is_watched && s->logging) s->log.emplace_back(name);
    if (is_watched && fails && --found->second.countdown == 0) {
      ++s->num_failed;
      return fail(found->second.error);
    }
  }
  if (flags & kOpensContext) {
    open_context(thread_device);
    if (device_failure() != cudaSuccess) return fail(device_failure());
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
  Locked s;
  if (s->problems.size() < kMaxProblems) s->problems.push_back(text);
}

std::vector<std::string> take_problems() {
  return std::exchange(Locked()->problems, {});
}

void inject_failure(const std::string& name, int nth, cudaError_t error) {
  Locked s;
  s->failures.erase(name);
  if (nth != 0) s->failures[name] = {nth, error};
}

void set_watched_caller(const std::string& path_part) {
  Locked()->watched_caller = path_part;
}

void set_unlocked_caller(const std::string& path_part) {
  Locked()->unlocked_caller = path_part;
}

uint64_t num_injected() { return Locked()->num_failed; }

void log_calls(bool on) {
  Locked s;
  s->logging = on;
  if (on) s->log.clear();
}

std::vector<std::string> logged_calls() { return Locked()->log; }

void reset_calls() {
  Locked s;
  s->failures.clear();
  s->watched_caller.clear();
  s->unlocked_caller = kExtension;
  s->logging = false;
  s->log.clear();
  s->device_failure = cudaSuccess;
  thread_error = cudaSuccess;
}

}  // namespace fakecuda
