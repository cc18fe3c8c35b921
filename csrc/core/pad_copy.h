// The body of pad-copy: every byte of the destination is written once, either with a
// source byte or with the fill.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/macros.h"
#include "core/rows.h"

namespace pyparallel {

struct alignas(16) Word16 {
  uint64_t low;
  uint64_t high;
};

// The word at `index` of a row that is all fill.
template <typename Word>
PP_HOST_DEVICE Word fill_word(const Fill& fill, int64_t index) {
  const int64_t byte = (index * static_cast<int64_t>(sizeof(Word))) & 15;
  return static_cast<Word>(((byte & 8) ? fill.high : fill.low) >> (8 * (byte & 7)));
}

template <>
PP_HOST_DEVICE Word16 fill_word<Word16>(const Fill& fill, int64_t) {
  return {fill.low, fill.high};
}

// Fills nbytes at dst, which starts on a whole item: the fill repeats with every item,
// so it begins with its first byte wherever that is.
PP_HOST_DEVICE void fill_bytes(uint8_t* dst, int64_t nbytes, const Fill& fill) {
  if (fill.low == fill.high && fill.low == (fill.low & 255) * (~0ull / 255)) {
    memset(dst, static_cast<int>(fill.low & 255), static_cast<size_t>(nbytes));
    return;
  }
  int64_t done = 0;
  for (; done + 16 <= nbytes; done += 16) memcpy(dst + done, &fill, 16);
  memcpy(dst + done, &fill, static_cast<size_t>(nbytes - done));
}

// Word: an unsigned integer of 1, 2, 4 or 8 bytes, or Word16. Where lanes share a row,
// its size must divide the addresses of dst and of every source, and the widths of the
// frame and of every box (`common_word`); a lone lane needs no alignment.
template <typename Word>
struct PadCopy {
  BoxTable table;

  PP_HOST_DEVICE void operator()(Rows rows, Lane lane) const {
    if (lane.count == 1 && rows.step == 1) {
      copy_runs(rows);
      return;
    }
    for (int64_t n = rows.begin; n < rows.end; n += rows.step) {
      copy_words(row_span(table, n), lane);
    }
  }

 private:
  // Lanes take turns at words, so that neighbours touch neighbouring memory.
  PP_HOST_DEVICE void copy_words(const RowSpan& span, Lane lane) const {
    constexpr int64_t kSize = sizeof(Word);
    Word* dst = reinterpret_cast<Word*>(table.dst + span.offset);
    const Word* src = reinterpret_cast<const Word*>(span.src);
    const Fill fill = span.box->fill;
    int64_t word = lane.index;
    for (; word < span.copied / kSize; word += lane.count) dst[word] = src[word];
    for (; word < span.nbytes / kSize; word += lane.count) {
      dst[word] = fill_word<Word>(fill, word);
    }
  }

  // Rows of one plane lie side by side, so one division serves them all, and rows that
  // need no fill, or nothing but fill, are written together.
  PP_HOST_DEVICE void copy_runs(Rows rows) const {
    const int64_t pieces = table.frame.pieces;
    for (int64_t n = rows.begin; n < rows.end;) {
      const RowSpan span = row_span(table, n);
      int64_t num_rows = 1;
      if (pieces == 1) num_rows = lesser(rows.end - n, table.frame.height - span.y);
      copy_run(span, num_rows);
      n += num_rows;
    }
  }

  PP_HOST_DEVICE void copy_run(const RowSpan& span, int64_t num_rows) const {
    uint8_t* dst = table.dst + span.offset;
    const Fill& fill = span.box->fill;
    int64_t num_copied = 0;
    if (span.copied > 0) num_copied = lesser(num_rows, span.box->height - span.y);
    if (num_copied > 0 && span.copied == span.nbytes) {
      memcpy(dst, span.src, static_cast<size_t>(num_copied * span.nbytes));
    } else {
      for (int64_t row = 0; row < num_copied; ++row) {
        uint8_t* to = dst + row * span.nbytes;
        memcpy(to, span.src + row * span.copied, static_cast<size_t>(span.copied));
        fill_bytes(to + span.copied, span.nbytes - span.copied, fill);
      }
    }
    const int64_t first_filled = num_copied * span.nbytes;
    fill_bytes(dst + first_filled, num_rows * span.nbytes - first_filled, fill);
  }
};

}  // namespace pyparallel
