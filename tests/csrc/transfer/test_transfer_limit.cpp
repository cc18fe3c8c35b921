// The engine at the limit of its memory: its waits, and the absence of other waits.
#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
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

Limits blocks(int64_t num) {
  Limits limits;
  limits.max_bytes = num * kSmallestBlock;
  return limits;
}

// Sends batches of one block each to a blocked stream.
std::vector<Target> fill(Bench* bench, const Batch& batch, int num) {
  std::vector<Target> targets(static_cast<size_t>(num), Target(batch));
  for (Target& target : targets) CHECK(bench->send(batch, &target).error == nullptr);
  CHECK(count(bench->runtime.take_calls(), "wait_on_host") == 0);
  return targets;
}

TEST(test_at_the_limit_the_host_waits_for_the_oldest_copy) {
  Bench bench(blocks(4));
  const Batch batch(&bench.random, 9, 900);
  const GateRef gate = bench.stop(kCopies);
  const auto targets = fill(&bench, batch, 4);
  bool waited = false;
  bench.runtime.before_waiting = [&] {
    // Other threads may send meanwhile, because no lock is held here.
    waited = bench.engine.staging().info().num_waits == 1;
    gate->open();
  };
  Target last(batch);
  CHECK(bench.send(batch, &last).error == nullptr);
  CHECK(waited);
  gate->open();
  bench.synchronize();
  CHECK(bench.runtime.most_nbytes == 4 * kSmallestBlock);
  CHECK(count(bench.runtime.take_calls(), "wait_on_host") == 1);
  CHECK(bench.engine.staging().info().num_waits == 1);
  CHECK(last.memory == batch.expected() && bench.runtime.num_overwritten == 0);
  for (const Target& target : targets) CHECK(target.memory == batch.expected());
}

TEST(test_a_transfer_larger_than_the_limit_arrives) {
  for (int64_t limit : {1, 2, 7}) {
    Bench bench(blocks(limit));
    const Batch batch(&bench.random, 30, 2 * kSmallestBlock, 2);
    Target target(batch);
    Job job = target.job(batch);
    job.chunk = kSmallestBlock;
    const GateRef gate = bench.stop(kCopies);
    bench.runtime.before_waiting = [&] { gate->open(); };
    CHECK(bench.engine.send(job).error == nullptr);
    CHECK(gate->is_open() && job.nbytes > 8 * job.chunk);
    gate->open();
    bench.synchronize();
    CHECK(target.memory == batch.expected());
    CHECK(bench.runtime.most_nbytes == limit * kSmallestBlock);
    CHECK(bench.runtime.num_overwritten == 0);
  }
}

// Stream 0 is blocked until the host has finished with stream 2, as in an all-reduce.
TEST(test_a_stream_waits_for_no_block_of_another_one) {
  Bench bench(blocks(4));
  const Batch batch(&bench.random, 9, 900);
  const GateRef gate = bench.stop(kCopies);
  const GateRef own = bench.stop(kOther);
  const auto targets = fill(&bench, batch, 4);
  Target first(batch);
  Target second(batch);
  CHECK(bench.send(batch, &first, kOther).error == nullptr);
  CHECK(count(bench.runtime.take_calls(), "wait_on_host") == 0);
  // The stream has a block now, and waits only for that.
  bench.runtime.before_waiting = [&] { own->open(); };
  CHECK(bench.send(batch, &second, kOther).error == nullptr);
  CHECK(own->is_open() && !gate->is_open());
  CHECK(bench.runtime.most_nbytes == 5 * kSmallestBlock);
  own->open();
  gate->open();
  bench.synchronize();
  CHECK(bench.send(batch, &second).error == nullptr);
  CHECK(bench.engine.staging().info().nbytes <= 4 * kSmallestBlock);
  bench.synchronize();
  CHECK(bench.runtime.most_nbytes == 5 * kSmallestBlock);
  CHECK(first.memory == batch.expected() && second.memory == batch.expected());
  for (const Target& target : targets) CHECK(target.memory == batch.expected());
}

TEST(test_idle_blocks_make_room_for_other_sizes) {
  Bench bench;
  Staging staging(&bench.runtime, blocks(8));
  std::vector<Block> small;
  for (int i = 0; i < 8; ++i) small.push_back(staging.take(1, kCopies));
  for (const Block& block : small) staging.give(block);
  CHECK(staging.info().num_idle == 8);
  // A block counts until it is freed.
  bench.runtime.before_freeing = [&] {
    staging.give(staging.take(2 * kSmallestBlock, kOther));
  };
  const Block large = staging.take(8 * kSmallestBlock, kCopies);
  CHECK(bench.runtime.most_nbytes == 8 * kSmallestBlock);
  const Staging::Info info = staging.info();
  CHECK(info.num_freed == 9 && info.num_idle == 0 && info.num_waits == 0);
  staging.give(large);
  // A stream without blocks frees idle blocks before it exceeds the limit.
  staging.give(staging.take(1, kOther));
  CHECK(bench.runtime.most_nbytes == 8 * kSmallestBlock);
}

