#include "transfer/events.h"

#include <pthread.h>

#include <atomic>
#include <new>
#include <stdexcept>

namespace pyparallel::transfer {
namespace {

// The forks between the process that loaded this module and this one. getpid() is a
// call of the system, and one batch asks about ten times.
std::atomic<int64_t> num_forks{0};
[[maybe_unused]] const int counts_forks =
    pthread_atfork(nullptr, nullptr, [] { ++num_forks; });

}  // namespace

RecordedEvent::~RecordedEvent() { events_->give(event_); }

Events::Events(Runtime* runtime) : runtime_(runtime), forks_before_(num_forks) {}

EventRef Events::record(const Stream& stream) {
  // Made first, so that the event is recycled even if the record fails.
  const auto recorded =
      std::make_shared<const RecordedEvent>(this, take(stream.device), stream);
  runtime_->record(recorded->handle(), stream);
  return recorded;
}

// The second check finds a capture that began before the record: its event would belong
// to the graph. To record it changes no graph.
EventRef Events::record_outside_captures(const Stream& stream) {
  if (runtime_->is_capturing(stream)) return nullptr;
  EventRef event = record(stream);
  return runtime_->is_capturing(stream) ? nullptr : event;
}

bool Events::forked() const { return num_forks != forks_before_; }

void Events::check_usable() const {
  if (!forked()) return;
  throw std::runtime_error(
      "send: copies must be queued by the process that queued the first one, but this "
      "one was forked from it. Start processes that use a device by spawn.");
}

int64_t Events::num_created() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_created_;
}

int64_t Events::num_idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t num = 0;
  for (const auto& each : idle_) num += static_cast<int64_t>(each.second.size());
  return num;
}

Event Events::take(int64_t device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Event>& idle = idle_[device];
    if (!idle.empty()) {
      const Event event = idle.back();
      idle.pop_back();
      return event;
    }
    ++num_created_;
  }
  return runtime_->create_event(device);
}

void Events::give(const Event& event) noexcept {
  // A thread of the parent may have held the mutex at the fork.
  if (forked()) return;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_[event.device].push_back(event);
  } catch (const std::bad_alloc&) {
    // One event is not recycled.
  }
}

}  // namespace pyparallel::transfer
