#include "transfer/loans.h"

#include <algorithm>
#include <utility>

namespace pyparallel::transfer {
namespace {

// The part of a device's memory that may always wait for users.
constexpr int64_t kWaitingShare = 32;

constexpr int64_t kAllDevices = -1;

}  // namespace

void Loans::make_room(int64_t nbytes, const Stream& stream) {
  events_->check_usable();
  std::vector<LoanRef> unused;
  const std::lock_guard<std::mutex> turn(turn_);
  record_each();
  take_done(kAllDevices, &unused);
  take_excess(nbytes, stream, &unused);
}

void Loans::lend(const Loan& loan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  account(loan.stream_)->lent += loan.nbytes_;
}

void Loans::use(Loan* loan, const Stream& stream) {
  events_->check_usable();
  if (stream == loan->stream_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream>& users = loan->users_;
  if (std::find(users.begin(), users.end(), stream) == users.end()) {
    users.push_back(stream);
  }
}

void Loans::record_dropped() {
  events_->check_usable();
  const std::lock_guard<std::mutex> turn(turn_);
  record_each();
}

void Loans::drop(LoanRef loan) noexcept {
  // A child cannot use the memory, and a thread of the parent may hold the mutex.
  if (events_->forked()) return static_cast<void>(loan.release());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Account* const counts = account(loan->stream_);
    counts->lent -= loan->nbytes_;
    if (!loan->users_.empty()) {
      counts->dropped += loan->nbytes_;
      loan->next_ = last_dropped_;
      last_dropped_ = loan.release();
    }
  }
}

// See Note: [locks of allocators].
void Loans::reclaim(int64_t device, const Stream* full) noexcept {
  if (events_->forked()) return;
  std::vector<LoanRef> unused;
  std::vector<LoanRef> given;
  try {
    {
      const std::lock_guard<std::mutex> turn(turn_);
      record_each();
      take_done(device, &unused);
      while (full != nullptr && take_oldest(*full, &unused)) {
      }
      for (const Stream& stream : streams(device)) {
        // A wait for work outside of a capture would end the capture.
        if (!runtime_->is_capturing(stream)) take_excess(0, stream, &unused);
      }
      take_rest(device, &given);
    }
    for (LoanRef& loan : given) give(std::move(loan));
  } catch (...) {
    // The caller has no memory left, and reports that.
  }
}

Loans::Info Loans::info(const Stream& stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Account& each : accounts_) {
    if (each.stream == stream) return {each.lent, each.dropped};
  }
  return {0, 0};
}

// Needs the mutex.
Loans::Account* Loans::account(const Stream& stream) {
  for (Account& each : accounts_) {
    if (each.stream == stream) return &each;
  }
  accounts_.push_back({stream});
  return &accounts_.back();
}

std::vector<Stream> Loans::streams(int64_t device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Stream> found;
  for (const Account& each : accounts_) {
    if (each.stream.device == device) found.push_back(each.stream);
  }
  return found;
}

bool Loans::is_over(int64_t nbytes, const Stream& stream) {
  const int64_t share = runtime_->memory_size(stream.device) / kWaitingShare;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Account* const counts = account(stream);
  return counts->dropped > std::max(counts->lent + nbytes, share);
}

void Loans::record_each() {
  Loan* last = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = std::exchange(last_dropped_, nullptr);
  }
  const auto num_before = static_cast<int64_t>(waiting_.size());
  for (; last != nullptr; last = last->next_) waiting_.emplace_back(last);
  std::reverse(waiting_.begin() + num_before, waiting_.end());
  std::vector<EventRef> recorded;
  for (LoanRef& loan : waiting_) {
    if (record(loan.get(), &recorded)) continue;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      account(loan->stream_)->dropped -= loan->nbytes_;  // no copy can wait for it
    }
    lost_.push_back(std::move(loan));
  }
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), nullptr),
                 waiting_.end());
}

