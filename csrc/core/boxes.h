// The box table of a pad-copy, and the arithmetic from the number of a row to its
// bytes.
//
// A destination is a sequence of equal frames of planes x depth x height rows. A row
// has `width` bytes. Each frame gets one box: a source that is smaller in depth, height
// and width and has the same place in every plane. The rest of the frame is filled.
//
// Wide rows are cut into pieces so that few of them still occupy many workers. Workers
// count pieces: piece n is piece n % pieces of row n / pieces.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace pyparallel {

// Sixteen bytes of repeated fill value, lowest byte first. Item sizes divide 16 and
// rows start on whole items, so byte b of any row is filled with byte b % 16 of this.
struct Fill {
  uint64_t low;
  uint64_t high;
};

// `src` may be null if the box has no bytes.
struct Box {
  const uint8_t* src;
  int64_t depth;
  int64_t height;
  int64_t width;
  Fill fill;
};

// The first slice, row and byte of a plane that a box covers. The byte is a whole item.
struct Start {
  int64_t z;
  int64_t y;
  int64_t x;
};

template <typename Int>
struct DivisionOf {
  Int quotient;
  Int remainder;
};

using Division = DivisionOf<int64_t>;

// A count that many numbers are divided by. A multiplication by the rounded reciprocal
// replaces each division of numbers below 2**31. A GPU needs about twenty instructions
// for a division in 32 bits, and a hundred in 64.
class Divisor {
 public:
  constexpr Divisor(int64_t value = 1) : value_(value) {
    if (value < 1 || value >> 31 != 0) return;
    while (int64_t{1} << shift_ < value) ++shift_;
    shift_ += 31;
    // Rounded up, the reciprocal is too large by less than one part in 2**31. So the
    // error of a product stays below the distance to the next quotient. It has 32 bits,
    // because 2**(shift - 31) is less than twice the divisor.
    const uint64_t power = uint64_t{1} << shift_;
    const auto divisor = static_cast<uint64_t>(value);
    multiplier_ = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }

  PP_HOST_DEVICE operator int64_t() const { return value_; }

  // Requires n >= 0.
  PP_HOST_DEVICE Division divide(int64_t n) const {
    if (((n | value_) >> 31) != 0) return {n / value_, n % value_};
    const DivisionOf<int32_t> narrow = divide(static_cast<int32_t>(n));
    return {narrow.quotient, narrow.remainder};
  }
  // The divisor must be below 2**31, too.
  PP_HOST_DEVICE DivisionOf<int32_t> divide(int32_t n) const {
    const auto product = uint64_t{static_cast<uint32_t>(n)} * multiplier_;
    const auto quotient = static_cast<int32_t>(product >> shift_);
    return {quotient, n - quotient * static_cast<int32_t>(value_)};
  }

 private:
  int64_t value_;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

// A place in a frame is found by division.
struct Frame {
  Divisor planes;
  Divisor depth;
  Divisor height;
  Divisor width;
  Divisor pieces;       // per row
  int64_t piece_width;  // bytes; a multiple of 16 unless pieces == 1
};

// A view. Every field of the frame is positive. The table may have no boxes. `starts`
// has one entry per box, or is null if every box begins in the low corner of its
// planes.
struct BoxTable {
  uint8_t* dst;
  const Box* boxes;
  const Start* starts;
  int64_t num_boxes;
  Frame frame;
};

constexpr BoxTable kNoBoxes{nullptr, nullptr, nullptr, 0, {1, 1, 1, 1, 1, 1}};

PP_HOST_DEVICE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
PP_HOST_DEVICE int64_t greater(int64_t a, int64_t b) { return a < b ? b : a; }

PP_HOST_DEVICE int64_t num_rows(const BoxTable& table) {
  const Frame& frame = table.frame;
  return table.num_boxes * frame.planes * frame.depth * frame.height;
}

PP_HOST_DEVICE int64_t num_bytes(const BoxTable& table) {
  return num_rows(table) * table.frame.width;
}

PP_HOST_DEVICE int64_t num_pieces(const BoxTable& table) {
  return num_rows(table) * table.frame.pieces;
}

// Returns the part of a table for `count` boxes from number `first` on. Their frames
// are contiguous.
inline BoxTable slice_boxes(const BoxTable& table, int64_t first, int64_t count) {
  const Frame& frame = table.frame;
  const int64_t nbytes = frame.planes * frame.depth * frame.height * frame.width;
  return {table.dst + first * nbytes, table.boxes + first,
          table.starts == nullptr ? nullptr : table.starts + first, count, frame};
}

// The bytes of one piece of a row: `lead` bytes of fill, `copied` bytes from src, then
// fill up to nbytes. Pieces start at multiples of 16. `y` is relative to the box, which
// covers the rows [0, box->height); rows outside are fill.
struct RowSpan {
  const Box* box;
  const uint8_t* src;
  int64_t offset;
  int64_t nbytes;
  int64_t lead;
  int64_t copied;
  int64_t y;
  int64_t rows_left;  // of the plane, with this one
};

// The place of a row, in coordinates from the low corner of its box on. They are
// outside of the box in rows of fill. The box starts at byte x. Int holds all numbers
// of bytes.
template <typename Int>
struct RowPlace {
  const Box* box;
  Int plane;
  Int slice;
  Int y;
  Int x;
  Int rows_left;  // of the plane, with this one

  PP_HOST_DEVICE bool is_in_slice() const {
    return slice >= 0 && slice < static_cast<Int>(box->depth);
  }

  // Returns the offset of the row in the source, if it has bytes there.
  PP_HOST_DEVICE Int source() const {
    const Int row = plane * static_cast<Int>(box->depth) + slice;
    return (row * static_cast<Int>(box->height) + y) * static_cast<Int>(box->width);
  }
};

template <typename Int>
PP_HOST_DEVICE RowPlace<Int> row_place(const BoxTable& table, Int row) {
  const Frame& frame = table.frame;
  const DivisionOf<Int> y = frame.height.divide(row);
  const DivisionOf<Int> z = frame.depth.divide(y.quotient);
  const DivisionOf<Int> plane = frame.planes.divide(z.quotient);
  RowPlace<Int> place{&table.boxes[plane.quotient],
                      plane.remainder,
                      z.remainder,
                      y.remainder,
                      0,
                      static_cast<Int>(frame.height) - y.remainder};
  if (table.starts != nullptr) {
    const Start& start = table.starts[plane.quotient];
    place.slice -= static_cast<Int>(start.z);
    place.y -= static_cast<Int>(start.y);
    place.x = static_cast<Int>(start.x);
  }
  return place;
}

PP_HOST_DEVICE RowSpan row_span(const BoxTable& table, int64_t piece) {
  const Frame& frame = table.frame;
  const Division row = frame.pieces.divide(piece);
  const RowPlace<int64_t> place = row_place(table, row.quotient);
  const Box& box = *place.box;
  const int64_t first = row.remainder * frame.piece_width;
  RowSpan span{&box,
               nullptr,
               row.quotient * frame.width + first,
               lesser(frame.width - first, frame.piece_width),
               0,
               0,
               place.y,
               place.rows_left};
  const int64_t begin = greater(place.x - first, 0);
  const int64_t end = lesser(place.x + box.width - first, span.nbytes);
  if (place.is_in_slice() && place.y >= 0 && place.y < box.height && begin < end) {
    span.src = box.src + place.source() + (first + begin - place.x);
    span.lead = begin;
    span.copied = end - begin;
  }
  return span;
}

}  // namespace pyparallel
