// The body of pad-copy. It writes every byte of the destination once: a source byte or
// a fill byte. A RowWriter does the writing.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/boxes.h"
#include "core/host_device.h"
#include "core/words.h"
#include "core/work.h"

namespace pyparallel {

// Fills nbytes at dst, which is the start of an item. The fill repeats with every item,
// so it begins with its first byte.
PP_HOST_DEVICE void fill_bytes(uint8_t* dst, int64_t nbytes, const Fill& fill) {
  if (fill.low == fill.high && fill.low == (fill.low & 255) * (~0ull / 255)) {
    memset(dst, static_cast<int>(fill.low & 255), static_cast<size_t>(nbytes));
    return;
  }
  int64_t done = 0;
  for (; done + 16 <= nbytes; done += 16) memcpy(dst + done, &fill, 16);
  memcpy(dst + done, &fill, static_cast<size_t>(nbytes - done));
}

// A RowWriter writes the bytes of a single lane; each call continues where the last one
// ended. It also reads the source for lanes that share a row, unless kReads is false.
// Every call of a body makes a RowWriter and ends with finish(), which completes its
// writes.

// Writes with the C library, through the caches.
struct CachedWriter : PlainReader {
  static constexpr bool kReads = true;
  static constexpr bool kCasts = false;

  // Returns the source of the bytes that would be at `at` without a cast (core/cast.h).
  PP_HOST_DEVICE const uint8_t* source(const uint8_t* /*first*/,
                                       const uint8_t* at) const {
    return at;
  }

  PP_HOST_DEVICE void copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    memcpy(to, from, static_cast<size_t>(nbytes));
  }
  PP_HOST_DEVICE void fill(uint8_t* to, int64_t nbytes, const Fill& fill) {
    fill_bytes(to, nbytes, fill);
  }
  PP_HOST_DEVICE void finish() {}
};

// Writes ones in place of the data, which it does not read: makes a mask.
struct MaskWriter : CachedWriter {
  static constexpr bool kReads = false;

  PP_HOST_DEVICE void copy(uint8_t* to, const uint8_t*, int64_t nbytes) {
    memset(to, 1, static_cast<size_t>(nbytes));
  }
};

// A single lane needs no alignment and takes any piece of a row. If lanes share a row,
// its pieces have less than 2**31 bytes.
template <typename RowWriter = CachedWriter>
struct PadCopy {
  BoxTable table;

  PP_HOST_DEVICE void operator()(Rows rows, Lane lane) const {
    if (lane.count == 1 && rows.step == 1) {
      copy_runs(rows, RowWriter());
      return;
    }
    PP_ROLLED
    for (int64_t n = rows.begin; n < rows.end; n += rows.step) {
      write_span(row_span(table, n), lane);
    }
  }

  // Writes consecutive rows with a single lane. The rows of one plane are contiguous,
  // so one division serves the rows above a box and another one the rows from its first
  // row on.
  PP_HOST_DEVICE void copy_runs(Rows rows, RowWriter writer) const {
    const int64_t pieces = table.frame.pieces;
    for (int64_t n = rows.begin; n < rows.end;) {
      const RowSpan span = row_span(table, n);
      int64_t num_rows = 1;
      if (pieces == 1) {
        num_rows = lesser(rows.end - n, span.y < 0 ? -span.y : span.rows_left);
      }
      copy_run(&writer, span, num_rows);
      n += num_rows;
    }
    writer.finish();
  }

 private:
  static constexpr uint64_t kMask = ~0ull / 255;

  // The division of a span between lanes. The bytes [begin, end) have a source. Words
  // of `lead` and `fill` have fill alone, words of `data` source bytes alone. All other
  // bytes are edges, and few.
  struct Parts {
    uint8_t* to;
    const uint8_t* from;  // the source of byte 0, if it has one
    int nbytes;
    int begin;
    int end;
    Range lead;
    Range data;
    Range fill;
  };

  PP_HOST_DEVICE Parts parts_of(const RowSpan& span) const {
    Parts parts{table.dst + span.offset,
                span.src - span.lead,
                static_cast<int>(span.nbytes),
                static_cast<int>(span.lead),
                static_cast<int>(span.lead + span.copied),
                {},
                {},
                {}};
    const int head = items_to_word(parts.to, parts.nbytes);
    const int tail = parts.nbytes - bytes_past_word(parts.nbytes - head);
    constexpr int kUp = kWordBytes - 1;
    parts.lead = {head, last_word(head, parts.begin, tail)};
    parts.fill = {last_word(head, parts.end + kUp, tail), tail};
    parts.data.begin = last_word(head, parts.begin + kUp, tail);
    parts.data.end = last_word(head, parts.end, tail);
    if (parts.data.begin >= parts.data.end) {
      parts.data.end = parts.data.begin;
    } else if (RowWriter::kReads) {
      const Box& box = *span.box;
      const int64_t size = table.frame.planes * box.depth * box.height * box.width;
      parts.data = readable_words(parts.data, parts.from, box.src, box.src + size);
    }
    return parts;
  }

