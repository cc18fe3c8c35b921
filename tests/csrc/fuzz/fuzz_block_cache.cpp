// Any order of takes, returns and bounds, against a model of the cache.
#include <vector>

#include "fuzz.h"
#include "memory/block_cache.h"

namespace pyparallel::testing {
namespace {

using memory::Block;
using std::chrono::milliseconds;

constexpr int64_t kUnit = 64 << 10;
constexpr int64_t kHuge = 2 << 20;
constexpr milliseconds kLong{600'000};

class Model {
 public:
  explicit Model(int64_t limit) : limit_(limit) {
    held_.reserve(kMostHeld);
    memory::clear_cache();
    memory::bound_cache(limit, kLong);
    before_ = memory::cache_info();
    CHECK(before_.in_use == 0 && before_.cached == 0);
  }

  ~Model() {
    while (!held_.empty()) give(0);
    check();
    CHECK(memory::clear_cache() == cached());
  }

  // The smallest block that fits, the oldest of them, if at least half of it is used.
  void take(int64_t nbytes) {
    if (held_.size() == kMostHeld) return;
    const int64_t unit = nbytes < kHuge ? kUnit : kHuge;
    int64_t capacity = unit;
    while (capacity < nbytes) capacity += unit;
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const bool fits = it->capacity >= capacity && it->capacity / 2 <= capacity;
      if (!fits) continue;
      if (best == idle_.end() || it->capacity < best->capacity) best = it;
    }
    const Block block = memory::take_block(nbytes);
    if (best == idle_.end()) {
      ++misses_;
      CHECK(block.capacity == capacity);
    } else {
      ++hits_;
      CHECK(block.data == best->data && block.capacity == best->capacity);
      idle_.erase(best);
    }
    const auto address = reinterpret_cast<uintptr_t>(block.data);
    CHECK(address % (block.capacity >= kHuge ? kHuge : 4096) == 0);
    ++marks_;
    first(block) = last(block) = marks_;
    held_.push_back({block, marks_});
  }

  void give(size_t which) {
    if (which >= held_.size()) return;
    const Held held = held_[which];
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(which));
    CHECK(first(held.block) == held.mark && last(held.block) == held.mark);
    memory::give_block(held.block);
    if (held.block.capacity > limit_) return;
    idle_.push_back(held.block);
    drop_above(limit_);
  }

  void bound(int64_t limit) {
    limit_ = limit;
    memory::bound_cache(limit, kLong);
    drop_above(limit);
  }

  void clear() {
    CHECK(memory::clear_cache() == cached());
    idle_.clear();
  }

  void check() const {
    const memory::CacheInfo info = memory::cache_info();
    int64_t in_use = 0;
    for (const Held& held : held_) in_use += held.block.capacity;
    CHECK(info.in_use == in_use && info.cached == cached() && info.limit == limit_);
    CHECK(info.hits - before_.hits == hits_);
    CHECK(info.misses - before_.misses == misses_);
  }

 private:
  static constexpr size_t kMostHeld = 8;

  struct Held {
    Block block;
    uint8_t mark;
  };

  static uint8_t& first(const Block& block) {
    return *static_cast<uint8_t*>(block.data);
  }
  static uint8_t& last(const Block& block) {
    return static_cast<uint8_t*>(block.data)[block.capacity - 1];
  }

  int64_t cached() const {
    int64_t nbytes = 0;
    for (const Block& block : idle_) nbytes += block.capacity;
    return nbytes;
  }

  void drop_above(int64_t limit) {
    while (cached() > limit) idle_.erase(idle_.begin());
  }

  int64_t limit_;
  memory::CacheInfo before_{};
  std::vector<Block> idle_;
  std::vector<Held> held_;
  int64_t hits_ = 0;
  int64_t misses_ = 0;
  uint8_t marks_ = 0;
};

}  // namespace

void fuzz(FuzzedNumbers* numbers) {
  Model model(numbers->between(0, 60) * kUnit);
  for (int step = 0; step < 24 && !numbers->done(); ++step) {
    switch (numbers->between(0, 9)) {
      case 0:
        model.bound(numbers->between(0, 60) * kUnit);
        break;
      case 1:
        model.clear();
        break;
      case 2:
      case 3:
      case 4:
        model.give(static_cast<size_t>(numbers->between(0, 7)));
        break;
      case 5:
        model.take(kHuge + numbers->between(-1, 1) * kUnit);
        break;
      default:
        model.take(numbers->between(0, 9) * kUnit + numbers->between(1, 2));
    }
    model.check();
  }
}

}  // namespace pyparallel::testing
