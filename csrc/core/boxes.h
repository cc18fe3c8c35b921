// The box table of a pad-copy, and the arithmetic from a row's number to its bytes.
//
// A destination is a pile of equal frames of planes x depth x height rows; a row has
// `width` bytes. Each frame takes one box, a source that is smaller in depth, height
// and width and sits in the low corner of every plane; what it leaves is filled.
//
// Wide rows are cut into pieces so that few of them still feed many workers. Workers
// count pieces: number n is piece n % pieces of row n / pieces.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace pyparallel {

// Sixteen bytes of repeated fill value, lowest byte first. Item sizes divide 16 and
// rows start on whole items, so byte b of any row is filled with byte b % 16 of this.
struct Fill {
  uint64_t low;
  uint64_t high;
};

// `src` is null when the box has no bytes; it is not read then.
struct Box {
  const uint8_t* src;
  int64_t depth;
  int64_t height;
  int64_t width;
  Fill fill;
};

struct Frame {
  int64_t planes;
  int64_t depth;
  int64_t height;
  int64_t width;
  int64_t pieces;       // per row
  int64_t piece_width;  // bytes; a multiple of 16 unless pieces == 1
};

// Owns nothing. All positive: num_boxes and every field of frame.
struct BoxTable {
  uint8_t* dst;
  const Box* boxes;
  int64_t num_boxes;
  Frame frame;
};

struct Division {
  int64_t quotient;
  int64_t remainder;
};

// In 32 bits when both numbers fit: a 64-bit division is several times slower, on the
// CPU and more so on a GPU. Needs n >= 0 and d > 0.
PP_HOST_DEVICE Division divide_row(int64_t n, int64_t d) {
  if (((n | d) >> 32) == 0) {
    const uint32_t narrow_n = static_cast<uint32_t>(n);
    const uint32_t narrow_d = static_cast<uint32_t>(d);
    return {narrow_n / narrow_d, narrow_n % narrow_d};
  }
  return {n / d, n % d};
}

PP_HOST_DEVICE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

PP_HOST_DEVICE int64_t num_rows(const BoxTable& table) {
  const Frame& frame = table.frame;
  return table.num_boxes * frame.planes * frame.depth * frame.height;
}

PP_HOST_DEVICE int64_t num_pieces(const BoxTable& table) {
  return num_rows(table) * table.frame.pieces;
}

// Where one piece of a row goes and comes from: `copied` bytes from src, then fill up
// to nbytes. `y` is the row's place in its plane. Pieces start on multiples of 16.
struct RowSpan {
  const Box* box;
  const uint8_t* src;
  int64_t offset;
  int64_t nbytes;
  int64_t copied;
  int64_t y;
};

PP_HOST_DEVICE RowSpan row_span(const BoxTable& table, int64_t piece) {
  const Frame& frame = table.frame;
  const Division row = divide_row(piece, frame.pieces);
  const Division y = divide_row(row.quotient, frame.height);
  const Division z = divide_row(y.quotient, frame.depth);
  const Division plane = divide_row(z.quotient, frame.planes);
  const Box& box = table.boxes[plane.quotient];
  const int64_t first = row.remainder * frame.piece_width;
  RowSpan span{&box,
               nullptr,
               row.quotient * frame.width + first,
               lesser(frame.width - first, frame.piece_width),
               0,
               y.remainder};
  if (z.remainder < box.depth && y.remainder < box.height && first < box.width) {
    const int64_t slice = plane.remainder * box.depth + z.remainder;
    span.src = box.src + (slice * box.height + y.remainder) * box.width + first;
    span.copied = lesser(box.width - first, span.nbytes);
  }
  return span;
}

}  // namespace pyparallel
