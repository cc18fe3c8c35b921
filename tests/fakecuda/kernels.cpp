#include "kernels.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "allocations.h"
#include "calls.h"
#include "capture.h"
#include "ptx.h"

namespace fakecuda {
namespace {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr unsigned kMaxGridYZ = 65535;
constexpr uint64_t kMaxParameterBytes = 32764;
constexpr size_t kMaxSharedBytes = 48 * 1024;
// torch.cuda._sleep(n): a device of 1 GHz.
constexpr const char* kSleepKernel = "spin_kernel";

using KernelRef = std::shared_ptr<const ptx::Kernel>;

struct State {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
  std::set<std::string> unknown;
  std::once_flag loaded;
  std::map<std::string, KernelRef> kernels;
  std::atomic<uint64_t> num_kernels{0};
};

State& state() {
  static State& instance = *new State;
  return instance;
}

// The names of kernels in anonymous namespaces contain hashes that differ between the
// extension and its PTX.
std::string without_hashes(const std::string& name) {
  static const std::regex hashes(
      "_GLOBAL__N__[0-9a-f]{8}_([0-9]+_[A-Za-z0-9_]+_cu)_[0-9a-f]{8}");
  return std::regex_replace(name, hashes, "_GLOBAL__N__$1");
}

void load_file(State& s, const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("cannot be read");
  for (const auto& [name, kernel] : ptx::parse(text.str())) {
    s.kernels[without_hashes(name)] = kernel;
  }
}

void load_files(State& s) {
  const char* const paths = getenv("FAKECUDA_PTX");
  std::stringstream list(paths == nullptr ? "" : paths);
  std::string path;
  while (std::getline(list, path, ':')) {
    try {
      load_file(s, path);
    } catch (const std::exception& error) {
      add_problem("FAKECUDA_PTX: " + path + ": " + error.what());
    }
  }
}

KernelRef find_kernel(const char* name) {
  State& s = state();
  std::call_once(s.loaded, load_files, std::ref(s));
  const auto found = s.kernels.find(without_hashes(name));
  return found == s.kernels.end() ? nullptr : found->second;
}

std::string demangled(const char* name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  const std::string readable = text != nullptr ? text : name;
  std::free(text);
  return readable;
}

// Accepts accesses inside of one allocation that the device may access.
class CheckedMemory final : public ptx::Memory {
 public:
  explicit CheckedMemory(int device) : device_(device) {}

  void access(uint64_t address, int nbytes, bool write,
              const std::string& instruction) override {
    const uint64_t end = address + static_cast<uint64_t>(nbytes);
    if (address >= begin_ && end <= end_) return;
    const auto found = find_allocation(address);
    if (!found || end > found->end()) {
      const char* const state = is_freed(address) ? "freed" : "unallocated";
      refuse(address, nbytes, write, instruction, state);
    }
    if (!found->is_host() && found->device != device_) {
      refuse(address, nbytes, write, instruction, "another device's");
    }
    begin_ = found->begin;
    end_ = found->end();
  }

 private:
  [[noreturn]] void refuse(uint64_t address, int nbytes, bool write,
                           const std::string& instruction, const char* state) const {
    std::ostringstream text;
    text << (write ? "write" : "read") << " of " << nbytes << " bytes at 0x" << std::hex
         << address << ", " << state << " memory: " << instruction;
    throw std::runtime_error(text.str());
  }

  const int device_;
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
};

// The parameters of a launch, copied when it was queued.
struct Arguments {
  std::vector<std::vector<uint64_t>> values;

  Arguments(const ptx::Kernel& kernel, void** arguments) {
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
      const size_t nbytes = kernel.parameters[i].nbytes;
      values.emplace_back(nbytes / sizeof(uint64_t) + 1);
      memcpy(values.back().data(), arguments[i], nbytes);
    }
  }
};

void run(const KernelRef& kernel, const Arguments& arguments, const Launch& launch,
         int device) {
  std::vector<void*> pointers;
  for (const auto& value : arguments.values) {
    pointers.push_back(const_cast<uint64_t*>(value.data()));
  }
  CheckedMemory memory(device);
  const ptx::Grid grid{{launch.grid.x, launch.grid.y, launch.grid.z},
                       {launch.block.x, launch.block.y, launch.block.z}};
  try {
    ptx::run(*kernel, grid, pointers.data(), memory);
    ++state().num_kernels;
  } catch (const std::exception& error) {
    add_problem(demangled(kernel->name.c_str()) + " failed: " + error.what());
    break_device(cudaErrorIllegalAddress);
  }
}

cudaError_t check_shape(const Launch& launch, const std::string& name) {
  const dim3& grid = launch.grid;
  const dim3& block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x != 0 && grid.y != 0 && grid.z != 0 && grid.y <= kMaxGridYZ &&
      grid.z <= kMaxGridYZ && threads != 0 && threads <= kMaxBlockThreads &&
      launch.shared_bytes <= kMaxSharedBytes) {
    return cudaSuccess;
  }
  add_problem("launch of " + name + " with an invalid grid, block or shared memory");
  return cudaErrorInvalidConfiguration;
}

cudaError_t submit_sleep(Stream* stream, void** arguments) {
  const std::chrono::nanoseconds time(*static_cast<const int64_t*>(arguments[0]));
  return submit(stream, [time] { std::this_thread::sleep_for(time); });
}

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

void register_kernel(const void* host_function, const char* mangled_name) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.names[host_function] = mangled_name;
}

cudaError_t launch_kernel(const void* host_function, const Launch& launch,
                          void** arguments) {
  State& s = state();
  const char* name = nullptr;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.names.find(host_function);
    if (found == s.names.end()) return cudaErrorInvalidDeviceFunction;
    name = found->second;
  }
  Stream* const stream = find_stream(launch.stream, "cudaLaunchKernel");
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->device != current_device()) {
    add_problem("launch of " + demangled(name) + " on a stream of another device");
    return cudaErrorInvalidResourceHandle;
  }
  const cudaError_t error = check_shape(launch, demangled(name));
  if (error != cudaSuccess) return error;
  const KernelRef kernel = find_kernel(name);
  if (kernel == nullptr) {
    if (strstr(name, kSleepKernel) != nullptr) return submit_sleep(stream, arguments);
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.unknown.insert(demangled(name));
    return submit(stream, [] {});
  }
  if (kernel->parameter_bytes > kMaxParameterBytes) {
    add_problem("launch of " + demangled(name) + " with " +
                std::to_string(kernel->parameter_bytes) + " bytes of parameters");
    return cudaErrorInvalidValue;
  }
  const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (kernel->max_threads != 0 && threads > kernel->max_threads) {
    return cudaErrorLaunchOutOfResources;
  }
  const Arguments values(*kernel, arguments);
  const int device = stream->device;
  return submit(stream, [=] { run(kernel, values, launch, device); });
}

std::vector<std::string> take_unknown_kernels() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto names = std::exchange(s.unknown, {});
  return {names.begin(), names.end()};
}

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

uint64_t num_interpreted_kernels() { return state().num_kernels; }

}  // namespace fakecuda
