// The end of the work that a thread has queued on its streams. It protects memory that
// copies of other code still read.
//
// Note: [fences and captures]
// An event that is recorded on a stream under capture belongs to the graph, and a query
// of it fails. So the event of such a stream is recorded after the capture. That event
// is later than necessary, but it covers all work from before the capture.
#pragma once

#include <mutex>
#include <vector>

#include "transfer/events.h"
#include "transfer/runtime.h"

namespace pyparallel::transfer {

// Its runtime and its events must outlive it.
class Fence {
 public:
  // Covers the work that is queued now on the current streams of this thread.
  Fence(Runtime* runtime, Events* events);
  // Covers the work before these events of `events`.
  Fence(Runtime* runtime, Events* events, std::vector<EventRef> recorded);

  // Returns true if that work is done. The host does not wait. Thread-safe.
  bool is_done();

 private:
  struct Part {
    Stream stream;
    EventRef event;  // null: the stream was under capture
  };

  void record(Part* part);

  Runtime* runtime_;
  Events* events_;
  std::mutex mutex_;
  std::vector<Part> parts_;  // streams whose work may still run
};

}  // namespace pyparallel::transfer
