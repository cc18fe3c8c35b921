// The body of pad-copy: every byte of the destination is written once, either with a
// source byte or with the fill. What writes the bytes is a mover.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/macros.h"
#include "core/rows.h"
#include "core/words.h"

namespace pyparallel {

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

// A mover writes the bytes of a lone lane, each call where the one before it ended, and
// says what word lanes write for a word of the source. Every call of a body makes one,
// and calls finish() at the end: what it wrote is then there for whoever learns that
// the call is over.

// By the C library, through the caches.
struct CachedMover {
  PP_HOST_DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    memcpy(to, from, static_cast<size_t>(nbytes));
  }
  PP_HOST_DEVICE void fill(uint8_t* to, int64_t nbytes, const Fill& fill) {
    fill_bytes(to, nbytes, fill);
  }
  template <typename Word>
  PP_HOST_DEVICE static Word read(const Word* from) {
    return *from;
  }
  PP_HOST_DEVICE void finish() {}
};

// Marks with ones where there is data, and reads none of it: makes a mask.
struct MarkMover : CachedMover {
  PP_HOST_DEVICE void copy(uint8_t* to, const uint8_t*, int64_t nbytes) {
    memset(to, 1, static_cast<size_t>(nbytes));
  }
  template <typename Word>
  PP_HOST_DEVICE static Word read(const Word*) {
    constexpr uint64_t kOnes = ~0ull / 255;
    return fill_word<Word>(Fill{kOnes, kOnes}, 0);
  }
};

// Word: an unsigned integer of 1, 2, 4 or 8 bytes, or Word16. Where lanes share a row,
// its size must divide the addresses of dst and of every source, the widths of the
// frame and of every box, and where boxes start in a row (`common_word`); a lone lane
// needs no alignment.
template <typename Word, typename Mover = CachedMover>
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
    const int64_t lead = span.lead / kSize;
    const int64_t end = lead + span.copied / kSize;
    int64_t word = lane.index;
    for (; word < lead; word += lane.count) dst[word] = fill_word<Word>(fill, word);
    for (; word < end; word += lane.count) dst[word] = Mover::read(src + word - lead);
    for (; word < span.nbytes / kSize; word += lane.count) {
      dst[word] = fill_word<Word>(fill, word);
    }
  }

  // Rows of one plane lie side by side, so one division serves those above a box, and
  // one those from its first row on.
  PP_HOST_DEVICE void copy_runs(Rows rows) const {
    const int64_t pieces = table.frame.pieces;
    Mover mover;
    for (int64_t n = rows.begin; n < rows.end;) {
      const RowSpan span = row_span(table, n);
      int64_t num_rows = 1;
      if (pieces == 1) {
        num_rows = lesser(rows.end - n, span.y < 0 ? -span.y : span.rows_left);
      }
      copy_run(&mover, span, num_rows);
      n += num_rows;
    }
    mover.finish();
  }

  // What fill stands between the bytes of one row and those of the next is written
  // together, and so are rows that need none.
  PP_HOST_DEVICE void copy_run(Mover* mover, const RowSpan& span,
                               int64_t num_rows) const {
    uint8_t* to = table.dst + span.offset;
    const uint8_t* end = to + num_rows * span.nbytes;
    const Fill& fill = span.box->fill;
    int64_t num_copied = 0;
    if (span.copied > 0) num_copied = lesser(num_rows, span.box->height - span.y);
    if (num_copied > 0 && span.copied == span.nbytes) {
      mover->copy(to, span.src, num_copied * span.nbytes);
      to += num_copied * span.nbytes;
    } else if (num_copied > 0) {
      const int64_t between = span.nbytes - span.copied;
      if (span.lead > 0) mover->fill(to, span.lead, fill);
      to += span.lead;
      for (int64_t row = 0; row < num_copied; ++row) {
        if (row > 0) {
          mover->fill(to, between, fill);
          to += between;
        }
        mover->copy(to, span.src + row * span.copied, span.copied);
        to += span.copied;
      }
    }
    if (to < end) mover->fill(to, end - to, fill);
  }
};

}  // namespace pyparallel
