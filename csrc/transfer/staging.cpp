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
    --find(stream)->num_written;
    changed_.notify_all();
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_allocated_;
  return block;
}

void Staging::give(const Block& block, MarkRef mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Line* const line = find(block.stream);
  line->reading.push_back({block, std::move(mark)});
  --line->num_written;
  changed_.notify_all();
}

void Staging::give(const Block& block) noexcept {
  int64_t* holder = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    holder = &find(block.stream)->num_written;
  }
  keep(block, holder);
}

void Staging::lose(const Block& block) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_nbytes_ += block.nbytes();
  --find(block.stream)->num_written;
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
  Info info{num_allocated_, num_freed_,   0,         0, nbytes_,
            idle_nbytes_,   lost_nbytes_, num_waits_};
  for (const auto& blocks : idle_) info.num_idle += static_cast<int64_t>(blocks.size());
  for (const Line& line : lines_) {
    info.num_read += static_cast<int64_t>(line.reading.size());
  }
  return info;
}

// The one that was given last, which is most likely still in a cache.
bool Staging::take_idle(Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block>& blocks = idle_[block->size_class];
  if (blocks.empty()) return false;
  Line* const line = line_of(block->stream);
  block->memory = blocks.back().memory;
  blocks.pop_back();
  idle_nbytes_ -= block->nbytes();
  ++line->num_written;
  return true;
}

// True when the block's bytes may be allocated, and are counted. False when something
// has changed: one may be idle by now. See Note: [staging limit].
bool Staging::reserve(const Block& block) {
  std::unique_lock<std::mutex> lock(mutex_);
  Line* const line = line_of(block.stream);
  if (!idle_[block.size_class].empty()) return false;
  if (may_allocate(*line, block.nbytes())) {
    nbytes_ += block.nbytes();
    ++line->num_written;
    return true;
  }
  if (evict(&lock)) return false;
  if (!line->reading.empty()) {
    ++num_waits_;
    const MarkRef mark = line->reading.front().mark;
    lock.unlock();
    runtime_->wait_on_host(mark->event());
    return false;
  }
  if (line->num_written > 0 || num_moving_ > 0) {
    ++num_waits_;
    changed_.wait(lock);
    return false;
  }
  throw std::runtime_error(
      "send: staging blocks must take at most " + std::to_string(limit_) +
      " bytes of page-locked memory, but one of " + std::to_string(block.nbytes()) +
      " is needed beside " + std::to_string(lost_nbytes_) +
      " that a failed device may read for ever. Start the process anew, or raise the "
      "limit by pyparallel.memory.set_pinned_limit.");
}

// Whether there is room, or all of it is taken by other streams.
bool Staging::may_allocate(const Line& line, int64_t nbytes) const {
  if (nbytes_ + nbytes <= limit_) return true;
  const bool has_none = line.reading.empty() && line.num_written == 0;
  return has_none && idle_nbytes_ == 0 && num_moving_ == 0 &&
         lost_nbytes_ + nbytes <= limit_;
}

// Frees one of the largest idle blocks, and unlocks; false, still locked, if there is
// none.
bool Staging::evict(std::unique_lock<std::mutex>* lock) noexcept {
  for (size_t i = kNumBlockSizes; i > 0; --i) {
    std::vector<Block>& blocks = idle_[i - 1];
    if (blocks.empty()) continue;
    const Block block = blocks.back();
    blocks.pop_back();
    idle_nbytes_ -= block.nbytes();
    ++num_moving_;
    lock->unlock();
    free(block, &num_moving_);
    return true;
  }
  return false;
}

// Makes idle what has been read. Each stream has its own line, so that one which stands
// still keeps back no blocks of the others.
void Staging::collect() {
  std::vector<Stream> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams.reserve(lines_.size());
    for (const Line& line : lines_) streams.push_back(line.stream);
  }
  for (const Stream& stream : streams) collect(stream);
}

void Staging::collect(const Stream& stream) {
  for (;;) {
    const MarkRef mark = front(stream);
    if (mark == nullptr || !runtime_->is_done(mark->event())) return;
    Block block;
    if (pop(stream, mark, &block)) keep(block, &num_moving_);
  }
}

MarkRef Staging::front(const Stream& stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Line& line : lines_) {
    if (line.stream == stream && !line.reading.empty()) {
      return line.reading.front().mark;
    }
  }
  return nullptr;
}

// Takes the front of the line, unless another thread was faster. The mark outlives the
// lock: giving its event back takes another one.
bool Staging::pop(const Stream& stream, const MarkRef& mark, Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Line* const line = find(stream);
  if (line->reading.empty() || line->reading.front().mark != mark) return false;
  *block = line->reading.front().block;
  line->reading.pop_front();
  ++num_moving_;
  return true;
}

// Makes a block idle, or frees it. `holder` counts it until it is.
void Staging::keep(const Block& block, int64_t* holder) noexcept {
  if (poison_) memset(block.data(), kPoison, static_cast<size_t>(block.nbytes()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_nbytes_ + block.nbytes() <= max_idle_ && nbytes_ <= limit_) {
      try {
        idle_[block.size_class].push_back(block);
        idle_nbytes_ += block.nbytes();
        --*holder;
        changed_.notify_all();
        return;
      } catch (const std::bad_alloc&) {
        // There is no room to keep it.
      }
    }
  }
  free(block, holder);
}

// Its bytes count until they are the runtime's again.
void Staging::free(const Block& block, int64_t* holder) noexcept {
  runtime_->free(block.memory);
  const std::lock_guard<std::mutex> lock(mutex_);
  nbytes_ -= block.nbytes();
  ++num_freed_;
  --*holder;
  changed_.notify_all();
}

Staging::Line* Staging::find(const Stream& stream) {
  for (Line& line : lines_) {
    if (line.stream == stream) return &line;
  }
  return nullptr;
}

Staging::Line* Staging::line_of(const Stream& stream) {
  Line* const line = find(stream);
  return line != nullptr ? line : &lines_.emplace_back(Line{stream, {}, 0});
}

}  // namespace pyparallel::transfer