TEST(test_a_lower_limit_holds_as_soon_as_it_can) {
  Bench bench;
  const Batch batch(&bench.random, 9, 900);
  const GateRef other = bench.stop(kOther);
  Target target(batch);
  CHECK(bench.send(batch, &target, kOther).error == nullptr);
  const GateRef gate = bench.stop(kCopies);
  const auto targets = fill(&bench, batch, 6);
  gate->open();
  bench.runtime.synchronize(kCopies);
  Target next(batch);
  bench.send(batch, &next);
  Staging::Info info = bench.engine.staging().info();
  CHECK(info.num_idle == 5 && info.nbytes == 7 * kSmallestBlock);
  bench.engine.set_limit(3 * kSmallestBlock);  // idle blocks are freed now
  info = bench.engine.staging().info();
  CHECK(info.num_idle == 1 && info.nbytes == 3 * kSmallestBlock);
  bench.engine.set_limit(kSmallestBlock);  // two are still read
  CHECK(bench.engine.staging().info().nbytes == 2 * kSmallestBlock);
  other->open();
  bench.synchronize();
  bench.send(batch, &next);
  CHECK(bench.engine.staging().info().nbytes == kSmallestBlock);
  bench.synchronize();
  CHECK(target.memory == batch.expected() && next.memory == batch.expected());
}

TEST(test_lost_blocks_count_and_the_error_names_the_knob) {
  Bench bench(blocks(2));
  const Batch batch(&bench.random, 9, 900);
  Target target(batch);
  bench.runtime.fail("record 0", 0);
  for (int i = 0; i < 2; ++i) {
    CHECK(message(bench.send(batch, &target).error) == "no more record 0");
  }
  bench.runtime.fail("never", 0);
  CHECK(bench.engine.staging().info().abandoned_nbytes == 2 * kSmallestBlock);
  CHECK(message(bench.send(batch, &target).error) ==
        "send: staging blocks must take at most 131072 bytes of pinned memory, but one "
        "of 65536 is needed beside 131072 that a failed device may read for ever. "
        "Restart the process, or raise the limit with "
        "pyparallel.memory.set_pinned_limit.");
  CHECK(bench.runtime.most_nbytes == 2 * kSmallestBlock);
  bench.engine.set_limit(3 * kSmallestBlock);
  CHECK(bench.send(batch, &target).error == nullptr);
  bench.synchronize();
  CHECK(target.memory == batch.expected());
}

TEST(test_a_wait_that_fails_is_the_error_of_its_transfer) {
  Bench bench(blocks(1));
  const Batch batch(&bench.random, 9, 900);
  const GateRef gate = bench.stop(kCopies);
  const auto targets = fill(&bench, batch, 1);
  bench.runtime.fail("wait_on_host", 1);
  Target target(batch);
  const SendResult sent = bench.send(batch, &target);
  CHECK(message(sent.error) == "no more wait_on_host" && sent.event != nullptr);
  gate->open();
  bench.synchronize();
  CHECK(bench.send(batch, &target).error == nullptr);
  bench.synchronize();
  CHECK(target.memory == batch.expected());
  CHECK(bench.engine.staging().info().abandoned_nbytes == 0);
}

TEST(test_memory_that_was_not_to_be_had_does_not_count) {
  Bench bench(blocks(1));
  const Batch batch(&bench.random, 9, 900);
  Target target(batch);
  bench.runtime.fail("allocate", 1);
  CHECK(message(bench.send(batch, &target).error) == "no more allocate");
  CHECK(bench.engine.staging().info().nbytes == 0);
  CHECK(bench.send(batch, &target).error == nullptr);
  bench.synchronize();
  CHECK(target.memory == batch.expected());
}

// The only block is being written, so there is no event to wait for.
TEST(test_a_thread_waits_for_one_that_writes) {
  for (bool gives_back : {false, true}) {
    Bench bench;
    Events events(&bench.runtime);
    Staging staging(&bench.runtime, blocks(1));
    const Block block = staging.take(1, kCopies);
    Block second;
    std::atomic<bool> has_it{false};
    std::thread thread([&] {
      second = staging.take(1, kCopies);
      has_it = true;
    });
    while (staging.info().num_waits == 0 && !has_it) std::this_thread::yield();
    CHECK(!has_it);
    if (gives_back) {
      staging.give(block);
    } else {
      staging.give(block, events.record(kCopies));
    }
    thread.join();
    CHECK(second.data() == block.data());
    CHECK(bench.runtime.most_nbytes == kSmallestBlock);
    staging.give(second);
  }
}

}  // namespace
