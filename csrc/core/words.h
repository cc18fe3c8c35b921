// Words of sixteen bytes: the unit in which lanes write a run of bytes that they share.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/work.h"

namespace pyparallel {

struct alignas(16) Word16 {
  uint64_t low;
  uint64_t high;
};

constexpr int kWordBytes = sizeof(Word16);

// The number of words that a lane reads before it writes the first of them. The
// compiler does not know that source and destination are disjoint, so it would wait for
// each read.
constexpr int kWordsAhead = 4;

PP_HOST_DEVICE int lesser_int(int a, int b) { return a < b ? a : b; }

// Returns the distance from the last multiple of a word. `count` may be negative.
PP_HOST_DEVICE int bytes_past_word(int count) { return count & (kWordBytes - 1); }

PP_HOST_DEVICE int bytes_past_word(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & (kWordBytes - 1));
}

// Returns the number of items, at most `count`, from `to` to the next start of a word.
template <typename Item>
PP_HOST_DEVICE int items_to_word(const Item* to, int count) {
  const int head = bytes_past_word(-bytes_past_word(to));
  return lesser_int(head / static_cast<int>(sizeof(Item)), count);
}

// Returns 32 bits of two words, from bit number `bits` < 32 on: a GPU has one
// instruction for it, the funnel shift.
PP_HOST_DEVICE uint32_t shifted(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> bits);
}

// Returns sixteen bytes of two words, from byte number `past` < 16 on.
PP_HOST_DEVICE Word16 shifted_word(const Word16& first, const Word16& second,
                                   int past) {
  const bool far = (past & 8) != 0;
  const uint64_t halves[3] = {far ? first.high : first.low,
                              far ? second.low : first.high,
                              far ? second.high : second.low};
  uint32_t parts[5];
  for (int p = 0; p < 5; ++p) {
    const auto even = static_cast<uint32_t>(halves[p / 2]);
    const auto odd = static_cast<uint32_t>(halves[p / 2] >> 32);
    const auto next = static_cast<uint32_t>(halves[(p + 1) / 2]);
    const uint32_t here = p % 2 == 0 ? even : odd;
    parts[p] = (past & 4) != 0 ? (p % 2 == 0 ? odd : next) : here;
  }
  const uint32_t bits = 8 * (static_cast<uint32_t>(past) & 3);
  uint64_t made[4];
  for (int p = 0; p < 4; ++p) made[p] = shifted(parts[p], parts[p + 1], bits);
  return {made[1] << 32 | made[0], made[3] << 32 | made[2]};
}

// Returns the first `nbytes` bytes of a word, at most sixteen, and zeros. The loop has
// a constant number of iterations, so that the compiler unrolls it and no read waits
// for another one.
template <typename Reader>
PP_HOST_DEVICE Word16 partial_word(const uint8_t* from, int nbytes) {
  Word16 word{0, 0};
  for (int b = 0; b < 8; ++b) {
    if (b < nbytes) word.low |= static_cast<uint64_t>(Reader::read(from + b)) << 8 * b;
    if (b + 8 < nbytes) {
      word.high |= static_cast<uint64_t>(Reader::read(from + b + 8)) << 8 * b;
    }
  }
  return word;
}

// Reads the source of lanes in bytes, or in words of four or sixteen bytes.
struct PlainReader {
  template <typename Item>
  PP_HOST_DEVICE static Item read(const Item* from) {
    return *from;
  }
};

// The bytes [begin, end) of a run.
struct Range {
  int begin;
  int end;
};

// Returns the words of `range` that move_words can make without a read outside
// [first, last). The source of byte 0 is `from`.
PP_HOST_DEVICE Range readable_words(Range range, const uint8_t* from,
                                    const uint8_t* first, const uint8_t* last) {
  const int past = bytes_past_word(from + range.begin);
  if (past == 0) return range;
  if (range.begin < range.end && from + range.begin - past < first) {
    range.begin += kWordBytes;
  }
  if (range.begin < range.end && from + range.end - past + kWordBytes > last) {
    range.end -= kWordBytes;
  }
  return range;
}

