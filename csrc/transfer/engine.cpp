#include "transfer/engine.h"

#include <stdexcept>
#include <string>

#include "core/boxes.h"

namespace pyparallel::transfer {
namespace {

struct Slots {
  std::vector<Slot> each;
  std::vector<Cast> casts;  // empty if the job has none
};

// Sets *slots to the parts of the job's slots in [begin, end) of the slab. Their
// offsets count from `begin`. All slots before `first` end at or before `begin`.
// Returns the value of `first` for the next, larger `begin`.
int64_t clip_slots(const Job& job, int64_t begin, int64_t end, int64_t first,
                   Slots* slots) {
  const auto end_of = [&](int64_t i) {
    return job.slots[i].offset + job.slots[i].nbytes;
  };
  while (first < job.num_slots && end_of(first) <= begin) ++first;
  slots->each.clear();
  slots->casts.clear();
  for (int64_t i = first; i < job.num_slots && job.slots[i].offset < end; ++i) {
    const Slot& slot = job.slots[i];
    const int64_t from = slot.offset < begin ? begin : slot.offset;
    const int64_t to = lesser(end_of(i), end);
    if (to <= from) continue;
    int64_t done = from - slot.offset;
    if (job.casts != nullptr) {
      slots->casts.push_back(job.casts[i]);
      done *= source_ratio(job.casts[i]);
    }
    slots->each.push_back({slot.src + done, from - begin, to - from});
  }
  return first;
}

}  // namespace

Engine::Engine(Runtime* runtime, PackBytes pack, Limits limits)
    : runtime_(runtime),
      pack_(pack),
      events_(runtime),
      staging_(runtime, limits),
      foreign_(runtime, &events_),
      loans_(runtime, &events_) {}

SendResult Engine::send(const Job& job) {
  events_.check_usable();
  if (!job.is_checked) check_not_capturing(job.stream, "copy");
  SendResult sent;
  try {
    copy_direct(job);
    sent.event = copy_packed(job);
  } catch (...) {
    sent.error = std::current_exception();
  }
  // Also after an error: copies before it may have been queued. Each chunk has an event
  // of its own.
  try {
    if (sent.event == nullptr) sent.event = events_.record(job.stream);
  } catch (...) {
    if (sent.error == nullptr) sent.error = std::current_exception();
  }
  return sent;
}

EventRef Engine::record(const Stream& stream) {
  events_.check_usable();
  return events_.record(stream);
}

std::unique_ptr<Fence> Engine::fence() {
  return std::make_unique<Fence>(runtime_, &events_);
}

int Engine::pin(void* data, int64_t nbytes) {
  events_.check_usable();
  const int error = runtime_->pin(data, nbytes);
  if (error == 0) foreign_.add(data, nbytes);
  return error;
}

void Engine::unpin(void* data) {
  events_.check_usable();
  runtime_->unpin(data);
  foreign_.remove(data);
}

bool Engine::is_done(const RecordedEvent& event) const {
  events_.check_usable();
  return runtime_->is_done(event.handle());
}

void Engine::wait(const Stream& stream, const RecordedEvent& event) const {
  events_.check_usable();
  if (stream == event.stream()) return;  // the stream keeps the order
  check_not_capturing(stream, "waiting");
  runtime_->wait(stream, event.handle());
}

void Engine::wait_on_host(const RecordedEvent& event) const {
  events_.check_usable();
  runtime_->wait_on_host(event.handle());
}

void Engine::set_limit(int64_t max_bytes) {
  if (!events_.forked()) staging_.set_limit(max_bytes);
}

void Engine::check_not_capturing(const Stream& stream, const char* name) const {
  if (!runtime_->is_capturing(stream)) return;
  throw std::runtime_error(std::string("send: the ") + name +
                           " stream must not be under graph capture, but is. Copy "
                           "outside of the capture, into the static tensors of a "
                           "StaticBatches.");
}

void Engine::copy_direct(const Job& job) {
  if (job.num_direct >= kBatchCopies) {
    runtime_->copy_batch(job.direct, job.num_direct, job.stream);
    return;
  }
  for (int64_t i = 0; i < job.num_direct; ++i) {
    runtime_->copy(job.direct[i], job.stream);
  }
}

// Returns the event behind the last chunk; null if there are no chunks.
EventRef Engine::copy_packed(const Job& job) {
  EventRef last;
  Slots slots;
  int64_t first = 0;
  for (int64_t begin = 0; begin < job.nbytes; begin += job.chunk) {
    const int64_t nbytes = lesser(job.chunk, job.nbytes - begin);
    Pack body{nullptr, nbytes, 1, job.slots, job.num_slots, 0, job.casts};
    if (nbytes < job.nbytes) {
      first = clip_slots(job, begin, begin + nbytes, first, &slots);
      body.slots = slots.each.data();
      body.num_slots = static_cast<int64_t>(slots.each.size());
      if (job.casts != nullptr) body.casts = slots.casts.data();
    }
    const Block block = staging_.take(nbytes, job.stream);
    body.dst = block.data();
    try {
      pack_(body);
    } catch (...) {
      staging_.give(block);
      throw;
    }
    last = queue(block, {job.dst + begin, block.data(), nbytes});
  }
  return last;
}

// Abandons the block if no event can be recorded: see Note: [staging lifetime].
EventRef Engine::queue(const Block& block, const Copy& copy) {
  std::exception_ptr error;
  try {
    runtime_->copy(copy, block.stream);
  } catch (...) {  // part of the copy may have been queued
    error = std::current_exception();
  }
  EventRef event;
  try {
    event = events_.record(block.stream);
    staging_.give(block, event);
  } catch (...) {
    staging_.abandon(block);
    if (error == nullptr) throw;
  }
  if (error != nullptr) std::rethrow_exception(error);
  return event;
}

}  // namespace pyparallel::transfer
