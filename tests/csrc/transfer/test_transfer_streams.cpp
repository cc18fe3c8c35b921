// Streams of callers: fences, and waits during graph captures.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

const Calls kNone;

TEST(test_a_wait_on_a_captured_stream_is_refused) {
  Bench bench;
  const Batch batch(&bench.random, 3, 100);
  Target target(batch);
  const SendResult sent = bench.send(batch, &target);
  bench.runtime.take_calls();
  bench.runtime.capturing = kHome.id;
  std::string text;
  try {
    bench.engine.wait(kHome, *sent.event);
  } catch (const std::exception& error) {
    text = error.what();
  }
  CHECK(text ==
        "send: the waiting stream must not be under graph capture, but is. Copy "
        "outside of the capture, into the static tensors of a StaticBatches.");
  CHECK(bench.runtime.take_calls() == kNone);
  bench.runtime.capturing = -1;
  bench.engine.wait(kHome, *sent.event);
  CHECK(bench.runtime.take_calls() == Calls{"wait 1"});
  bench.synchronize();
}

TEST(test_the_host_waits_for_a_mark) {
  Bench bench;
  const auto gate = bench.stop(kOther);
  const EventRef recorded = bench.engine.record(kOther);
  CHECK(!bench.engine.is_done(*recorded));
  bench.runtime.before_waiting = [&] { gate->open(); };
  bench.engine.wait_on_host(*recorded);
  CHECK(bench.engine.is_done(*recorded));
}

TEST(test_a_fence_is_passed_when_every_stream_has_done_its_work) {
  for (const bool first_is_last : {true, false}) {
    Bench bench;
    bench.runtime.current = {kHome, kOther};
    const auto first = bench.stop(first_is_last ? kOther : kHome);
    const auto last = bench.stop(first_is_last ? kHome : kOther);
    const auto fence = bench.engine.fence();
    const auto later = bench.stop(kHome);
    CHECK(!fence->is_done());
    first->open();
    if (first_is_last) bench.runtime.synchronize(kOther);
    CHECK(!fence->is_done());
    last->open();
    while (!fence->is_done()) std::this_thread::yield();
    CHECK(fence->is_done());
    later->open();
  }
}

TEST(test_a_fence_of_no_stream_is_passed) {
  Bench bench;
  CHECK(bench.engine.fence()->is_done());
  CHECK(bench.runtime.take_calls() == kNone);
}

TEST(test_a_fence_records_no_event_under_capture) {
  Bench bench;
  bench.runtime.current = {kHome, kOther};
  const auto gate = bench.stop(kHome);  // work from before the capture
  bench.runtime.capturing = kHome.id;
  const auto fence = bench.engine.fence();
  const Calls others{"create_event", "record 2"};
  CHECK(bench.runtime.take_calls() == others);
  bench.runtime.synchronize(kOther);
  CHECK(!fence->is_done());
  CHECK(bench.runtime.take_calls() == kNone);
  bench.runtime.capturing = -1;
  CHECK(!fence->is_done());
  CHECK(bench.runtime.take_calls().back() == "record 1");
  gate->open();
  while (!fence->is_done()) std::this_thread::yield();
  CHECK(bench.engine.events().num_idle() == bench.engine.events().num_created());
}

TEST(test_threads_query_one_fence) {
  Bench bench;
  bench.runtime.current = {kHome, kOther};
  bench.runtime.capturing = kHome.id;
  const auto fence = bench.engine.fence();
  std::atomic<int> num_passed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!fence->is_done()) std::this_thread::yield();
      ++num_passed;
    });
  }
  bench.runtime.capturing = -1;
  for (std::thread& thread : threads) thread.join();
  CHECK(num_passed == 4);
  CHECK(bench.engine.events().num_idle() == bench.engine.events().num_created());
}

}  // namespace
