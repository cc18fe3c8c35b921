// The body of pad-copy for lanes that write short rows.
#pragma once

#include <cstdint>

#include "core/boxes.h"
#include "core/host_device.h"
#include "core/pad_copy.h"
#include "core/words.h"
#include "core/work.h"

namespace pyparallel {

// Writes the aligned words of the destination, whatever rows they belong to. A lane
// makes a word of four items, and finds the place of the first one by multiplication.
// So rows of any width occupy all lanes, and these store consecutive words.
//
// The table has whole rows, whole items and at most kMostShortRows: see below.
template <typename RowWriter = CachedWriter>
struct ShortRows {
  BoxTable table;

  // The rows of this body are groups of lane.count words.
  int64_t num_groups(int lanes) const {
    const int group = lanes * kWordBytes;
    return (bytes_past_word(table.dst) + nbytes() - 1) / group + 1;
  }

  PP_HOST_DEVICE void operator()(Rows groups, Lane lane) const {
    const auto step = static_cast<int>(groups.step);
    PP_ROLLED
    for (auto n = static_cast<int>(groups.begin); n < groups.end; n += step) {
      const int word = n * lane.count + lane.index;
      const int at = word * kWordBytes - bytes_past_word(table.dst);
      if (at < nbytes()) write_word(at);
    }
  }

 private:
  using Item = uint32_t;
  static constexpr int kSize = sizeof(Item);
  static constexpr int kItems = kWordBytes / kSize;

  // A place in a row of a plane. The bytes [begin, begin + size) of the row have a
  // source. The rows [0, height) of the plane have such bytes.
  struct Place {
    const Box* box;
    int source;  // offset of byte 0 of the row in that of the box
    int y;
    int height;
    int rows_left;
    int begin;
    int size;
    int x;

    PP_HOST_DEVICE void find_size() {
      size = y >= 0 && y < height ? static_cast<int>(box->width) : 0;
    }
  };

  PP_HOST_DEVICE int nbytes() const { return static_cast<int>(num_bytes(table)); }

  PP_HOST_DEVICE Place place_of(int at) const {
    const DivisionOf<int> number = table.frame.width.divide(at);
    const RowPlace<int> row = row_place(table, number.quotient);
    const int height = row.is_in_slice() ? static_cast<int>(row.box->height) : 0;
    Place place{row.box, row.source() - row.x, row.y, height, row.rows_left, row.x,
                0,       number.remainder};
    place.find_size();
    return place;
  }

  // Moves to the next item, which is at byte `at` of the destination.
  PP_HOST_DEVICE void advance(Place* place, int at) const {
    place->x += kSize;
    if (place->x < static_cast<int>(table.frame.width)) return;
    if (--place->rows_left == 0) {
      *place = place_of(at);
      return;
    }
    place->x = 0;
    ++place->y;
    place->source += static_cast<int>(place->box->width);
    place->find_size();
  }

  PP_HOST_DEVICE Item item_at(const Place& place) const {
    const auto past = static_cast<unsigned>(place.x - place.begin);
    if (past >= static_cast<unsigned>(place.size)) {
      const Fill& fill = place.box->fill;
      const uint64_t half = (place.x & 8) != 0 ? fill.high : fill.low;
      return static_cast<Item>(half >> 8 * (place.x & 7));
    }
    if constexpr (!RowWriter::kReads) return static_cast<Item>(~0ull / 255);
    const uint8_t* const from = place.box->src + (place.source + place.x);
    return RowWriter::read(reinterpret_cast<const Item*>(from));
  }

  // `at` may be outside the destination: its first and last word may be partial.
  PP_HOST_DEVICE void write_word(int at) const {
    const int begin = at < 0 ? 0 : at;
    const int end = lesser_int(at + kWordBytes, nbytes());
    Place place = place_of(begin);
    if (end - begin < kWordBytes) {
      PP_ROLLED
      for (int here = begin; here < end;) {
        *reinterpret_cast<Item*>(table.dst + here) = item_at(place);
        here += kSize;
        if (here < end) advance(&place, here);
      }
      return;
    }
    uint64_t items[kItems];
    for (int i = 0; i < kItems; ++i) {
      items[i] = item_at(place);
      if (i < kItems - 1) advance(&place, at + (i + 1) * kSize);
    }
    *reinterpret_cast<Word16*>(table.dst + at) = {items[1] << 32 | items[0],
                                                  items[3] << 32 | items[2]};
  }
};

// The most bytes of a table for ShortRows: its numbers have 31 bits, also in rows
// outside of a box and in lanes without a word.
constexpr int64_t kMostShortRows = int64_t{1} << 30;

// Returns true if ShortRows takes tables of these boxes, up to kMostShortRows: items of
// four bytes divide all addresses, widths and starts.
inline bool has_whole_items(const BoxTable& table) {
  uint64_t bits = reinterpret_cast<uintptr_t>(table.dst) |
                  static_cast<uint64_t>(int64_t{table.frame.width});
  for (int64_t i = 0; i < table.num_boxes; ++i) {
    const Box& box = table.boxes[i];
    bits |= reinterpret_cast<uintptr_t>(box.src) | static_cast<uint64_t>(box.width);
    if (table.starts != nullptr) bits |= static_cast<uint64_t>(table.starts[i].x);
  }
  return bits % sizeof(uint32_t) == 0;
}

}  // namespace pyparallel
