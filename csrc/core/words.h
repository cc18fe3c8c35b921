// Words of sixteen bytes, and how lanes that share a run of bytes write it by words.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/rows.h"

namespace pyparallel {

struct alignas(16) Word16 {
  uint64_t low;
  uint64_t high;
};

constexpr int64_t kWordBytes = sizeof(Word16);

// The first bytes of a word, fewer than sixteen, and zeros. The loop has a constant
// number of turns so that the compiler unrolls it and no read waits for another.
PP_HOST_DEVICE Word16 partial_word(const uint8_t* from, int64_t nbytes) {
  Word16 word{0, 0};
  for (int b = 0; b < 8; ++b) {
    if (b < nbytes) word.low |= static_cast<uint64_t>(from[b]) << (8 * b);
    if (b + 8 < nbytes) word.high |= static_cast<uint64_t>(from[b + 8]) << (8 * b);
  }
  return word;
}

// Part: an unsigned integer of 1, 2 or 4 bytes, whose size divides the address.
template <typename Part>
PP_HOST_DEVICE Word16 join_parts(const Part* from) {
  constexpr int kHalf = 8 / sizeof(Part);
  Word16 word{0, 0};
  for (int i = 0; i < kHalf; ++i) {
    word.low |= static_cast<uint64_t>(from[i]) << (8 * sizeof(Part) * i);
    word.high |= static_cast<uint64_t>(from[kHalf + i]) << (8 * sizeof(Part) * i);
  }
  return word;
}

// Writes this lane's share of `num_words` words; returns the first word from num_words
// on that is its turn.
template <typename Part>
PP_HOST_DEVICE int64_t join_words(Word16* to, const uint8_t* from, int64_t num_words,
                                  Lane lane) {
  constexpr int64_t kParts = kWordBytes / static_cast<int64_t>(sizeof(Part));
  const Part* parts = reinterpret_cast<const Part*>(from);
  int64_t word = lane.index;
  for (; word < num_words; word += lane.count) {
    to[word] = join_parts(parts + kParts * word);
  }
  return word;
}

// The same for whole words at an address that is a multiple of one. Four are read
// before the first is written: the compiler cannot know that they lie apart.
PP_HOST_DEVICE int64_t move_words(Word16* to, const uint8_t* from, int64_t num_words,
                                  Lane lane) {
  const Word16* words = reinterpret_cast<const Word16*>(from);
  const int64_t step = lane.count;
  int64_t word = lane.index;
  for (; word + 3 * step < num_words; word += 4 * step) {
    const Word16 first = words[word];
    const Word16 second = words[word + step];
    const Word16 third = words[word + 2 * step];
    const Word16 fourth = words[word + 3 * step];
    to[word] = first;
    to[word + step] = second;
    to[word + 2 * step] = third;
    to[word + 3 * step] = fourth;
  }
  for (; word < num_words; word += step) to[word] = words[word];
  return word;
}

// Copies nbytes to `to`, which starts a word, and makes the rest of the last word zero.
// Lanes take turns at words, so that neighbours touch neighbouring memory.
PP_HOST_DEVICE void copy_words(uint8_t* to, const uint8_t* from, int64_t nbytes,
                               Lane lane) {
  Word16* words = reinterpret_cast<Word16*>(to);
  const int64_t whole = nbytes / kWordBytes;
  const auto address = reinterpret_cast<uintptr_t>(from);
  int64_t next = 0;
  if (address % kWordBytes == 0) {
    next = move_words(words, from, whole, lane);
  } else if (address % 4 == 0) {
    next = join_words<uint32_t>(words, from, whole, lane);
  } else if (address % 2 == 0) {
    next = join_words<uint16_t>(words, from, whole, lane);
  } else {
    next = join_words<uint8_t>(words, from, whole, lane);
  }
  const int64_t rest = nbytes - whole * kWordBytes;
  if (next == whole && rest > 0) {
    words[whole] = partial_word(from + whole * kWordBytes, rest);
  }
}

// The same for zeros; nbytes is a multiple of a word.
PP_HOST_DEVICE void zero_words(uint8_t* to, int64_t nbytes, Lane lane) {
  Word16* words = reinterpret_cast<Word16*>(to);
  for (int64_t word = lane.index; word < nbytes / kWordBytes; word += lane.count) {
    words[word] = Word16{0, 0};
  }
}

}  // namespace pyparallel
