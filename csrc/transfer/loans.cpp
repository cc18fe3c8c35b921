#include "transfer/loans.h"

#include <algorithm>
#include <utility>

namespace pyparallel::transfer {

void Loans::make_room(int64_t nbytes, const Stream& stream) {
  events_->check_usable();
  const std::lock_guard<std::mutex> turn(turn_);
  record_each();
  free_done();
  while (is_over(nbytes, stream) && free_oldest(stream)) {
  }
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
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (turn) record_each();
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

void Loans::free_all() noexcept {
  if (events_->forked()) return;
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (!turn) return;
  try {
    record_each();
    free_done();
    while (!waiting_.empty() && free_oldest(waiting_.front()->stream_)) {
    }
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

bool Loans::is_over(int64_t nbytes, const Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Account* const counts = account(stream);
  return counts->dropped > counts->lent + nbytes;
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
    if (!record(loan.get(), &recorded)) lost_.push_back(std::move(loan));
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
    if (runtime_->is_capturing(user)) return nullptr;
    return recorded->emplace_back(events_->record(user));
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

// Removes the events that are done.
void Loans::free_done() {
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
  free_unused();
}

// Frees the loans that no event or user keeps.
void Loans::free_unused() {
  std::vector<LoanRef> unused;
  std::deque<LoanRef> used;
  for (LoanRef& loan : waiting_) {
    const bool is_used = !loan->events_.empty() || !loan->users_.empty();
    if (is_used) {
      used.push_back(std::move(loan));
    } else {
      unused.push_back(std::move(loan));
    }
  }
  waiting_ = std::move(used);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const LoanRef& loan : unused) account(loan->stream_)->dropped -= loan->nbytes_;
}

// Returns false if no memory of the stream waits for events alone.
bool Loans::free_oldest(const Stream& stream) {
  const auto oldest =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const LoanRef& loan) {
        return loan->stream_ == stream && loan->users_.empty();
      });
  if (oldest == waiting_.end()) return false;
  const std::vector<EventRef> awaited = (*oldest)->events_;
  for (const EventRef& event : awaited) {
    runtime_->wait(stream, event->handle());
    for (const LoanRef& loan : waiting_) {  // its order protects these as well
      if (!(loan->stream_ == stream)) continue;
      std::vector<EventRef>& events = loan->events_;
      events.erase(std::remove(events.begin(), events.end(), event), events.end());
    }
  }
  free_unused();
  return true;
}

}  // namespace pyparallel::transfer
