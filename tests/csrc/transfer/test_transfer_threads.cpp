// Threads that send over slow streams.
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/engine.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

// Device memory that is reused at once after it was freed, as by torch's allocator.
class Pool {
 public:
  uint8_t* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      free_.push_back(all_.emplace_back(kNumBytes).data());
    }
    uint8_t* const slab = free_.back();
    free_.pop_back();
    return slab;
  }
  void give(uint8_t* slab) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(slab);
  }
  size_t size() const { return all_.size(); }

  static constexpr size_t kNumBytes = 80000;

 private:
  std::mutex mutex_;
  std::deque<Bytes> all_;
  std::vector<uint8_t*> free_;
};

class SlabLoan final : public Loan {
 public:
  SlabLoan(Pool* pool, const Stream& stream)
      : Loan(stream, Pool::kNumBytes), slab(pool->take()), pool_(pool) {}
  ~SlabLoan() override { pool_->give(slab); }

  uint8_t* const slab;

 private:
  Pool* pool_;
};

// A loader thread with a model on its home stream.
class Loader {
 public:
  Loader(fake::Runtime* runtime, Engine* engine, Stream home, Stream copies)
      : runtime_(runtime),
        engine_(engine),
        home_(home),
        copies_(copies),
        random_(static_cast<uint64_t>(home.id)) {}

  void run(int num_batches) {
    for (int step = 0; step < num_batches; ++step) {
      send();
      while (copies_in_flight_.size() > 8) retire();
    }
    runtime_->synchronize(home_);
    runtime_->synchronize(copies_);
    while (!copies_in_flight_.empty()) retire();
  }

  int64_t num_wrong = 0;
  Pool pool;

 private:
  // The memory that lives until the device has finished.
  struct DeviceCopy {
    Batch batch;
    std::vector<fake::Copy> direct;
    EventRef event;
    Bytes found;
    fake::GateRef read = std::make_shared<fake::Gate>();
  };

  void send() {
    const int64_t num_direct = random_.between(0, 3) > 0 ? 0 : random_.between(1, 10);
    auto copy = std::make_unique<DeviceCopy>(DeviceCopy{
        Batch(&random_, random_.between(0, 8), 4000, num_direct), {}, {}, {}});
    Loans& loans = engine_->loans();
    loans.make_room(Pool::kNumBytes, copies_);
    auto loan = std::make_unique<SlabLoan>(&pool, copies_);
    loans.lend(*loan);
    uint8_t* const slab = loan->slab;
    uint8_t* at = slab + copy->batch.packed.size();
    for (const Bytes& source : copy->batch.sources) {
      copy->direct.push_back({at, source.data(), static_cast<int64_t>(source.size())});
      at += source.size();
    }
    const size_t nbytes = static_cast<size_t>(at - slab);
    Job job{slab,
            static_cast<int64_t>(copy->batch.packed.size()),
            copy->batch.slots.data(),
            static_cast<int64_t>(copy->batch.slots.size()),
            nullptr,
            copy->direct.data(),
            num_direct,
            copies_};
    job.chunk = random_.between(0, 1) > 0 ? kLargestBlock : random_.between(500, 9000);
    const SendResult sent = engine_->send(job);
    CHECK(sent.error == nullptr);
    copy->event = sent.event;
    copy->batch.overwrite_leaves();
    engine_->wait(home_, *copy->event);
    loans.use(loan.get(), home_);
    // The model reads the batch, which is dropped at once.
    DeviceCopy* const read = copy.get();
    runtime_->run(home_, [this, read, slab, nbytes] {
      read->found.assign(slab, slab + nbytes);
      read->read->open();
    });
    loans.drop(std::move(loan));
    copies_in_flight_.push_back(std::move(copy));
  }

  void retire() {
    DeviceCopy& copy = *copies_in_flight_.front();
    copy.read->wait();
    // Sources live until their event is done, as KeepAlive guarantees.
    if (!engine_->is_done(*copy.event)) runtime_->synchronize(copies_);
    Bytes expected = copy.batch.packed;
    for (const Bytes& source : copy.batch.sources) {
      expected.insert(expected.end(), source.begin(), source.end());
    }
    num_wrong += copy.found == expected ? 0 : 1;
    copies_in_flight_.pop_front();
  }

  fake::Runtime* runtime_;
  Engine* engine_;
  Stream home_;
  Stream copies_;
  Random random_;
  std::deque<std::unique_ptr<DeviceCopy>> copies_in_flight_;
};

struct Outcome {
  int64_t num_wrong;
  int64_t num_overwritten;
};

// The limit is a number of blocks.
Outcome train(int num_loaders, int num_batches, int max_delay_us,
              int64_t limit = 1000) {
  // Two loaders share the copy stream; the third has its own.
  fake::Runtime runtime(5, max_delay_us);
  fake::now = &runtime;
  const Limits strict{kSmallestBlock * 4, true, kSmallestBlock * limit};
  Engine engine(&runtime, fake::pack, strict);
  std::deque<Loader> loaders;
  for (int i = 0; i < num_loaders; ++i) {
    const Stream copies{i < 2 ? kCopies.id : 4, 0};
    loaders.emplace_back(&runtime, &engine, Stream{i + 1, 0}, copies);
  }
  std::vector<std::thread> threads;
  for (Loader& loader : loaders) {
    threads.emplace_back([&loader, num_batches] { loader.run(num_batches); });
  }
  for (std::thread& thread : threads) thread.join();
  Outcome outcome{0, runtime.num_overwritten};
  for (const Loader& loader : loaders) outcome.num_wrong += loader.num_wrong;
  engine.loans().record_dropped();
  for (int i = 0; i < num_loaders; ++i) runtime.synchronize({i + 1, 0});
  engine.loans().make_room(0, kCopies);
  for (const Loader& loader : loaders) CHECK(loader.pool.size() <= 5);
  const Staging::Info info = engine.staging().info();
  CHECK(info.num_idle + info.num_read == info.num_allocated - info.num_freed);
  // Each queued block has one event; all other events are idle.
  CHECK(engine.events().num_idle() + info.num_read == engine.events().num_created());
  const int64_t num_sent = int64_t{num_loaders} * num_batches;
  CHECK(engine.events().num_created() < num_sent);
  // There are two copy streams, and all chunks fit the smallest block.
  CHECK(runtime.most_nbytes <= kSmallestBlock * (limit + 1));
  CHECK(limit > 100 || info.num_waits > 0);
  return outcome;
}

TEST(test_every_byte_arrives_while_everything_is_used_again) {
  for (int max_delay_us : {0, 200}) {
    const Outcome outcome = train(3, 400, max_delay_us);
    CHECK(outcome.num_wrong == 0);
    CHECK(outcome.num_overwritten == 0);
  }
}

TEST(test_every_byte_arrives_at_the_limit) {
  for (int64_t limit : {1, 2, 5}) {
    const Outcome outcome = train(3, 300, 200, limit);
    CHECK(outcome.num_wrong == 0);
    CHECK(outcome.num_overwritten == 0);
  }
}

}  // namespace
