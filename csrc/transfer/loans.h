// Device memory of batches: it returns to the stream that allocated it, after the work
// of the streams that use it.
//
// Note: [device memory]
// The memory of a batch belongs to the stream of its copy. Earlier copies of that
// stream are the only work that its order protects, so a copy waits for no step. The
// streams of consumers are its users. When a batch is dropped, an event is recorded on
// each user, and the memory is freed after all of these events.
//
// A host may run far ahead of the device. Then memory is dropped, but its events are
// not done. As many bytes may wait in this state as are lent, including the new batch.
// Beyond that, the stream of the copy waits for the oldest events, which frees their
// memory at once: later copies follow in the order of the stream. The host never waits.
// So the memory of one stream is at most twice the lent memory, and a copy waits for no
// step that is fewer batches behind it than are alive. When torch's allocator has no
// block left, all dropped memory is freed in this way.
//
// A destructor drops a batch, in any thread, with any lock held. So it only appends to
// a list, and the next batch that is sent or received records the events. They may
// cover more work than necessary, but never less. A stream under capture gets its event
// after the capture. If no event can be recorded, the end of the work is unknown, and
// the memory is never freed.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/events.h"
#include "transfer/runtime.h"

namespace pyparallel::transfer {

// The memory of one tensor. A subclass has the memory, and its destructor frees it to
// `stream`.
class Loan {
 public:
  Loan(const Stream& stream, int64_t nbytes) : stream_(stream), nbytes_(nbytes) {}
  virtual ~Loan() = default;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

 private:
  friend class Loans;

  Stream stream_;
  int64_t nbytes_;
  std::vector<Stream> users_;     // whose work has no event yet
  std::vector<EventRef> events_;  // behind the work of the others
  Loan* next_ = nullptr;          // the one that was dropped before
};

// Must outlive its loans.
class Loans {
 public:
  // The events must outlive it.
  Loans(Runtime* runtime, Events* events) : runtime_(runtime), events_(events) {}

  // Call this before an allocation on `stream`, which must not be under capture. It
  // frees dropped memory, and makes `stream` wait at the limit.
  void make_room(int64_t nbytes, const Stream& stream);

  // Counts an allocated loan until it is dropped.
  void lend(const Loan& loan);

  // Protects the memory from reuse until `stream` has done the work that is queued
  // there when the loan is dropped.
  void use(Loan* loan, const Stream& stream);

  // Records the events of dropped loans. Call this when batches are sent or received.
  void record_dropped();

  // Calls no device, unless the loan has no user.
  void drop(std::unique_ptr<Loan> loan) noexcept;

  // Frees the memory of all dropped loans; their streams wait for the users. Does
  // nothing while another thread makes room.
  void free_all() noexcept;

  struct Info {
    int64_t lent_nbytes;
    int64_t dropped_nbytes;  // whose users may still work
  };
  Info info(const Stream& stream) const;

 private:
  struct Account {
    Stream stream;
    int64_t lent = 0;
    int64_t dropped = 0;
  };
  using LoanRef = std::unique_ptr<Loan>;

  Account* account(const Stream& stream);
  bool is_over(int64_t nbytes, const Stream& stream);
  void record_each();
  bool record(Loan* loan, std::vector<EventRef>* recorded);
  void free_done();
  void free_unused();
  bool free_oldest(const Stream& stream);

  Runtime* runtime_;
  Events* events_;
  mutable std::mutex mutex_;
  std::deque<Account> accounts_;  // one for each stream
  Loan* last_dropped_ = nullptr;  // a list, so that a drop allocates nothing
  // Guards the rest, also during calls to the device. The thread that has it may wait
  // for the lock of torch's allocator. So a thread that may have that lock tries only.
  std::mutex turn_;
  std::deque<LoanRef> waiting_;  // in the order of the drops
  std::vector<LoanRef> lost_;    // without an event: never freed
};

}  // namespace pyparallel::transfer
