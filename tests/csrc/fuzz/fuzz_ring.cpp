// Any bytes as the header of a ring, and any order of claims and passes on it.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/ring.h"
#include "fuzz.h"

namespace pyparallel::testing {
namespace {

constexpr int64_t kLineWords = kRingLine / 8;

// Exactly the bytes of a header, so that a sanitizer reports reads beyond them.
using Header = std::unique_ptr<int64_t, decltype(&std::free)>;

Header allocate(int64_t num_slots) {
  const auto nbytes = static_cast<size_t>(ring_nbytes(num_slots));
  Header header(static_cast<int64_t*>(std::aligned_alloc(kRingLine, nbytes)),
                &std::free);
  memset(header.get(), 0, nbytes);
  return header;
}

// Words that another process might have left there, by place.
void scribble(FuzzedNumbers* numbers, int64_t num_slots, std::vector<int64_t>* words) {
  const auto size = static_cast<int64_t>(words->size());
  for (int64_t left = numbers->between(0, 6); left > 0; --left) {
    const int64_t place = numbers->between(0, 1) == 0 ? numbers->between(0, 2)
                                                      : numbers->between(0, size - 1);
    (*words)[static_cast<size_t>(place)] =
        numbers->between(0, 1) == 0
            ? numbers->one_of({0, 1, 2, 3, kRingMagic, num_slots, num_slots + 1})
            : numbers->raw();
  }
}

int64_t first_free(const std::vector<int64_t>& words, int64_t num_slots) {
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (words[static_cast<size_t>((1 + slot) * kLineWords)] == 0) return slot;
  }
  return -1;
}

}  // namespace

void fuzz(FuzzedNumbers* numbers) {
  const int64_t num_slots = numbers->between(1, 9);
  const Header header = allocate(num_slots);
  Ring ring(reinterpret_cast<uint8_t*>(header.get()), num_slots);
  CHECK(!ring.is_formatted());
  std::vector<int64_t> words(static_cast<size_t>(ring_nbytes(num_slots) / 8));
  if (numbers->between(0, 3) > 0) {
    ring.format();
    words[0] = kRingMagic;
    words[1] = num_slots;
    words[2] = static_cast<int64_t>(RingBackend::kNative);
    CHECK(memcmp(header.get(), words.data(), words.size() * 8) == 0);
  }
  scribble(numbers, num_slots, &words);
  memcpy(header.get(), words.data(), words.size() * 8);
  const bool known = words[2] == 1 || words[2] == 2;
  CHECK(ring.is_formatted() ==
        (words[0] == kRingMagic && words[1] == num_slots && known));
  CHECK(ring.is_native() == (words[2] == 1));
  while (!numbers->done()) {
    if (numbers->between(0, 2) == 0) {
      const int64_t holder = numbers->between(1, 4);
      const int64_t slot = first_free(words, num_slots);
      CHECK(ring.claim(holder) == slot);
      if (slot >= 0) words[static_cast<size_t>((1 + slot) * kLineWords)] = holder;
    } else {
      const int64_t slot = numbers->between(0, num_slots - 1);
      int64_t& held = words[static_cast<size_t>((1 + slot) * kLineWords)];
      const int64_t from = numbers->between(0, 1) == 0 ? held : numbers->between(0, 4);
      const int64_t to = numbers->between(0, 4);
      CHECK(ring.holder(slot) == held);
      CHECK(ring.pass(slot, from, to) == (held == from));
      if (held == from) held = to;
    }
    // Only the words of the holders, not their other bytes.
    CHECK(memcmp(header.get(), words.data(), words.size() * 8) == 0);
  }
}

}  // namespace pyparallel::testing
