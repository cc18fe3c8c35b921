// Copies that other code queues from pinned memory.
#include <array>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

constexpr int64_t kNumBytes = 1000;

struct PinnedBench : Bench {
  PinnedBench() {
    CHECK(engine.observe_copies());
    for (Bytes& each : memory) {
      CHECK(engine.pin(each.data(), kNumBytes) == 0);
    }
    runtime.take_calls();
  }

  // As torch does behind each copy.
  bool copied(const uint8_t* data, Stream stream) {
    return runtime.observer->on_copy(data, stream);
  }

  std::unique_ptr<Fence> take(size_t i = 0) {
    return engine.take_copies(memory.at(i).data());
  }

  std::array<Bytes, 2> memory{Bytes(kNumBytes), Bytes(kNumBytes)};
};

void wait_until(Fence* fence) {
  while (!fence->is_done()) std::this_thread::yield();
}

TEST(test_a_fence_covers_the_copies_of_each_stream) {
  const std::vector<std::vector<Stream>> cases{
      {}, {kHome}, {kOther}, {kHome, kOther}, {kOther, kHome, kCopies}};
  for (const std::vector<Stream>& streams : cases) {
    for (const Stream& last : streams) {
      PinnedBench bench;
      const auto gate = bench.stop(last);
      for (const Stream& stream : streams) {
        CHECK(bench.copied(bench.memory[0].data(), stream));
      }
      const auto other = bench.take(1);
      CHECK(other->is_done());
      const auto fence = bench.take();
      const auto later = bench.stop(last);
      for (const Stream& stream : streams) {
        if (!(stream == last)) bench.runtime.synchronize(stream);
      }
      CHECK(!fence->is_done());
      gate->open();
      wait_until(fence.get());
      CHECK(bench.take()->is_done());
      later->open();
    }
  }
}

TEST(test_without_copies_no_event_is_recorded) {
  PinnedBench bench;
  CHECK(bench.take()->is_done());
  CHECK(bench.runtime.take_calls().empty());
}

TEST(test_copies_of_all_bytes_are_tracked_and_of_no_others) {
  PinnedBench bench;
  const uint8_t* const data = bench.memory[0].data();
  for (const int64_t offset : {int64_t{0}, kNumBytes / 2, kNumBytes - 1}) {
    const auto gate = bench.stop(kHome);
    CHECK(bench.copied(data + offset, kHome));
    const auto fence = bench.take();
    CHECK(!fence->is_done());
    gate->open();
    wait_until(fence.get());
  }
  const Bytes elsewhere(10);
  CHECK(!bench.copied(elsewhere.data(), kHome));
  for (const Bytes& each : bench.memory) {
    CHECK(!bench.copied(each.data() - 1, kHome));
    CHECK(!bench.copied(each.data() + kNumBytes, kHome));
  }
  bench.engine.unpin(bench.memory[0].data());
  CHECK(!bench.copied(data, kHome));
  CHECK(bench.copied(bench.memory[1].data(), kHome));
  bool is_refused = false;
  try {
    bench.take();
  } catch (const std::runtime_error&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

TEST(test_many_copies_on_one_stream_need_one_event) {
  PinnedBench bench;
  std::shared_ptr<Gate> last;
  for (int i = 0; i < 20; ++i) {
    last = bench.stop(kHome);
    CHECK(bench.copied(bench.memory[0].data() + i, kHome));
    if (i < 19) last->open();
  }
  const auto fence = bench.take();
  CHECK(bench.engine.events().num_created() == 1);
  CHECK(!fence->is_done());
  last->open();
  wait_until(fence.get());
  CHECK(bench.engine.events().num_idle() == 1);
}

TEST(test_threads_copy_on_one_stream_and_none_is_forgotten) {
  for (int i = 0; i < 50; ++i) {
    PinnedBench bench;
    std::array<std::shared_ptr<Gate>, 2> gates{std::make_shared<Gate>(),
                                               std::make_shared<Gate>()};
    std::vector<std::thread> threads;
    for (const auto& gate : gates) {
      threads.emplace_back([&bench, gate] {
        bench.runtime.run(kHome, [gate] { gate->wait(); });
        bench.copied(bench.memory[0].data(), kHome);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const auto fence = bench.take();
    gates[static_cast<size_t>(i) % 2]->open();
    CHECK(!fence->is_done());
    for (const auto& gate : gates) gate->open();
    wait_until(fence.get());
  }
}

TEST(test_the_end_of_captured_and_failed_copies_is_unknown) {
  for (const char* failing : {"", "create_event", "record"}) {
    PinnedBench bench;
    CHECK(bench.copied(bench.memory[0].data(), kHome));
    if (*failing == '\0') {
      bench.runtime.capturing = kOther.id;
    } else {
      bench.runtime.fail(failing, 1);
    }
    bench.runtime.take_calls();
    CHECK(bench.copied(bench.memory[0].data(), kOther));
    if (*failing == '\0') CHECK(bench.runtime.take_calls().empty());
    bench.runtime.capturing = -1;
    CHECK(bench.take() == nullptr);
    CHECK(bench.take() == nullptr);
    CHECK(bench.copied(bench.memory[1].data(), kOther));
    wait_until(bench.take(1).get());
  }
}

}  // namespace
