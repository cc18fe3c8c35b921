#include "allocations.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "calls.h"

namespace fakecuda {
namespace {

constexpr size_t kPage = 4096;
// Freed ranges whose addresses stay reserved.
constexpr size_t kMaxFreed = 4096;

struct Range {
  uintptr_t begin;
  size_t nbytes;
};

struct State {
  mutable std::shared_mutex mutex;
  std::map<uintptr_t, Allocation> live;
  std::deque<Range> freed;
  uint64_t next_id = 1;
  std::map<int, size_t> device_nbytes;
};

State& state() {
  static State& instance = *new State;
  return instance;
}

size_t whole_pages(size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

std::string hex(uintptr_t address) {
  char text[32];
  snprintf(text, sizeof text, "%#lx", static_cast<unsigned long>(address));
  return text;
}

// With an inaccessible page on either side.
void* map_memory(size_t nbytes) {
  const size_t inner = whole_pages(nbytes);
  void* const outer = mmap(nullptr, inner + 2 * kPage, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (outer == MAP_FAILED) return nullptr;
  void* const memory = static_cast<char*>(outer) + kPage;
  if (mprotect(memory, inner, PROT_READ | PROT_WRITE) != 0) return nullptr;
  memset(memory, kFreshByte, inner);
  return memory;
}

// Gives the pages back and keeps the addresses, until many more were freed.
void retire(State& s, const Allocation& allocation) {
  const size_t inner = whole_pages(allocation.nbytes);
  mmap(reinterpret_cast<void*>(allocation.begin), inner, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  s.freed.push_back({allocation.begin, allocation.nbytes});
  if (s.freed.size() <= kMaxFreed) return;
  const Range oldest = s.freed.front();
  s.freed.pop_front();
  munmap(reinterpret_cast<void*>(oldest.begin - kPage),
         whole_pages(oldest.nbytes) + 2 * kPage);
}

Allocation* find_locked(State& s, uintptr_t address) {
  auto after = s.live.upper_bound(address);
  if (after == s.live.begin()) return nullptr;
  Allocation& found = std::prev(after)->second;
  return address < found.end() ? &found : nullptr;
}

void add_locked(State& s, Allocation allocation) {
  allocation.id = s.next_id++;
  allocation.uses = std::make_shared<std::atomic<int>>(0);
  s.live[allocation.begin] = std::move(allocation);
}

void check_unused(const Allocation& allocation, const char* name) {
  if (*allocation.uses == 0) return;
  add_problem(std::string(name) + " of " + hex(allocation.begin) +
              ", which queued work still uses");
}

}  // namespace

void* allocate(Kind kind, size_t nbytes, int device) {
  State& s = state();
  const bool on_device = kind == Kind::kDevice;
  {
    const std::lock_guard<std::shared_mutex> lock(s.mutex);
    size_t& used = s.device_nbytes[device];
    if (on_device && used + nbytes > kDeviceNbytes) return nullptr;
    if (on_device) used += nbytes;
  }
  void* const memory = map_memory(nbytes);
  if (memory == nullptr) return nullptr;
  const std::lock_guard<std::shared_mutex> lock(s.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  add_locked(s, {0, begin, nbytes, kind, device, nullptr});
  return memory;
}

cudaError_t free_allocation(Kind kind, void* pointer) {
  State& s = state();
  const std::lock_guard<std::shared_mutex> lock(s.mutex);
  const auto found = s.live.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == s.live.end() || found->second.kind != kind) return cudaErrorInvalidValue;
  check_unused(found->second, kind == Kind::kDevice ? "cudaFree" : "cudaFreeHost");
  if (kind == Kind::kDevice) {
    s.device_nbytes[found->second.device] -= found->second.nbytes;
  }
  retire(s, found->second);
  s.live.erase(found);
  return cudaSuccess;
}

cudaError_t register_host(void* pointer, size_t nbytes, int device) {
  if (pointer == nullptr || nbytes == 0) return cudaErrorInvalidValue;
  State& s = state();
  const std::lock_guard<std::shared_mutex> lock(s.mutex);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  const auto next = s.live.lower_bound(begin);
  if (find_locked(s, begin) != nullptr ||
      (next != s.live.end() && next->first < begin + nbytes)) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  add_locked(s, {0, begin, nbytes, Kind::kRegistered, device, nullptr});
  return cudaSuccess;
}

cudaError_t unregister_host(void* pointer) {
  State& s = state();
  const std::lock_guard<std::shared_mutex> lock(s.mutex);
  const auto found = s.live.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == s.live.end() || found->second.kind != Kind::kRegistered) {
    return cudaErrorHostMemoryNotRegistered;
  }
  check_unused(found->second, "cudaHostUnregister");
  s.live.erase(found);
  return cudaSuccess;
}

std::optional<Allocation> find_allocation(uintptr_t address) {
  State& s = state();
  const std::shared_lock<std::shared_mutex> lock(s.mutex);
  const Allocation* const found = find_locked(s, address);
  if (found == nullptr) return std::nullopt;
  return *found;
}

bool is_alive(const Allocation& allocation) {
  const auto found = find_allocation(allocation.begin);
  return found && found->id == allocation.id;
}

bool is_freed(uintptr_t address) {
  const State& s = state();
  const std::shared_lock<std::shared_mutex> lock(s.mutex);
  for (const Range& range : s.freed) {
    if (address >= range.begin && address < range.begin + range.nbytes) return true;
  }
  return false;
}

size_t device_nbytes(int device) {
  State& s = state();
  const std::lock_guard<std::shared_mutex> lock(s.mutex);
  return s.device_nbytes[device];
}

}  // namespace fakecuda
