// Copies that other code queues from memory that is pinned here.
//
// Note: [foreign copies]
// The owner of pinned memory may reuse it when all copies that read it are done. Users
// of the memory queue copies on streams that the owner does not know. A wait for the
// whole device would cover them, but it ends each graph capture that another thread
// begins meanwhile, in every capture mode. It would also wait for all later work. So an
// event is recorded behind each copy, on the stream of the copy, by the thread that
// queued it. Such an event cannot become part of a capture that another thread begins.
//
// A copy under capture runs whenever its graph is replayed, so its end is unknown. The
// same applies if the device accepts no event.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/events.h"
#include "transfer/fence.h"
#include "transfer/runtime.h"

namespace pyparallel::transfer {

// Its runtime and its events must outlive it. Thread-safe.
class ForeignCopies final : public CopyObserver {
 public:
  ForeignCopies(Runtime* runtime, Events* events);

  // Tracks memory from now on, until `remove`. Ranges are disjoint.
  void add(const void* data, int64_t nbytes);
  void remove(const void* data);

  bool on_copy(const void* data, const Stream& stream) noexcept override;

  // Returns a fence behind the copies of a range since the last call; null if their end
  // is unknown. Throws if `data` is not the start of a range.
  std::unique_ptr<Fence> take(const void* data);

 private:
  struct Range {
    uintptr_t end;
    std::mutex mutex;              // of the members below; held during records
    std::vector<EventRef> events;  // one for each stream
    bool is_endless = false;
  };
  using RangeRef = std::shared_ptr<Range>;

  // Returns the range that contains an address, or null.
  RangeRef find(uintptr_t address);
  void record(const Stream& stream, std::vector<EventRef>* events);

  Runtime* runtime_;
  Events* events_;
  std::mutex mutex_;
  std::map<uintptr_t, RangeRef> ranges_;  // by their start
};

}  // namespace pyparallel::transfer
