// Packing: leaves go to ascending, disjoint slots of one slab, and the bytes between
// them become zero, so that nothing of an earlier batch stays visible.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/checked.h"
#include "core/macros.h"
#include "core/partition.h"
#include "core/rows.h"

namespace pyparallel {

// Slots start at multiples of this many bytes: one cache line, and any item's size.
constexpr int64_t kSlotAlignment = 64;

inline bool is_aligned(int64_t offset) { return offset % kSlotAlignment == 0; }

// `src` may be null when nbytes is 0.
struct Slot {
  const uint8_t* src;
  int64_t offset;
  int64_t nbytes;
};

// Whether a slot may start at `offset`, given that the one before it ends at `begin`.
inline bool slot_ascends(int64_t offset, int64_t begin) { return offset >= begin; }

// Sets *next to where a slot may start behind one of `nbytes` at `offset`, both of
// them at least 0 and `offset` aligned.
[[nodiscard]] inline bool next_slot(int64_t offset, int64_t nbytes, int64_t* next) {
  int64_t end = 0;
  if (!checked_add(offset, nbytes, &end)) return false;
  if (!checked_add(end, kSlotAlignment - 1, &end)) return false;
  *next = end - end % kSlotAlignment;
  return true;
}

// Whether [offset, offset + nbytes) lies in a slab of slab_nbytes; offset >= 0. On
// true, *end is offset + nbytes.
[[nodiscard]] inline bool slot_fits(int64_t offset, int64_t nbytes, int64_t slab_nbytes,
                                    int64_t* end) {
  return checked_add(offset, nbytes, end) && *end <= slab_nbytes;
}

// Rows are pieces of `piece` bytes of the slab; the last one may be shorter. Lanes take
// one contiguous share of each piece.
struct Pack {
  uint8_t* dst;
  int64_t nbytes;
  int64_t piece;
  const Slot* slots;  // ascending and disjoint, within nbytes
  int64_t num_slots;

  int64_t num_pieces() const { return nbytes == 0 ? 0 : (nbytes - 1) / piece + 1; }

  void operator()(Rows rows, Lane lane) const {
    if (lane.count == 1 && rows.step == 1) {
      write(lesser(rows.begin * piece, nbytes), lesser(rows.end * piece, nbytes));
      return;
    }
    for (int64_t n = rows.begin; n < rows.end; n += rows.step) {
      const int64_t begin = n * piece;
      const Rows share =
          partition(lesser(piece, nbytes - begin), lane.count, lane.index);
      write(begin + share.begin, begin + share.end);
    }
  }

 private:
  // The first slot that ends after `offset`.
  int64_t find_slot(int64_t offset) const {
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

  // Writes the slab's bytes [begin, end).
  void write(int64_t begin, int64_t end) const {
    int64_t at = begin;
    for (int64_t i = find_slot(begin); at < end; ++i) {
      const int64_t next = i < num_slots ? lesser(slots[i].offset, end) : end;
      if (next > at) {
        memset(dst + at, 0, static_cast<size_t>(next - at));
        at = next;
      }
      if (at == end) return;
      const int64_t first = at - slots[i].offset;
      const int64_t count = lesser(slots[i].nbytes - first, end - at);
      if (count <= 0) continue;
      memcpy(dst + at, slots[i].src + first, static_cast<size_t>(count));
      at += count;
    }
  }
};

}  // namespace pyparallel
