// Packing: leaves go to ascending, disjoint slots of one slab. The bytes between the
// slots become zero, so that no byte of an earlier batch stays visible.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/cast.h"
#include "core/checked.h"
#include "core/host_device.h"
#include "core/pad_copy.h"
#include "core/words.h"
#include "core/work.h"

namespace pyparallel {

// Slots start at multiples of this: one cache line, which every item size divides.
constexpr int64_t kSlotAlignment = 64;

inline bool is_aligned(int64_t offset) { return offset % kSlotAlignment == 0; }

// `src` may be null if nbytes is 0.
struct Slot {
  const uint8_t* src;
  int64_t offset;
  int64_t nbytes;
};

// Returns true if a slot may start at `offset` after a slot that ends at `begin`.
inline bool slot_ascends(int64_t offset, int64_t begin) { return offset >= begin; }

// Sets *next to the start of the slot after one of `nbytes` at `offset`. Both are at
// least 0, and `offset` is aligned. Returns false on overflow.
[[nodiscard]] inline bool next_slot(int64_t offset, int64_t nbytes, int64_t* next) {
  int64_t end = 0;
  if (!checked_add(offset, nbytes, &end)) return false;
  if (!checked_add(end, kSlotAlignment - 1, &end)) return false;
  *next = end - end % kSlotAlignment;
  return true;
}

// Returns true if a slab of slab_nbytes contains [offset, offset + nbytes), and sets
// *end to its end. Requires offset >= 0.
[[nodiscard]] inline bool slot_fits(int64_t offset, int64_t nbytes, int64_t slab_nbytes,
                                    int64_t* end) {
  return checked_add(offset, nbytes, end) && *end <= slab_nbytes;
}

// The body of a packing. Rows are pieces of `piece` bytes of the slab; the last one may
// be shorter. If lanes share a row, kWordBytes must divide the address of dst, and
// begin, end, piece and the offsets of all slots, and a piece has less than 2**31
// bytes. A single lane needs no alignment.
struct Pack {
  uint8_t* dst;
  int64_t end;
  int64_t piece;
  const Slot* slots;  // ascending and disjoint, within [begin, end)
  int64_t num_slots;
  int64_t begin = 0;  // bytes outside [begin, end) are not written
  // The cast of each slot, for a writer that casts, or null. The bytes of a slot are
  // those of the result.
  const Cast* casts = nullptr;

  PP_HOST_DEVICE int64_t num_pieces() const {
    return end == begin ? 0 : (end - begin - 1) / piece + 1;
  }

  PP_HOST_DEVICE void operator()(Rows rows, Lane lane) const {
    if (lane.count == 1 && rows.step == 1) {
      write_run(rows, CachedWriter());
      return;
    }
    for (int64_t n = rows.begin; n < rows.end; n += rows.step) {
      write_piece(start_of(n), start_of(n + 1), lane);
    }
  }

  // Writes consecutive rows with a single lane and a RowWriter (core/pad_copy.h).
  template <typename RowWriter>
  PP_HOST_DEVICE void write_run(Rows rows, RowWriter writer) const {
    write(start_of(rows.begin), start_of(rows.end), &writer);
    writer.finish();
  }

 private:
  PP_HOST_DEVICE int64_t start_of(int64_t row) const {
    return lesser(begin + row * piece, end);
  }

  // Returns the first slot that ends after `offset`.
  PP_HOST_DEVICE int64_t find_slot(int64_t offset) const {
    int64_t low = 0;
    int64_t high = num_slots;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (slots[middle].offset + slots[middle].nbytes > offset) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Writes the bytes [first, last) of the slab. If they are of several leaves, each
  // lane finds the leaf of its word, so that no leaf waits for another one.
  PP_HOST_DEVICE void write_piece(int64_t first, int64_t last, Lane lane) const {
    int64_t i = find_slot(first);
    if (i < num_slots && slots[i].offset <= first) {
      const int64_t done = first - slots[i].offset;
      const int64_t left = slots[i].nbytes - done;
      if (last - first - left < kWordBytes) {
        copy_words(dst + first, slots[i].src + done, lesser(left, last - first), lane);
        return;
      }
    }
    PP_ROLLED
    for (int64_t at = first + kWordBytes * lane.index; at < last;
         at += kWordBytes * lane.count) {
      PP_ROLLED
      while (i < num_slots && slots[i].offset + slots[i].nbytes <= at) ++i;
      Word16 word{0, 0};
      if (i < num_slots && slots[i].offset <= at) {
        const uint8_t* leaf = slots[i].src;
        word = word_of<PlainReader>(leaf + (at - slots[i].offset), leaf,
                                    leaf + slots[i].nbytes);
      }
      *reinterpret_cast<Word16*>(dst + at) = word;
    }
  }

  // Writes the bytes [first, last) of the slab.
  template <typename Writer>
  PP_HOST_DEVICE void write(int64_t first, int64_t last, Writer* writer) const {
    int64_t at = first;
    for (int64_t i = find_slot(first); at < last; ++i) {
      const int64_t next = i < num_slots ? lesser(slots[i].offset, last) : last;
      if (next > at) {
        writer->fill(dst + at, next - at, Fill{0, 0});
        at = next;
      }
      if (at == last) return;
      const int64_t done = at - slots[i].offset;
      const int64_t count = lesser(slots[i].nbytes - done, last - at);
      if (count <= 0) continue;
      if constexpr (Writer::kCasts) writer->use(casts[i]);
      const uint8_t* const src = slots[i].src;
      writer->copy(dst + at, writer->source(src, src + done), count);
      at += count;
    }
  }
};

// Returns the part of `whole` with at most `most` slots from number `first` on. It
// begins with its first slot and ends with the start of the next part, so that all
// parts together write the same bytes as `whole`.
inline Pack slice(const Pack& whole, int64_t first, int64_t most) {
  Pack part = whole;
  part.slots = whole.slots + first;
  part.num_slots = lesser(most, whole.num_slots - first);
  if (first > 0) part.begin = part.slots[0].offset;
  if (first + part.num_slots < whole.num_slots) {
    part.end = part.slots[part.num_slots].offset;
  }
  return part;
}

}  // namespace pyparallel
