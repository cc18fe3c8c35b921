// The header of a ring: a slot has one holder, for all orders of threads. Processes
// share a ring in tests/backend/test_ring_header.py.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "core/ring.h"

namespace {

using namespace pyparallel;

constexpr int64_t kParent = 1;
constexpr int kPayload = 96;  // words of a slot

// A formatted ring and its slots.
struct Shared {
  explicit Shared(int64_t num_slots)
      : nbytes(static_cast<size_t>(ring_nbytes(num_slots) + num_slots * kPayload * 8)),
        memory(static_cast<uint8_t*>(std::aligned_alloc(kRingLine, nbytes))),
        ring(memory, num_slots) {
    ring.format();
  }
  ~Shared() { std::free(memory); }

  int64_t* payload(int64_t slot) {
    uint8_t* const slots = memory + ring_nbytes(ring.num_slots());
    return reinterpret_cast<int64_t*>(slots) + slot * kPayload;
  }

  void write(int64_t slot, int64_t value) {
    for (int i = 0; i < kPayload; ++i) payload(slot)[i] = value;
  }

  bool holds(int64_t slot, int64_t value) {
    bool good = true;
    for (int i = 0; i < kPayload; ++i) good &= payload(slot)[i] == value;
    return good;
  }

  size_t nbytes;
  uint8_t* memory;
  Ring ring;
};

TEST(test_line_zero_describes_the_memory) {
  Shared shared(3);
  CHECK(shared.ring.is_formatted() && shared.ring.is_native());
  CHECK(!Ring(shared.memory, 2).is_formatted());
  for (size_t byte = 0; byte < 24; ++byte) {
    for (uint8_t flip : {1, 2, 4, 128}) {
      shared.memory[byte] ^= flip;
      CHECK(!shared.ring.is_formatted());
      shared.memory[byte] ^= flip;
    }
  }
  shared.memory[16] = static_cast<uint8_t>(RingBackend::kPython);
  CHECK(shared.ring.is_formatted() && !shared.ring.is_native());
}

TEST(test_formatting_clears_everything) {
  Shared shared(5);
  memset(shared.memory, 0xEE, shared.nbytes);
  CHECK(!shared.ring.is_formatted());
  shared.ring.format();
  int64_t sum = 0;
  for (int64_t i = kRingLine; i < ring_nbytes(5); ++i) sum += shared.memory[i];
  CHECK(shared.ring.is_formatted() && sum == 0);
  CHECK(shared.holds(0, static_cast<int64_t>(0xEEEEEEEEEEEEEEEE)));
}

// Fills slots and gives them to the parent; keeps the last one if it is to die.
void produce(Shared* shared, int64_t id, int num_slots, bool die) {
  for (int done = 0; done < num_slots;) {
    const int64_t slot = shared->ring.claim(id);
    if (slot < 0) {
      std::this_thread::yield();
      continue;
    }
    CHECK(shared->ring.holder(slot) == id);
    shared->write(slot, id * 1000 + done);
    ++done;
    if (die && done == num_slots) return;
    CHECK(shared->holds(slot, id * 1000 + done - 1));
    CHECK(shared->ring.pass(slot, id, kParent));
  }
}

// Takes slots from the parent as `id`, reads and frees them. It also writes into freed
// slots: the next producer must not see these bytes.
int64_t consume(Shared* shared, int64_t id) {
  int64_t taken = 0;
  for (int64_t slot = 0; slot < shared->ring.num_slots(); ++slot) {
    if (!shared->ring.pass(slot, kParent, id)) continue;
    CHECK(shared->holds(slot, shared->payload(slot)[0]));
    shared->write(slot, -id);
    CHECK(shared->ring.pass(slot, id, kNoHolder));
    ++taken;
  }
  return taken;
}

TEST(test_threads_never_see_a_slot_of_two_holders) {
  constexpr int kProducers = 3;
  constexpr int kEach = 600;
  Shared shared(4);
  std::atomic<int64_t> taken{0};
  std::vector<std::thread> threads;
  for (int p = 0; p < kProducers; ++p) {
    threads.emplace_back(produce, &shared, 2 + p, kEach, /*die=*/p == 0);
  }
  constexpr int64_t kAll = kProducers * kEach - 1;  // one producer dies with its last
  for (int64_t consumer : {100, 101}) {
    threads.emplace_back([&shared, &taken, consumer] {
      while (taken.load() < kAll) {
        const int64_t count = consume(&shared, consumer);
        taken.fetch_add(count);
        if (count == 0) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(taken.load() == kAll);
  int64_t held = 0;
  for (int64_t slot = 0; slot < 4; ++slot) {
    if (shared.ring.pass(slot, 2, kNoHolder)) {
      ++held;
      CHECK(shared.holds(slot, 2 * 1000 + kEach - 1));
    }
  }
  CHECK(held == 1);
}

}  // namespace
