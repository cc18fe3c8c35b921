#include "transfer/staging.h"

#include <cstring>
#include <new>

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

Staging::Staging(Runtime* runtime, int64_t max_idle, bool poison)
    : runtime_(runtime), max_idle_(max_idle), poison_(poison) {}

Block Staging::take(int64_t nbytes) {
  Block block;
  block.size_class = class_for(nbytes);
  if (take_idle(block.size_class, &block)) return block;
  collect();
  if (take_idle(block.size_class, &block)) return block;
  block.memory = runtime_->allocate(block.nbytes());
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_allocated_;
  return block;
}

void Staging::give(const Block& block, const Stream& stream, MarkRef mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Line* line = find(stream);
  if (line == nullptr) line = &lines_.emplace_back(stream, Line()).second;
  line->push_back({block, std::move(mark)});
}

void Staging::give(const Block& block) noexcept {
  if (poison_) memset(block.data(), kPoison, static_cast<size_t>(block.nbytes()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_nbytes_ + block.nbytes() <= max_idle_) {
      try {
        idle_[block.size_class].push_back(block);
        idle_nbytes_ += block.nbytes();
        return;
      } catch (const std::bad_alloc&) {
        // There is no room to keep it.
      }
    }
    ++num_freed_;
  }
  runtime_->free(block.memory);
}

Staging::Info Staging::info() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Info info{num_allocated_, num_freed_, 0, 0};
  for (const auto& blocks : idle_) info.num_idle += static_cast<int64_t>(blocks.size());
  for (const auto& each : lines_) {
    info.num_read += static_cast<int64_t>(each.second.size());
  }
  return info;
}

// The one that was given last, which is most likely still in a cache.
bool Staging::take_idle(size_t size_class, Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Block>& blocks = idle_[size_class];
  if (blocks.empty()) return false;
  *block = blocks.back();
  blocks.pop_back();
  idle_nbytes_ -= block->nbytes();
  return true;
}

// Makes idle what has been read. Each stream has its own line, so that one which stands
// still keeps back no blocks of the others.
void Staging::collect() {
  std::vector<Stream> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams.reserve(lines_.size());
    for (const auto& each : lines_) streams.push_back(each.first);
  }
  for (const Stream& stream : streams) collect(stream);
}

void Staging::collect(const Stream& stream) {
  for (;;) {
    const MarkRef mark = front(stream);
    if (mark == nullptr || !runtime_->is_done(mark->event())) return;
    Block block;
    if (pop(stream, mark, &block)) give(block);
  }
}

MarkRef Staging::front(const Stream& stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : lines_) {
    if (each.first == stream && !each.second.empty()) return each.second.front().mark;
  }
  return nullptr;
}

// Takes the front of the line, unless another thread was faster. The mark outlives the
// lock: giving its event back takes another one.
bool Staging::pop(const Stream& stream, const MarkRef& mark, Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Line* line = find(stream);
  if (line->empty() || line->front().mark != mark) return false;
  *block = line->front().block;
  line->pop_front();
  return true;
}

Staging::Line* Staging::find(const Stream& stream) {
  for (auto& each : lines_) {
    if (each.first == stream) return &each.second;
  }
  return nullptr;
}

}  // namespace pyparallel::transfer
