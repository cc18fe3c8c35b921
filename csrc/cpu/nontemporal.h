// Stores that bypass the caches. A copy that is larger than the last cache evicts all
// other data, and reads every line of its destination before it overwrites the line.
// Non-temporal stores of whole lines do neither.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/pad_copy.h"

namespace pyparallel::cpu {

constexpr int64_t kLineBytes = 64;

// Writers of whole cache lines, on x86 only. `to` is aligned to a line, `from` need not
// be. `pattern` has sixteen bytes. supported() asks the CPU at run time.
#if defined(__x86_64__)

struct Sse2Lines {
  static bool supported() { return true; }
  static void copy(uint8_t* to, const uint8_t* from, int64_t num_lines);
  static void fill(uint8_t* to, const uint8_t* pattern, int64_t num_lines);
  static void fence();
};

struct Avx2Lines : Sse2Lines {
  static bool supported();
  static void copy(uint8_t* to, const uint8_t* from, int64_t num_lines);
  static void fill(uint8_t* to, const uint8_t* pattern, int64_t num_lines);
};

struct Avx512Lines : Sse2Lines {
  static bool supported();
  static void copy(uint8_t* to, const uint8_t* from, int64_t num_lines);
  static void fill(uint8_t* to, const uint8_t* pattern, int64_t num_lines);
};

#endif

// Calls visit(Lines{}) with each line writer that this CPU supports, the fastest first,
// until one call returns true. Returns true if one did.
template <typename Visit>
bool visit_lines(const Visit& visit) {
#if defined(__x86_64__)
  if (Avx512Lines::supported() && visit(Avx512Lines{})) return true;
  if (Avx2Lines::supported() && visit(Avx2Lines{})) return true;
  if (Sse2Lines::supported() && visit(Sse2Lines{})) return true;
#endif
  static_cast<void>(visit);
  return false;
}

// A RowWriter (core/pad_copy.h) for the consecutive bytes of one worker. Lines that one
// call begins and a later call completes are assembled in line_. Only the first and the
// last line of a worker are written in part and through the cache, because the worker
// may share them with its neighbours.
template <typename Lines>
class NontemporalWriter : public CachedWriter {
 public:
  void copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    const int64_t head = open_line(to, nbytes);
    if (head > 0) {
      memcpy(line_ + used_, from, static_cast<size_t>(head));
      advance(head);
    }
    const int64_t num_lines = (nbytes - head) / kLineBytes;
    if (num_lines > 0) Lines::copy(to + head, from + head, num_lines);
    const int64_t done = head + num_lines * kLineBytes;
    if (done == nbytes) return;
    begin_line(to + done);
    memcpy(line_, from + done, static_cast<size_t>(nbytes - done));
    used_ = nbytes - done;
  }

  void fill(uint8_t* to, int64_t nbytes, const Fill& fill) {
    uint8_t twice[32];
    memcpy(twice, &fill, 16);
    memcpy(twice + 16, &fill, 16);
    const int64_t head = open_line(to, nbytes);
    if (head > 0) {
      repeat(line_ + used_, twice, head);
      advance(head);
    }
    const uint8_t* pattern = twice + (head & 15);
    const int64_t num_lines = (nbytes - head) / kLineBytes;
    if (num_lines > 0) Lines::fill(to + head, pattern, num_lines);
    const int64_t done = head + num_lines * kLineBytes;
    if (done == nbytes) return;
    begin_line(to + done);
    repeat(line_, pattern, nbytes - done);
    used_ = nbytes - done;
  }

  void finish() {
    if (to_ != nullptr) write_part();
    Lines::fence();
  }

 private:
  // Returns the number of the nbytes at `to` that belong to an open line.
  int64_t open_line(uint8_t* to, int64_t nbytes) {
    const auto used =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) & (kLineBytes - 1));
    if (used == 0) return 0;
    if (to_ == nullptr) {
      to_ = to - used;
      first_ = used_ = used;
    }
    return lesser(nbytes, kLineBytes - used);
  }

  void begin_line(uint8_t* to) {
    to_ = to;
    first_ = 0;
  }

  void advance(int64_t nbytes) {
    used_ += nbytes;
    if (used_ < kLineBytes) return;
    if (first_ == 0) {
      Lines::copy(to_, line_, 1);
    } else {
      write_part();
    }
    to_ = nullptr;
  }

  void write_part() {
    memcpy(to_ + first_, line_ + first_, static_cast<size_t>(used_ - first_));
  }

  static void repeat(uint8_t* to, const uint8_t* pattern, int64_t nbytes) {
    int64_t done = 0;
    for (; done + 16 <= nbytes; done += 16) memcpy(to + done, pattern, 16);
    memcpy(to + done, pattern, static_cast<size_t>(nbytes - done));
  }

  alignas(kLineBytes) uint8_t line_[kLineBytes];
  uint8_t* to_ = nullptr;  // the open line, if any: line_ has its bytes [first_, used_)
  int64_t first_ = 0;
  int64_t used_ = 0;
};

}  // namespace pyparallel::cpu
