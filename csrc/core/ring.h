// The header of a ring of slots in shared memory: who holds which.
//
// Note: [slot holders]
// Line 0 says what the memory is; line 1 + i is slot i: the word of its holder, 0 for
// nobody, and 56 bytes that belong to whoever holds it. Only the holder of a slot lets
// go of it, or the parent once the holder is dead, so only claims compete. Each change
// is one compare-and-swap: a process may be killed between any two instructions, and
// the others neither wait for it nor find a word half written. A claim acquires what
// the last holder released, so bytes of the slot need no other order. What a dead
// holder had written is undefined.
#pragma once

#include <cstdint>
#include <cstring>

namespace pyparallel {

constexpr int64_t kRingLine = 64;  // bytes: lines of two slots share no cache line
constexpr int64_t kRingMagic = 0x50'50'52'49'4E'47'00'01;  // "PPRING", version 1
constexpr int64_t kMostRingSlots = 65536;
constexpr int64_t kNoHolder = 0;

// Whose claims a ring takes: compare-and-swap sees no lock, and a lock no such swap.
enum class RingBackend : int64_t { kNative = 1, kPython = 2 };

// Bytes of the header of a ring of so many slots, between 1 and kMostRingSlots.
inline int64_t ring_nbytes(int64_t num_slots) { return kRingLine * (1 + num_slots); }

// A view of a header at a multiple of kRingLine. Another process may have made the
// memory, so that no C++ object lives there: hence the compiler's functions, not
// std::atomic.
class Ring {
 public:
  Ring(uint8_t* header, int64_t num_slots)
      : lines_(reinterpret_cast<Line*>(header)), num_slots_(num_slots) {}

  int64_t num_slots() const { return num_slots_; }

  // Before anybody else sees the memory.
  void format() {
    memset(lines_, 0, static_cast<size_t>(ring_nbytes(num_slots_)));
    lines_[0] = {kRingMagic, {num_slots_, static_cast<int64_t>(RingBackend::kNative)}};
  }

  // Whether the memory was formatted as a ring of num_slots().
  bool is_formatted() const {
    const int64_t maker = lines_[0].others[1];
    return lines_[0].word == kRingMagic && lines_[0].others[0] == num_slots_ &&
           (maker == static_cast<int64_t>(RingBackend::kNative) ||
            maker == static_cast<int64_t>(RingBackend::kPython));
  }

  // Whether ring_claim may be called.
  bool is_native() const {
    return lines_[0].others[1] == static_cast<int64_t>(RingBackend::kNative);
  }

  // The first free slot, now of this holder; -1 if there is none.
  int64_t claim(int64_t holder) {
    for (int64_t slot = 0; slot < num_slots_; ++slot) {
      if (this->holder(slot) == kNoHolder && pass(slot, kNoHolder, holder)) return slot;
    }
    return -1;
  }

  // Gives a slot to the holder `to`; false if it was not of `from`.
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