// Writes this lane's share of the words of `range`: byte i of `to` gets byte i of
// `from`. A misaligned source word is made from the two aligned words around it.
// Consecutive lanes write consecutive words.
template <typename Reader>
PP_HOST_DEVICE void move_words(uint8_t* to, const uint8_t* from, Range range,
                               Lane lane) {
  const int past = bytes_past_word(from + range.begin);
  const int step = kWordBytes * lane.count;
  PP_ROLLED
  for (int at = range.begin + kWordBytes * lane.index; at < range.end;
       at += kWordsAhead * step) {
    Word16* words = reinterpret_cast<Word16*>(to + at);
    const auto* aligned = reinterpret_cast<const Word16*>(from + at - past);
    // Initialised, because registers that only guarded loads write stay live
    // everywhere.
    Word16 made[kWordsAhead] = {};
    for (int a = 0; a < kWordsAhead; ++a) {
      if (at + a * step < range.end) made[a] = Reader::read(aligned + a * lane.count);
    }
    if (past != 0) {
      Word16 next[kWordsAhead] = {};
      for (int a = 0; a < kWordsAhead; ++a) {
        if (at + a * step < range.end) {
          next[a] = Reader::read(aligned + a * lane.count + 1);
        }
      }
      for (int a = 0; a < kWordsAhead; ++a) {
        if (at + a * step < range.end) made[a] = shifted_word(made[a], next[a], past);
      }
    }
    for (int a = 0; a < kWordsAhead; ++a) {
      if (at + a * step < range.end) words[a * lane.count] = made[a];
    }
  }
}

// Writes one value to this lane's share of the words of `range`.
PP_HOST_DEVICE void fill_words(uint8_t* to, const Word16& value, Range range,
                               Lane lane) {
  const int step = kWordBytes * lane.count;
  PP_ROLLED
  for (int at = range.begin + kWordBytes * lane.index; at < range.end; at += step) {
    *reinterpret_cast<Word16*>(to + at) = value;
  }
}

// Returns sixteen bytes from `from` on. Those from `last` on are zero. No byte outside
// [first, last) is read.
template <typename Reader>
PP_HOST_DEVICE Word16 word_of(const uint8_t* from, const uint8_t* first,
                              const uint8_t* last) {
  const int past = bytes_past_word(from);
  const auto* aligned = reinterpret_cast<const Word16*>(from - past);
  if (past == 0 && last - from >= kWordBytes) return Reader::read(aligned);
  if (from - first < past || last - from < 2 * kWordBytes - past) {
    const int64_t left = last - from;
    return partial_word<Reader>(
        from, left < kWordBytes ? static_cast<int>(left) : kWordBytes);
  }
  return shifted_word(Reader::read(aligned), Reader::read(aligned + 1), past);
}

// Copies less than 2**31 bytes to `to`, which is the start of a word. The rest of the
// last word becomes zero. No byte outside the source is read: words at its ends are
// assembled from bytes unless the source is aligned.
template <typename Reader = PlainReader>
PP_HOST_DEVICE void copy_words(uint8_t* to, const uint8_t* from, int64_t nbytes,
                               Lane lane) {
  const auto size = static_cast<int>(nbytes);
  const Range whole =
      readable_words({0, size - bytes_past_word(size)}, from, from, from + nbytes);
  for (int at = kWordBytes * lane.index;; at += kWordBytes * lane.count) {
    const int edge = at < whole.begin ? at : at + whole.end - whole.begin;
    if (edge >= size) break;
    *reinterpret_cast<Word16*>(to + edge) =
        partial_word<Reader>(from + edge, lesser_int(size - edge, kWordBytes));
  }
  move_words<Reader>(to, from, whole, lane);
}

}  // namespace pyparallel
