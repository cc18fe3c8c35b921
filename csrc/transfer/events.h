// Recycled events. To create an event costs as much as a copy, so an event is reused as
// soon as its last reference is gone.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/runtime.h"

namespace pyparallel::transfer {

class Events;

// The end of the work that a stream had at one moment. Its destructor recycles the
// event.
class RecordedEvent {
 public:
  RecordedEvent(Events* events, const Event& event, const Stream& stream)
      : events_(events), event_(event), stream_(stream) {}
  ~RecordedEvent();
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  const Event& handle() const { return event_; }
  const Stream& stream() const { return stream_; }

 private:
  Events* events_;
  Event event_;
  Stream stream_;
};

using EventRef = std::shared_ptr<const RecordedEvent>;

// Must outlive the events that it recorded.
class Events {
 public:
  explicit Events(Runtime* runtime);

  // Records an event behind the work that is queued on `stream` now.
  EventRef record(const Stream& stream);
  // The same; null if the stream is under capture. Another thread may begin a capture
  // meanwhile.
  EventRef record_outside_captures(const Stream& stream);

  // Returns true in a process that was forked after the construction.
  bool forked() const;
  // Throws in such a process.
  void check_usable() const;

  int64_t num_created() const;
  int64_t num_idle() const;

 private:
  friend class RecordedEvent;
  Event take(int64_t device);
  void give(const Event& event) noexcept;

  Runtime* runtime_;
  int64_t forks_before_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<Event>> idle_;  // by device
  int64_t num_created_ = 0;
};

}  // namespace pyparallel::transfer
