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
// not done. As many bytes may wait in this state as are lent, including the new batch,
// or a small share of the device's memory, if that is more. Beyond that, the stream of
// the copy waits for the oldest events, which frees their memory at once: later copies
// follow in the order of the stream. The host does not wait.
//
// Torch's allocator asks for memory before it asks the device. It does not say how
// much it needs, or whether the device has it. So memory that waits goes to the
// allocator together with its users. The allocator reuses it after their work, and
// waits for that only before it reports that no memory is left. No copy waits. The
// memory still counts as dropped, so the limit holds. If the memory is for a batch, and
// the device has too little, the stream of the copy waits instead. Otherwise the
// allocator would return its whole cache to the device, for each batch.
//
// A destructor drops a batch, in any thread, with any lock held. So it only appends to
// a list, and the next batch that is sent or received records the events. They may
// cover more work than necessary, but never less. A stream under capture gets its event
// after the capture. If no event can be recorded, the end of the work is unknown, and
// the memory is never freed.
//
// Note: [locks of allocators]
// Torch's allocator has a lock for each device, and holds it while it asks for memory.
// Two threads may ask for memory of two devices. If one of them freed memory of the
// other device, it would wait for the lock of the other thread. So only memory of the
// device that has none is freed then.
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
  // Returns false if the memory may only be freed after its users.
  virtual bool can_give() const { return true; }
  // Frees the memory to an allocator that waits for these streams.
  virtual void give(const std::vector<Stream>& /*users*/) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

 private:
  friend class Loans;

  Stream stream_;
  int64_t nbytes_;
  std::vector<Stream> users_;     // whose work has no event yet
  std::vector<EventRef> events_;  // behind the work of the others
  bool is_given_ = false;         // only counts: the allocator has the memory
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

  // For an allocator without a free block on a device: gives it all dropped memory of
  // this device. If `full` is not null, first frees the memory of this stream, which
  // waits for the users.
  void reclaim(int64_t device, const Stream* full = nullptr) noexcept;

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
  std::vector<Stream> streams(int64_t device) const;
  bool is_over(int64_t nbytes, const Stream& stream);
  void record_each();
  bool record(Loan* loan, std::vector<EventRef>* recorded);
  void take_done(int64_t device, std::vector<LoanRef>* unused);
  void take_unused(int64_t device, std::vector<LoanRef>* unused);
  bool take_oldest(const Stream& stream, std::vector<LoanRef>* unused);
  void take_excess(int64_t nbytes, const Stream& stream, std::vector<LoanRef>* unused);
  void take_rest(int64_t device, std::vector<LoanRef>* given);
  static void give(LoanRef loan) noexcept;

  Runtime* runtime_;
  Events* events_;
  mutable std::mutex mutex_;
  std::deque<Account> accounts_;  // one for each stream
  Loan* last_dropped_ = nullptr;  // a list, so that a drop allocates nothing
  // Guards the rest, also during calls to the device. A thread that waits for it may
  // have the lock of torch's allocator. So memory is freed without it.
  std::mutex turn_;
  std::deque<LoanRef> waiting_;  // in the order of the drops
  std::vector<LoanRef> lost_;    // without an event: never freed
};

}  // namespace pyparallel::transfer
