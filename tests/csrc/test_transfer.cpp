// The engine, call by call: what it queues, when it uses a block again, how it fails.
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace pyparallel::transfer;
using fake::Batch;
using fake::kCopies;
using fake::kHome;
using fake::Target;
using Calls = std::vector<std::string>;

constexpr Stream kOther{2, 0};

// An engine on a device without delays.
struct Bench {
  explicit Bench(Limits limits = {}, Engine::PackBytes pack = fake::pack)
      : runtime(3, 0), engine(&runtime, pack, limits) {
    fake::now = &runtime;
  }
  ~Bench() { synchronize(); }

  void synchronize() {
    for (int64_t id = 0; id < 3; ++id) runtime.synchronize({id, 0});
  }

  // Stops a stream until the gate is opened.
  fake::GateRef stop(const Stream& stream) {
    auto gate = std::make_shared<fake::Gate>();
    runtime.run(stream, [gate] { gate->wait(); });
    return gate;
  }

  Sent send(const Batch& batch, Target* target, Stream copies = kCopies) {
    return engine.send(target->job(batch, kHome, copies));
  }

  Random random{7};
  fake::Runtime runtime;
  Engine engine;
};

std::string message(const std::exception_ptr& error) {
  if (error == nullptr) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

template <typename Body>
std::string thrown(const Body& body) {
  try {
    body();
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "";
}

int64_t count(const Calls& calls, const std::string& name) {
  int64_t num = 0;
  for (const std::string& call : calls) num += call == name ? 1 : 0;
  return num;
}

void test_a_small_batch_is_one_copy() {
  Bench bench;
  for (int trial = 0; trial < 3; ++trial) {
    Batch batch(&bench.random, 500, 300);
    Target target(batch);
    const Sent sent = bench.send(batch, &target);
    batch.overwrite_leaves();
    Calls expected{"create_event", "record 1", "wait 0",
                   "allocate",     "copy",     "record 0"};
    // The mark of the first batch stands with its block until that is wanted again.
    if (trial == 1)
      expected = {"create_event", "record 1", "wait 0", "copy", "record 0"};
    if (trial == 2) expected = {"record 1", "wait 0", "copy", "record 0"};
    CHECK(bench.runtime.take_calls() == expected);
    CHECK(sent.error == nullptr);
    bench.engine.wait(kHome, *sent.mark);
    CHECK(bench.runtime.take_calls() == Calls{"wait 1"});
    bench.synchronize();
    CHECK(bench.engine.is_done(*sent.mark));
    CHECK(target.memory == batch.expected());
  }
  CHECK(bench.engine.events().num_created() == 2);
}

void test_chunks_of_any_size_arrive() {
  Bench bench;
  for (int64_t chunk : {1, 63, 64, 1000, 4096, 65536}) {
    for (int64_t num_direct : {0, 1, 7, 8, 20}) {
      const Batch batch(&bench.random, bench.random.between(0, 9), 700, num_direct);
      Target target(batch);
      Job job = target.job(batch);
      job.chunk = chunk;
      bench.runtime.take_calls();
      CHECK(bench.engine.send(job).error == nullptr);
      bench.synchronize();
      CHECK(target.memory == batch.expected());
      const Calls calls = bench.runtime.take_calls();
      const int64_t num_chunks = (job.nbytes + chunk - 1) / chunk;
      CHECK(count(calls, "copy_batch") == (num_direct >= 8 ? 1 : 0));
      CHECK(count(calls, "copy") == num_chunks + (num_direct >= 8 ? 0 : num_direct));
      CHECK(calls.back() == "record 0");
    }
  }
  CHECK(bench.runtime.num_overwritten == 0);
}

void test_a_stream_waits_for_no_work_of_its_own() {
  Bench bench;
  const Batch batch(&bench.random, 3, 100);
  Target target(batch);
  bench.engine.send(target.job(batch, kCopies, kCopies));
  const Calls expected{"allocate", "copy", "create_event", "record 0"};
  CHECK(bench.runtime.take_calls() == expected);
  bench.synchronize();
  CHECK(target.memory == batch.expected());
}

void test_nothing_to_send_is_a_mark() {
  Bench bench;
  const Batch batch(&bench.random, 0, 0);
  Target target(batch);
  const Sent sent = bench.send(batch, &target);
  CHECK(sent.mark != nullptr && sent.error == nullptr);
  bench.synchronize();
  CHECK(bench.engine.is_done(*sent.mark));
}

void test_a_block_is_used_again_when_it_has_been_read() {
  Bench bench;
  const Batch batch(&bench.random, 9, 900);
  std::vector<Target> targets(6, Target(batch));
  const auto gate = bench.stop(kCopies);
  for (size_t i = 0; i < 3; ++i) bench.send(batch, &targets[i]);
  CHECK(bench.engine.staging().info().num_allocated == 3);
  // Another stream does not stand behind it.
  bench.send(batch, &targets[3], kOther);
  bench.runtime.synchronize(kOther);
  bench.send(batch, &targets[4], kOther);
  CHECK(bench.engine.staging().info().num_allocated == 4);
  gate->open();
  bench.synchronize();
  bench.send(batch, &targets[5]);
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_allocated == 4 && info.num_idle + info.num_read == 4);
  bench.synchronize();
  for (const Target& target : targets) CHECK(target.memory == batch.expected());
}

void test_a_long_transfer_uses_its_own_blocks_again() {
  // The device has done all that was queued when a chunk is packed.
  const auto pack = [](const pyparallel::Pack& body) {
    fake::now->synchronize(kCopies);
    fake::pack(body);
  };
  Bench bench({}, pack);
  const Batch batch(&bench.random, 40, 60000);
  Target target(batch);
  Job job = target.job(batch);
  job.chunk = 10000;
  CHECK(bench.engine.send(job).error == nullptr);
  bench.synchronize();
  CHECK(target.memory == batch.expected());
  CHECK(bench.engine.staging().info().num_allocated <= 2);
  CHECK(bench.engine.events().num_created() <= 4);
}

void test_idle_blocks_above_the_limit_are_freed() {
  Bench bench({3 * kSmallestBlock, false});
  const Batch batch(&bench.random, 9, 900);
  std::vector<Target> targets(5, Target(batch));
  const auto gate = bench.stop(kCopies);
  for (Target& target : targets) bench.send(batch, &target);
  gate->open();
  bench.synchronize();
  Target last(batch);
  bench.send(batch, &last);
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_allocated == 5 && info.num_freed == 2);
  CHECK(info.num_idle == 2 && info.num_read == 1);
  CHECK(count(bench.runtime.take_calls(), "free") == 2);
  bench.synchronize();
  for (const Target& target : targets) CHECK(target.memory == batch.expected());
  CHECK(bench.runtime.num_overwritten == 0);
}

