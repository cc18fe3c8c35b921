// The end of the work that a thread has queued, for memory that copies of others read.
//
// Note: [fences and captures]
// An event that is recorded on a stream under capture belongs to the graph: it can
// never be asked. So an event of such a stream is recorded when the capture is over. It
// comes later than necessary, and covers all work from before the capture.
#pragma once

#include <mutex>
#include <vector>

#include "transfer/events.h"
#include "transfer/runtime.h"

namespace pyparallel::transfer {

// Outlived by its runtime and its events.
class Fence {
 public:
  // Stands behind all that is queued now on the current streams of this thread.
  Fence(Runtime* runtime, Events* events);

  // Whether all of that is done; the host does not wait. From any thread.
  bool is_done();

 private:
  struct Part {
    Stream stream;
    MarkRef mark;  // null: the stream was under capture
  };

  void record(Part* part);

  Runtime* runtime_;
  Events* events_;
  std::mutex mutex_;
  std::vector<Part> parts_;  // those that are not known to be done
};

}  // namespace pyparallel::transfer
