// The engine after failures, refusals and forks.
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

template <typename Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "";
}

// Sends five chunks and two direct copies while calls of one name begin to fail. Checks
// that the queued copies are safe and that later transfers work.
void check_failure(const std::string& call, int64_t n, int64_t num_lost) {
  Bench bench;
  Batch batch(&bench.random, 10, 60000, 2);
  Target target(batch);
  Job job = target.job(batch);
  job.chunk = (job.nbytes + 4) / 5;
  const auto gate = bench.stop(kCopies);
  bench.runtime.fail(call, n);
  const SendResult sent = bench.engine.send(job);
  CHECK(message(sent.error).rfind("no more " + call, 0) == 0);
  CHECK(sent.event != nullptr && !bench.engine.is_done(*sent.event));
  Target second(batch);
  CHECK(bench.send(batch, &second).error == nullptr);
  gate->open();
  bench.synchronize();
  CHECK(bench.engine.is_done(*sent.event));
  CHECK(second.memory == batch.expected());
  CHECK(bench.runtime.num_overwritten == 0);
  for (int i = 0; i < 20; ++i) CHECK(bench.send(batch, &second).error == nullptr);
  bench.synchronize();
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_idle + info.num_read + num_lost == info.num_allocated);
}

TEST(test_an_error_half_way_leaves_nothing_unguarded) {
  for (int64_t n : {1, 2}) check_failure("copy", n, 0);  // the copies in place
  for (int64_t n : {3, 5, 7}) check_failure("copy", n, 0);
  for (int64_t n : {1, 4}) check_failure("allocate", n, 0);
  for (int64_t n : {2, 4}) check_failure("create_event", n, 1);
  for (int64_t n : {1, 5}) check_failure("record 0", n, 1);
}

TEST(test_a_block_that_could_not_be_packed_is_free) {
  const auto fail = [](const pyparallel::Pack&) {
    throw std::runtime_error("no pack");
  };
  Bench bench({}, fail);
  const Batch batch(&bench.random, 3, 100, 1);
  Target target(batch);
  const SendResult sent = bench.send(batch, &target);
  CHECK(message(sent.error) == "no pack" && sent.event != nullptr);
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_allocated == 1 && info.num_idle == 1);
  bench.synchronize();
  CHECK(target.memory[1] == batch.sources[0]);
}

TEST(test_without_an_event_nothing_is_used_again) {
  Bench bench;
  const Batch batch(&bench.random, 10, 6000, 1);
  Target target(batch);
  bench.runtime.fail("record 0", 0);
  const SendResult sent = bench.send(batch, &target);
  CHECK(sent.event == nullptr);
  CHECK(message(sent.error) == "no more record 0");
  bench.runtime.fail("never", 0);
  bench.synchronize();
  bench.send(batch, &target);
  bench.synchronize();
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_allocated == 2 && info.num_idle == 0 && info.num_read == 1);
}

TEST(test_capture_is_refused_before_anything_is_queued) {
  Bench bench;
  const Batch batch(&bench.random, 3, 100, 1);
  Target target(batch);
  bench.runtime.capturing = kCopies.id;
  CHECK(thrown([&] { bench.send(batch, &target); }) ==
        "send: the copy stream must not be under graph capture, but is. Copy outside "
        "of the capture, into the static tensors of a StaticBatches.");
  CHECK(bench.runtime.take_calls().empty());
}

TEST(test_a_forked_child_is_refused) {
  Bench bench;
  const Batch batch(&bench.random, 3, 100);
  Target target(batch);
  SendResult sent = bench.send(batch, &target);
  const auto fence = bench.engine.fence();
  bench.synchronize();
  const pid_t child = fork();
  if (child == 0) {
    const auto refused = [](const std::string& text) {
      return text ==
             "send: copies must be queued by the process that queued the first one, "
             "but "
             "this one was forked from it. Start processes that use a device by spawn.";
    };
    bool good = refused(thrown([&] { bench.send(batch, &target); }));
    good &= refused(thrown([&] { bench.engine.wait(kHome, *sent.event); }));
    good &= refused(thrown([&] { bench.engine.is_done(*sent.event); }));
    good &= refused(thrown([&] { bench.engine.wait_on_host(*sent.event); }));
    good &= refused(thrown([&] { bench.engine.record(kHome); }));
    good &= refused(thrown([&] { fence->is_done(); }));
    sent.event.reset();
    _exit(good ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(bench.engine.is_done(*sent.event));
}

}  // namespace