void test_blocks_fit() {
  Bench bench;
  Staging staging(&bench.runtime, 64 << 20, false);
  for (int64_t nbytes : {int64_t{1}, kSmallestBlock, kSmallestBlock + 1,
                         kLargestBlock / 2 + 1, kLargestBlock}) {
    const Block block = staging.take(nbytes);
    CHECK(block.nbytes() >= nbytes);
    CHECK(block.nbytes() == kSmallestBlock || block.nbytes() / 2 < nbytes);
    staging.give(block);
    const Block again = staging.take(nbytes);
    CHECK(again.data() == block.data());
    staging.give(again);
  }
  CHECK(staging.info().num_allocated == 3);
}

void test_what_has_been_read_is_poisoned() {
  Bench bench;
  Staging staging(&bench.runtime, 64 << 20, true);
  Events events(&bench.runtime);
  const Block block = staging.take(100);
  memset(block.data(), 1, 100);
  const auto gate = bench.stop(kCopies);
  staging.give(block, kCopies, events.record(kCopies));
  const Block other = staging.take(100);
  CHECK(other.data() != block.data() && block.data()[99] == 1);
  gate->open();
  bench.synchronize();
  CHECK(staging.take(100).data() == block.data());
  for (int i = 0; i < 100; ++i) CHECK(block.data()[i] == Staging::kPoison);
}

