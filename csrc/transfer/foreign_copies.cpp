#include "transfer/foreign_copies.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pyparallel::transfer {
namespace {

uintptr_t to_address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

ForeignCopies::ForeignCopies(Runtime* runtime, Events* events)
    : runtime_(runtime), events_(events) {}

void ForeignCopies::add(const void* data, int64_t nbytes) {
  events_->check_usable();
  const auto range = std::make_shared<Range>();
  range->end = to_address(data) + static_cast<uintptr_t>(nbytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  ranges_[to_address(data)] = range;
}

void ForeignCopies::remove(const void* data) {
  events_->check_usable();
  const std::lock_guard<std::mutex> lock(mutex_);
  ranges_.erase(to_address(data));
}

bool ForeignCopies::on_copy(const void* data, const Stream& stream) noexcept {
  if (events_->forked()) return false;  // a thread may have held a mutex at the fork
  const RangeRef range = find(to_address(data));
  if (range == nullptr) return false;
  const std::lock_guard<std::mutex> lock(range->mutex);
  try {
    if (runtime_->is_capturing(stream)) {
      range->is_endless = true;
    } else {
      record(stream, &range->events);
    }
  } catch (...) {  // the caller sees an error of the device at its next call
    range->is_endless = true;
  }
  return true;
}

std::unique_ptr<Fence> ForeignCopies::take(const void* data) {
  events_->check_usable();
  const RangeRef range = find(to_address(data));
  if (range == nullptr) {
    throw std::runtime_error(
        "take_copies: address must be pinned by this runtime, but is not. Pin the "
        "memory before its first copy.");
  }
  const std::lock_guard<std::mutex> lock(range->mutex);
  if (range->is_endless) return nullptr;
  return std::make_unique<Fence>(runtime_, events_, std::exchange(range->events, {}));
}

ForeignCopies::RangeRef ForeignCopies::find(uintptr_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return nullptr;
  const RangeRef& range = (--next)->second;
  return address < range->end ? range : nullptr;
}

// A later event of a stream covers its earlier copies, so one event is recorded again.
void ForeignCopies::record(const Stream& stream, std::vector<EventRef>* events) {
  const auto same =
      std::find_if(events->begin(), events->end(),
                   [&](const EventRef& event) { return event->stream() == stream; });
  if (same != events->end()) {
    runtime_->record((*same)->handle(), stream);
  } else {
    events->push_back(events_->record(stream));
  }
}

}  // namespace pyparallel::transfer
