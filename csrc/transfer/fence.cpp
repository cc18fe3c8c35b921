#include "transfer/fence.h"

#include <utility>

namespace pyparallel::transfer {

Fence::Fence(Runtime* runtime, Events* events) : runtime_(runtime), events_(events) {
  events_->check_usable();
  for (const Stream& stream : runtime_->current_streams()) {
    parts_.push_back({stream, nullptr});
    record(&parts_.back());
  }
}

Fence::Fence(Runtime* runtime, Events* events, std::vector<EventRef> recorded)
    : runtime_(runtime), events_(events) {
  for (EventRef& event : recorded) {
    const Stream stream = event->stream();
    parts_.push_back({stream, std::move(event)});
  }
}

bool Fence::is_done() {
  events_->check_usable();  // before the mutex: a thread may have held it at a fork
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!parts_.empty()) {
    Part& part = parts_.back();
    if (part.event == nullptr) record(&part);
    if (part.event == nullptr || !runtime_->is_done(part.event->handle())) return false;
    parts_.pop_back();
  }
  return true;
}

// See Note: [fences and captures].
void Fence::record(Part* part) {
  part->event = events_->record_outside_captures(part->stream);
}

}  // namespace pyparallel::transfer
