// The header of a ring in shared memory: the holder of each slot.
//
// Note: [slot holders]
// Line 0 identifies the memory. Line 1 + i belongs to slot i: a word with the number of
// its holder, 0 if the slot is free, and 56 bytes for the use of the holder. Only its
// holder releases a slot, or the parent after the holder died, so only claims compete.
// Each change is one compare-and-swap. A process may be killed between any two
// instructions; other processes do not wait for it and never see a half-written word.
// A claim acquires the writes that the last holder released, so the bytes of the slot
// need no other synchronisation. The bytes of a dead holder are undefined.
#pragma once

#include <cstdint>
#include <cstring>

namespace pyparallel {

constexpr int64_t kRingLine = 64;  // bytes: lines of two slots share no cache line
constexpr int64_t kRingMagic = 0x50'50'52'49'4E'47'00'01;  // "PPRING", version 1
constexpr int64_t kMostRingSlots = 65536;
constexpr int64_t kNoHolder = 0;

// The backend whose claims a ring accepts. Native claims swap words and Python claims
// take file locks, so the two do not exclude each other.
enum class RingBackend : int64_t { kNative = 1, kPython = 2 };

// Returns the size of the header of a ring with 1 to kMostRingSlots slots.
inline int64_t ring_nbytes(int64_t num_slots) { return kRingLine * (1 + num_slots); }

// A view of a header, aligned to kRingLine. Another process may have made the memory,
// so it contains no C++ objects. Hence the functions of the compiler, not std::atomic.
class Ring {
 public:
  Ring(uint8_t* header, int64_t num_slots)
      : lines_(reinterpret_cast<Line*>(header)), num_slots_(num_slots) {}

  int64_t num_slots() const { return num_slots_; }

  // Call this before other processes can access the memory.
  void format() {
    memset(lines_, 0, static_cast<size_t>(ring_nbytes(num_slots_)));
    lines_[0] = {kRingMagic, {num_slots_, static_cast<int64_t>(RingBackend::kNative)}};
  }

  // Returns true if the memory was formatted as a ring of num_slots().
  bool is_formatted() const {
    const int64_t maker = lines_[0].others[1];
    return lines_[0].word == kRingMagic && lines_[0].others[0] == num_slots_ &&
           (maker == static_cast<int64_t>(RingBackend::kNative) ||
            maker == static_cast<int64_t>(RingBackend::kPython));
  }

  // Returns true if ring_claim may be called.
  bool is_native() const {
    return lines_[0].others[1] == static_cast<int64_t>(RingBackend::kNative);
  }

  // Gives the first free slot to `holder`. Returns its index, or -1 if none is free.
  int64_t claim(int64_t holder) {
    for (int64_t slot = 0; slot < num_slots_; ++slot) {
      if (this->holder(slot) == kNoHolder && pass(slot, kNoHolder, holder)) return slot;
    }
    return -1;
  }

  // Gives a slot to the holder `to`. Returns false if `from` did not hold it.
  bool pass(int64_t slot, int64_t from, int64_t to) {
    return __atomic_compare_exchange_n(&lines_[1 + slot].word, &from, to,
                                       /*weak=*/false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_RELAXED);
  }

  int64_t holder(int64_t slot) const {
    return __atomic_load_n(&lines_[1 + slot].word, __ATOMIC_RELAXED);
  }

 private:
  struct Line {
    int64_t word;
    int64_t others[7];
  };
  static_assert(sizeof(Line) == kRingLine);
  static_assert(__atomic_always_lock_free(sizeof(int64_t), nullptr),
                "a lock would not be shared by processes");

  Line* lines_;
  int64_t num_slots_;
};

}  // namespace pyparallel