// Records an event on each user that is not under capture. Returns false if that fails.
bool Loans::record(Loan* loan, std::vector<EventRef>* recorded) {
  const auto event_of = [&](const Stream& user) -> EventRef {
    for (const EventRef& each : *recorded) {
      if (each->stream() == user) return each;
    }
    EventRef event = events_->record_outside_captures(user);
    if (event != nullptr) recorded->push_back(event);
    return event;
  };
  try {
    std::vector<Stream> captured;
    for (const Stream& user : loan->users_) {
      if (const EventRef event = event_of(user)) {
        loan->events_.push_back(event);
      } else {
        captured.push_back(user);
      }
    }
    loan->users_ = std::move(captured);
    return true;
  } catch (...) {
    return false;
  }
}

// Removes the events that are done. Appends the loans of a device, or of all, that need
// no event any more.
void Loans::take_done(int64_t device, std::vector<LoanRef>* unused) {
  std::vector<const RecordedEvent*> pending;
  const auto is_done = [&](const EventRef& event) {
    const auto found = std::find(pending.begin(), pending.end(), event.get());
    if (found != pending.end()) return false;
    try {
      if (runtime_->is_done(event->handle())) return true;
    } catch (...) {
      // The device failed, so nothing is reused.
    }
    pending.push_back(event.get());
    return false;
  };
  for (const LoanRef& loan : waiting_) {
    std::vector<EventRef>& events = loan->events_;
    events.erase(std::remove_if(events.begin(), events.end(), is_done), events.end());
  }
  take_unused(device, unused);
}

// Appends the loans of a device, or of all, that no event or user keeps.
void Loans::take_unused(int64_t device, std::vector<LoanRef>* unused) {
  std::deque<LoanRef> kept;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (LoanRef& loan : waiting_) {
    const bool is_other = device != kAllDevices && loan->stream_.device != device;
    if (is_other || !loan->events_.empty() || !loan->users_.empty()) {
      kept.push_back(std::move(loan));
    } else {
      account(loan->stream_)->dropped -= loan->nbytes_;
      unused->push_back(std::move(loan));
    }
  }
  waiting_ = std::move(kept);
}

// Makes the stream wait until its dropped memory is within the limit.
void Loans::take_excess(int64_t nbytes, const Stream& stream,
                        std::vector<LoanRef>* unused) {
  while (is_over(nbytes, stream) && take_oldest(stream, unused)) {
  }
}

// Makes the stream wait for the users of its oldest memory. Returns false if no memory
// of the stream waits for events alone.
bool Loans::take_oldest(const Stream& stream, std::vector<LoanRef>* unused) {
  const auto follows = [&](const LoanRef& loan) {
    return loan->stream_ == stream && !loan->is_given_;
  };
  const auto oldest = std::find_if(
      waiting_.begin(), waiting_.end(),
      [&](const LoanRef& loan) { return follows(loan) && loan->users_.empty(); });
  if (oldest == waiting_.end()) return false;
  const std::vector<EventRef> awaited = (*oldest)->events_;
  for (const EventRef& event : awaited) {
    runtime_->wait(stream, event->handle());
    for (const LoanRef& loan : waiting_) {  // its order protects these as well
      if (!follows(loan)) continue;
      std::vector<EventRef>& events = loan->events_;
      events.erase(std::remove(events.begin(), events.end(), event), events.end());
    }
  }
  take_unused(stream.device, unused);
  return true;
}

// Appends the loans of a device that wait for events alone, and counts them until these
// are done.
void Loans::take_rest(int64_t device, std::vector<LoanRef>* given) {
  given->reserve(waiting_.size());
  for (LoanRef& loan : waiting_) {
    if (loan->stream_.device != device || !loan->can_give()) continue;
    if (loan->is_given_ || !loan->users_.empty()) continue;
    auto counted = std::make_unique<Loan>(loan->stream_, loan->nbytes_);
    counted->events_ = loan->events_;
    counted->is_given_ = true;
    given->push_back(std::exchange(loan, std::move(counted)));
  }
}

// If the allocator does not accept the users, the memory is never freed.
void Loans::give(LoanRef loan) noexcept {
  try {
    std::vector<Stream> users;
    for (const EventRef& event : loan->events_) users.push_back(event->stream());
    loan->give(users);
  } catch (...) {
    static_cast<void>(loan.release());
  }
}

}  // namespace pyparallel::transfer
