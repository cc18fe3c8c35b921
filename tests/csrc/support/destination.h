// Memory that detects every written byte.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace pyparallel::testing {

// It begins at a chosen distance from a multiple of 64. The guard bytes on both sides
// must not be written.
class Destination {
 public:
  explicit Destination(int64_t nbytes, int64_t shift = 0)
      : nbytes_(nbytes), room_(static_cast<size_t>(nbytes + shift + 3 * kGuard)) {
    const auto past =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(room_.data()) & (kGuard - 1));
    first_ = 2 * kGuard - past + shift;
    clear();
  }
  Destination(const Destination&) = delete;
  Destination& operator=(const Destination&) = delete;

  uint8_t* data() { return room_.data() + first_; }
  void clear() { memset(room_.data(), kUntouched, room_.size()); }

  // Returns true if exactly these bytes were written.
  bool holds(const std::vector<uint8_t>& expected) {
    if (static_cast<int64_t>(expected.size()) != nbytes_) return false;
    if (nbytes_ > 0 && memcmp(data(), expected.data(), expected.size()) != 0) {
      return false;
    }
    const auto size = static_cast<int64_t>(room_.size());
    bool untouched = true;
    for (int64_t b = 0; b < first_; ++b) untouched &= room_[at(b)] == kUntouched;
    for (int64_t b = first_ + nbytes_; b < size; ++b) {
      untouched &= room_[at(b)] == kUntouched;
    }
    return untouched;
  }

 private:
  static constexpr uint8_t kUntouched = 0xEE;
  static constexpr int64_t kGuard = 64;

  static size_t at(int64_t byte) { return static_cast<size_t>(byte); }

  int64_t nbytes_;
  std::vector<uint8_t> room_;
  int64_t first_;
};

}  // namespace pyparallel::testing
