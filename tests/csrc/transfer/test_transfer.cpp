// The engine, call by call: its calls to the device, and its reuse of blocks.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "core/cast.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;
using pyparallel::Cast;
using pyparallel::Half;
using pyparallel::HostMath;

TEST(test_a_small_batch_is_one_copy) {
  Bench bench;
  for (int trial = 0; trial < 3; ++trial) {
    Batch batch(&bench.random, 500, 300);
    Target target(batch);
    const SendResult sent = bench.send(batch, &target);
    batch.overwrite_leaves();
    Calls expected{"copy", "record 0"};
    if (trial == 0) expected = {"allocate", "copy", "create_event", "record 0"};
    CHECK(bench.runtime.take_calls() == expected);
    CHECK(sent.error == nullptr);
    bench.engine.wait(kHome, *sent.event);
    CHECK(bench.runtime.take_calls() == Calls{"wait 1"});
    bench.synchronize();
    CHECK(bench.engine.is_done(*sent.event));
    CHECK(target.memory == batch.expected());
  }
  CHECK(bench.engine.events().num_created() == 1);
}

TEST(test_chunks_of_any_size_arrive) {
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

TEST(test_chunks_of_casts_arrive) {
  Bench bench;
  std::vector<float> numbers(500);
  for (float& number : numbers) {
    number = static_cast<float>(bench.random.between(-9999, 9999)) / 7;
  }
  const Bytes bytes(100, 0x5A);
  const auto* const source = reinterpret_cast<const uint8_t*>(numbers.data());
  const Slot slots[] = {{source, 0, 1000}, {bytes.data(), 1024, 100}};
  const Cast casts[] = {Cast::kFloatToHalf, Cast::kNone};
  Bytes expected(1152, 0);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Half half = HostMath::round(numbers[i], Half{});
    memcpy(&expected[2 * i], &half, sizeof(half));
  }
  std::copy(bytes.begin(), bytes.end(), expected.begin() + 1024);
  for (int64_t chunk : {2, 62, 64, 300, 1026, 4096}) {
    Bytes memory(expected.size(), 0xCC);
    Job job{memory.data(), 1152, slots, 2, casts, nullptr, 0, kCopies};
    job.chunk = chunk;
    CHECK(bench.engine.send(job).error == nullptr);
    bench.synchronize();
    CHECK(memory == expected);
  }
}

TEST(test_nothing_to_send_is_an_event) {
  Bench bench;
  const Batch batch(&bench.random, 0, 0);
  Target target(batch);
  const SendResult sent = bench.send(batch, &target);
  CHECK(sent.event != nullptr && sent.error == nullptr);
  bench.synchronize();
  CHECK(bench.engine.is_done(*sent.event));
}

TEST(test_a_block_is_used_again_when_it_has_been_read) {
  Bench bench;
  const Batch batch(&bench.random, 9, 900);
  std::vector<Target> targets(6, Target(batch));
  const auto gate = bench.stop(kCopies);
  for (size_t i = 0; i < 3; ++i) bench.send(batch, &targets[i]);
  CHECK(bench.engine.staging().info().num_allocated == 3);
  // Another stream does not wait behind it.
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

TEST(test_a_long_transfer_uses_its_own_blocks_again) {
  // The device has finished all queued work before a chunk is packed.
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

TEST(test_idle_blocks_above_the_limit_are_freed) {
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

TEST(test_blocks_fit) {
  Bench bench;
  Staging staging(&bench.runtime, {});
  for (int64_t nbytes : {int64_t{1}, kSmallestBlock, kSmallestBlock + 1,
                         kLargestBlock / 2 + 1, kLargestBlock}) {
    const Block block = staging.take(nbytes, kCopies);
    CHECK(block.nbytes() >= nbytes);
    CHECK(block.nbytes() == kSmallestBlock || block.nbytes() / 2 < nbytes);
    staging.give(block);
    const Block again = staging.take(nbytes, kCopies);
    CHECK(again.data() == block.data());
    staging.give(again);
  }
  CHECK(staging.info().num_allocated == 3);
}

TEST(test_two_threads_with_one_queue_take_one_block_each) {
  Bench bench;
  Events events(&bench.runtime);
  Staging staging(&bench.runtime, {});
  const Block read = staging.take(100, kCopies);
  const Block unread = staging.take(100, kCopies);
  staging.give(read, events.record(kCopies));
  bench.synchronize();
  const auto gate = bench.stop(kCopies);
  staging.give(unread, events.record(kCopies));
  Block first;
  bench.runtime.before_answer = [&] { first = staging.take(100, kCopies); };
  const Block second = staging.take(100, kCopies);
  CHECK(first.data() == read.data());
  CHECK(second.data() != read.data() && second.data() != unread.data());
  gate->open();
}

TEST(test_blocks_are_poisoned_after_their_copy) {
  Bench bench;
  Events events(&bench.runtime);
  Limits poisoned;
  poisoned.poison = true;
  Staging staging(&bench.runtime, poisoned);
  const Block block = staging.take(100, kCopies);
  memset(block.data(), 1, 100);
  const auto gate = bench.stop(kCopies);
  staging.give(block, events.record(kCopies));
  const Block other = staging.take(100, kCopies);
  CHECK(other.data() != block.data() && block.data()[99] == 1);
  gate->open();
  bench.synchronize();
  CHECK(staging.take(100, kCopies).data() == block.data());
  for (int i = 0; i < 100; ++i) CHECK(block.data()[i] == Staging::kPoison);
}

}  // namespace
