#include "transfer/staging.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace pyparallel::transfer {
namespace {

static_assert(kSmallestBlock << (kNumBlockSizes - 1) == kLargestBlock,
              "the sizes of blocks end with the largest");

size_t class_for(int64_t nbytes) {
  size_t size_class = 0;
  while (kSmallestBlock << size_class < nbytes) ++size_class;
  return size_class;
}

}  // namespace

Staging::Staging(Runtime* runtime, Limits limits)
    : runtime_(runtime),
      max_idle_(limits.max_idle),
      poison_(limits.poison),
      limit_(limits.max_bytes) {}

Block Staging::take(int64_t nbytes, const Stream& stream) {
  Block block{{}, class_for(nbytes), stream};
  if (take_idle(&block)) return block;
  do {
    collect();
    if (take_idle(&block)) return block;
  } while (!reserve(block));
  try {
    block.memory = runtime_->allocate(block.nbytes(), stream.device);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    nbytes_ -= block.nbytes();
    --find_queue(stream)->num_written;
    changed_.notify_all();
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_allocated_;
  return block;
}

void Staging::give(const Block& block, EventRef event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  StreamQueue* const queue = find_queue(block.stream);
  queue->reading.push_back({block, std::move(event)});
  --queue->num_written;
  changed_.notify_all();
}

void Staging::give(const Block& block) noexcept {
  int64_t* counter = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    counter = &find_queue(block.stream)->num_written;
  }
  keep(block, counter);
}

void Staging::abandon(const Block& block) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  abandoned_nbytes_ += block.nbytes();
  --find_queue(block.stream)->num_written;
  changed_.notify_all();
}

void Staging::set_limit(int64_t max_bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  limit_ = max_bytes;
  changed_.notify_all();
  while (nbytes_ > limit_ && evict(&lock)) lock.lock();
}

Staging::Info Staging::info() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Info info{num_allocated_, num_freed_,        0,         0, nbytes_,
            idle_nbytes_,   abandoned_nbytes_, num_waits_};
  for (const auto& blocks : idle_) info.num_idle += static_cast<int64_t>(blocks.size());
  for (const StreamQueue& queue : queues_) {
    info.num_read += static_cast<int64_t>(queue.reading.size());
  }
  return info;
}

// Takes the block that became idle last, because a CPU cache may still hold it.
bool Staging::take_idle(Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block>& blocks = idle_[block->size_class];
  if (blocks.empty()) return false;
  StreamQueue* const queue = queue_of(block->stream);
  block->memory = blocks.back().memory;
  blocks.pop_back();
  idle_nbytes_ -= block->nbytes();
  ++queue->num_written;
  return true;
}

// Returns true, with the bytes counted, if the caller may allocate the block. Returns
// false if the state has changed: a block may be idle now. See Note: [staging limit].
bool Staging::reserve(const Block& block) {
  std::unique_lock<std::mutex> lock(mutex_);
  StreamQueue* const queue = queue_of(block.stream);
  if (!idle_[block.size_class].empty()) return false;
  if (may_allocate(*queue, block.nbytes())) {
    nbytes_ += block.nbytes();
    ++queue->num_written;
    return true;
  }
  if (evict(&lock)) return false;
  if (!queue->reading.empty()) {
    ++num_waits_;
    const EventRef event = queue->reading.front().event;
    lock.unlock();
    runtime_->wait_on_host(event->handle());
    return false;
  }
  if (queue->num_written > 0 || num_in_transit_ > 0) {
    ++num_waits_;
    changed_.wait(lock);
    return false;
  }
  throw std::runtime_error(
      "send: staging blocks must take at most " + std::to_string(limit_) +
      " bytes of pinned memory, but one of " + std::to_string(block.nbytes()) +
      " is needed beside " + std::to_string(abandoned_nbytes_) +
      " that a failed device may read for ever. Restart the process, or raise the "
      "limit with pyparallel.memory.set_pinned_limit.");
}

// Returns true below the limit, or if other streams use all of the memory.
bool Staging::may_allocate(const StreamQueue& queue, int64_t nbytes) const {
  if (nbytes_ + nbytes <= limit_) return true;
  const bool has_none = queue.reading.empty() && queue.num_written == 0;
  return has_none && idle_nbytes_ == 0 && num_in_transit_ == 0 &&
         abandoned_nbytes_ + nbytes <= limit_;
}

// Frees one of the largest idle blocks and returns true, unlocked. Returns false, still
// locked, if no block is idle.
bool Staging::evict(std::unique_lock<std::mutex>* lock) noexcept {
  for (size_t i = kNumBlockSizes; i > 0; --i) {
    std::vector<Block>& blocks = idle_[i - 1];
    if (blocks.empty()) continue;
    const Block block = blocks.back();
    blocks.pop_back();
    idle_nbytes_ -= block.nbytes();
    ++num_in_transit_;
    lock->unlock();
    free(block, &num_in_transit_);
    return true;
  }
  return false;
}

// Makes the blocks of finished copies idle. Each stream has a queue of its own, so that
// a blocked stream does not keep the blocks of other streams.
void Staging::collect() {
  std::vector<Stream> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams.reserve(queues_.size());
    for (const StreamQueue& queue : queues_) streams.push_back(queue.stream);
  }
  for (const Stream& stream : streams) collect(stream);
}

void Staging::collect(const Stream& stream) {
  for (;;) {
    const EventRef event = front(stream);
    if (event == nullptr || !runtime_->is_done(event->handle())) return;
    Block block;
    if (pop(stream, event, &block)) keep(block, &num_in_transit_);
  }
}

EventRef Staging::front(const Stream& stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const StreamQueue& queue : queues_) {
    if (queue.stream == stream && !queue.reading.empty()) {
      return queue.reading.front().event;
    }
  }
  return nullptr;
}

// Removes the front of the queue, unless another thread was faster. The caller's event
// outlives the lock, because its destructor takes another lock.
bool Staging::pop(const Stream& stream, const EventRef& event, Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  StreamQueue* const queue = find_queue(stream);
  if (queue->reading.empty() || queue->reading.front().event != event) return false;
  *block = queue->reading.front().block;
  queue->reading.pop_front();
  ++num_in_transit_;
  return true;
}

// Makes a block idle, or frees it. `counter` includes the block until then.
void Staging::keep(const Block& block, int64_t* counter) noexcept {
  if (poison_) memset(block.data(), kPoison, static_cast<size_t>(block.nbytes()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_nbytes_ + block.nbytes() <= max_idle_ && nbytes_ <= limit_) {
      try {
        idle_[block.size_class].push_back(block);
        idle_nbytes_ += block.nbytes();
        --*counter;
        changed_.notify_all();
        return;
      } catch (const std::bad_alloc&) {
        // Without memory for the list, the block is freed below.
      }
    }
  }
  free(block, counter);
}

// Subtracts the bytes only after the runtime has them back.
void Staging::free(const Block& block, int64_t* counter) noexcept {
  runtime_->free(block.memory);
  const std::lock_guard<std::mutex> lock(mutex_);
  nbytes_ -= block.nbytes();
  ++num_freed_;
  --*counter;
  changed_.notify_all();
}

Staging::StreamQueue* Staging::find_queue(const Stream& stream) {
  for (StreamQueue& queue : queues_) {
    if (queue.stream == stream) return &queue;
  }
  return nullptr;
}

Staging::StreamQueue* Staging::queue_of(const Stream& stream) {
  StreamQueue* const queue = find_queue(stream);
  return queue != nullptr ? queue : &queues_.emplace_back(StreamQueue{stream, {}, 0});
}

}  // namespace pyparallel::transfer
