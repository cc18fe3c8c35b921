// Recycled events. Creating one costs as much as a copy, so each is used again as soon
// as nobody asks for what it marked.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/runtime.h"

namespace pyparallel::transfer {

class Events;

// A place in the work of one stream; gives its event back when nobody refers to it.
class Mark {
 public:
  Mark(Events* events, const Event& event, const Stream& stream)
      : events_(events), event_(event), stream_(stream) {}
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  const Event& event() const { return event_; }
  const Stream& stream() const { return stream_; }

 private:
  Events* events_;
  Event event_;
  Stream stream_;
};

using MarkRef = std::shared_ptr<const Mark>;

// Outlives all of its marks.
class Events {
 public:
  explicit Events(Runtime* runtime);

  // Marks all that is queued on `stream` now.
  MarkRef record(const Stream& stream);

  // True in a process forked from the one that made this.
  bool forked() const;
  // Throws in such a process.
  void check_usable() const;

  int64_t num_created() const;
  int64_t num_idle() const;

 private:
  friend class Mark;
  Event take(int64_t device);
  void give(const Event& event) noexcept;

  Runtime* runtime_;
  int64_t pid_;
  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<Event>> idle_;  // by device
  int64_t num_created_ = 0;
};

}  // namespace pyparallel::transfer