  // Returns the end of the last word between `head` and `limit`; at most `tail`, which
  // is the end of a word.
  PP_HOST_DEVICE static int last_word(int head, int limit, int tail) {
    if (limit < head) return head;
    return lesser_int(limit - bytes_past_word(limit - head), tail);
  }

  PP_HOST_DEVICE void write_span(const RowSpan& span, Lane lane) const {
    const Parts parts = parts_of(span);
    const Fill& fill = span.box->fill;
    const auto bits = reinterpret_cast<uintptr_t>(parts.to) |
                      reinterpret_cast<uintptr_t>(parts.from) |
                      static_cast<uintptr_t>(parts.begin | parts.end | parts.nbytes);
    if (bits % 4 == 0) {
      write_edges<uint32_t>(parts, fill, lane);
    } else {
      write_edges<uint8_t>(parts, fill, lane);
    }
    if (parts.data.begin < parts.data.end) {
      if constexpr (RowWriter::kReads) {
        move_words<RowWriter>(parts.to, parts.from, parts.data, lane);
      } else {
        fill_words(parts.to, Word16{kMask, kMask}, parts.data, lane);
      }
    }
    if (parts.lead.begin < parts.lead.end || parts.fill.begin < parts.fill.end) {
      const Word16 row{fill.low, fill.high};
      const Word16 word = shifted_word(row, row, bytes_past_word(parts.lead.begin));
      fill_words(parts.to, word, parts.lead, lane);
      fill_words(parts.to, word, parts.fill, lane);
    }
  }

  // Item: an unsigned integer. Its size divides all addresses and sizes of `parts`. A
  // lane reads two items before it stores the first, as in move_words.
  template <typename Item>
  PP_HOST_DEVICE static void write_edges(const Parts& parts, const Fill& fill,
                                         Lane lane) {
    const int step = static_cast<int>(sizeof(Item)) * lane.count;
    PP_ROLLED
    for (int edge = static_cast<int>(sizeof(Item)) * lane.index;; edge += 2 * step) {
      const int first = place_of_edge(parts, edge);
      if (first >= parts.nbytes) break;
      const int second = place_of_edge(parts, edge + step);
      const auto item = edge_at<Item>(parts, fill, first);
      const auto next = edge_at<Item>(parts, fill, second);
      *reinterpret_cast<Item*>(parts.to + first) = item;
      if (second < parts.nbytes) *reinterpret_cast<Item*>(parts.to + second) = next;
    }
  }

  // Returns the place of byte number `edge` of all edges; nbytes or more without one.
  PP_HOST_DEVICE static int place_of_edge(const Parts& parts, int edge) {
    int at = edge;
    if (at >= parts.lead.begin) at += parts.lead.end - parts.lead.begin;
    if (at >= parts.data.begin) at += parts.data.end - parts.data.begin;
    if (at >= parts.fill.begin) at += parts.fill.end - parts.fill.begin;
    return at;
  }

  // `at` may be outside the row.
  template <typename Item>
  PP_HOST_DEVICE static Item edge_at(const Parts& parts, const Fill& fill, int at) {
    const uint64_t half = (at & 8) != 0 ? fill.high : fill.low;
    auto item = static_cast<Item>(half >> 8 * (at & 7));
    if (at >= parts.begin && at < parts.end) {
      item = static_cast<Item>(kMask);
      if constexpr (RowWriter::kReads) {
        item = RowWriter::read(reinterpret_cast<const Item*>(parts.from + at));
      }
    }
    return item;
  }

  // Writes the fill between the bytes of two rows in one call, and rows without fill in
  // one call.
  PP_HOST_DEVICE void copy_run(RowWriter* writer, const RowSpan& span,
                               int64_t num_rows) const {
    uint8_t* to = table.dst + span.offset;
    const uint8_t* end = to + num_rows * span.nbytes;
    const Fill& fill = span.box->fill;
    int64_t num_copied = 0;
    if (span.copied > 0) num_copied = lesser(num_rows, span.box->height - span.y);
    if (num_copied > 0 && span.copied == span.nbytes) {
      writer->copy(to, writer->source(span.box->src, span.src),
                   num_copied * span.nbytes);
      to += num_copied * span.nbytes;
    } else if (num_copied > 0) {
      const int64_t between = span.nbytes - span.copied;
      if (span.lead > 0) writer->fill(to, span.lead, fill);
      to += span.lead;
      for (int64_t row = 0; row < num_copied; ++row) {
        if (row > 0) {
          writer->fill(to, between, fill);
          to += between;
        }
        const uint8_t* const from = span.src + row * span.copied;
        writer->copy(to, writer->source(span.box->src, from), span.copied);
        to += span.copied;
      }
    }
    if (to < end) writer->fill(to, end - to, fill);
  }
};

}  // namespace pyparallel