// Sends five chunks and two direct copies while calls of one kind begin to fail, and
// checks that what was queued is safe and that sending goes on afterwards.
void check_failure(const std::string& call, int64_t n, int64_t num_lost) {
  Bench bench;
  Batch batch(&bench.random, 10, 60000, 2);
  Target target(batch);
  Job job = target.job(batch);
  job.chunk = (job.nbytes + 4) / 5;
  const auto gate = bench.stop(kCopies);
  bench.runtime.fail(call, n);
  const Sent sent = bench.engine.send(job);
  CHECK(message(sent.error).rfind("no more " + call, 0) == 0);
  CHECK(sent.mark != nullptr && !bench.engine.is_done(*sent.mark));
  Target second(batch);
  CHECK(bench.send(batch, &second).error == nullptr);
  gate->open();
  bench.synchronize();
  CHECK(bench.engine.is_done(*sent.mark));
  CHECK(second.memory == batch.expected());
  CHECK(bench.runtime.num_overwritten == 0);
  for (int i = 0; i < 20; ++i) CHECK(bench.send(batch, &second).error == nullptr);
  bench.synchronize();
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_idle + info.num_read + num_lost == info.num_allocated);
}

void test_an_error_half_way_leaves_nothing_unguarded() {
  for (int64_t n : {1, 2}) check_failure("copy", n, 0);  // those in place
  for (int64_t n : {3, 5, 7}) check_failure("copy", n, 0);
  for (int64_t n : {1, 4}) check_failure("allocate", n, 0);
  for (int64_t n : {2, 4}) check_failure("create_event", n, 1);
  for (int64_t n : {1, 5}) check_failure("record 0", n, 1);
}

void test_without_a_mark_nothing_is_used_again() {
  Bench bench;
  const Batch batch(&bench.random, 10, 6000, 1);
  Target target(batch);
  bench.runtime.fail("record 0", 0);
  const Sent sent = bench.send(batch, &target);
  CHECK(sent.mark == nullptr);
  CHECK(message(sent.error) == "no more record 0");
  bench.runtime.fail("never", 0);
  bench.synchronize();
  bench.send(batch, &target);
  bench.synchronize();
  const Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_allocated == 2 && info.num_idle == 0 && info.num_read == 1);
}

void test_an_error_before_anything_is_queued_is_thrown() {
  for (const char* call : {"create_event", "record 1", "wait 0"}) {
    Bench bench;
    const Batch batch(&bench.random, 3, 100, 1);
    Target target(batch);
    bench.runtime.fail(call, 1);
    CHECK(thrown([&] { bench.send(batch, &target); }).rfind("no more ", 0) == 0);
    CHECK(count(bench.runtime.take_calls(), "copy") == 0);
    CHECK(bench.engine.staging().info().num_allocated == 0);
  }
}

void test_capture_is_refused_before_anything_is_queued() {
  Bench bench;
  const Batch batch(&bench.random, 3, 100, 1);
  Target target(batch);
  for (const auto& [id, name] : {std::pair(1, "home"), std::pair(0, "copy")}) {
    bench.runtime.capturing = id;
    CHECK(thrown([&] { bench.send(batch, &target); }) ==
          std::string("send: the ") + name +
              " stream must not be under graph capture, but is. Copy outside of the "
              "capture, into static tensors that the graph reads.");
    CHECK(bench.runtime.take_calls().empty());
  }
}

void test_a_forked_child_is_refused() {
  Bench bench;
  const Batch batch(&bench.random, 3, 100);
  Target target(batch);
  Sent sent = bench.send(batch, &target);
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
    good &= refused(thrown([&] { bench.engine.wait(kHome, *sent.mark); }));
    good &= refused(thrown([&] { bench.engine.is_done(*sent.mark); }));
    sent.mark.reset();
    _exit(good ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(bench.engine.is_done(*sent.mark));
}

}  // namespace

int main() {
  test_a_small_batch_is_one_copy();
  test_chunks_of_any_size_arrive();
  test_a_stream_waits_for_no_work_of_its_own();
  test_nothing_to_send_is_a_mark();
  test_a_block_is_used_again_when_it_has_been_read();
  test_a_long_transfer_uses_its_own_blocks_again();
  test_idle_blocks_above_the_limit_are_freed();
  test_blocks_fit();
  test_what_has_been_read_is_poisoned();
  test_an_error_half_way_leaves_nothing_unguarded();
  test_without_a_mark_nothing_is_used_again();
  test_an_error_before_anything_is_queued_is_thrown();
  test_capture_is_refused_before_anything_is_queued();
  test_a_forked_child_is_refused();
  return finish("transfer");
}
