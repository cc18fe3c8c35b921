// Device memory of batches: the waits for its users, and its limit.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/loans.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

constexpr int64_t kNumBytes = 100;

// The loans that have memory, and the users of memory that the allocator got.
struct Memory {
  int64_t alive = 0;
  std::vector<Stream> given_to;
  bool can_give = true;
  bool accepts = true;
  Loan* rejected = nullptr;  // without an owner
};

class CountedLoan final : public Loan {
 public:
  CountedLoan(const Stream& stream, Memory* memory)
      : Loan(stream, kNumBytes), memory_(memory) {
    ++memory_->alive;
  }
  ~CountedLoan() override { --memory_->alive; }

  bool can_give() const override { return memory_->can_give; }
  void give(const std::vector<Stream>& users) override {
    if (!memory_->accepts) {
      memory_->rejected = this;
      throw std::runtime_error("no memory");
    }
    for (const Stream& user : users) memory_->given_to.push_back(user);
  }

 private:
  Memory* memory_;
};

struct Lending : Bench, Memory {
  // Lends memory of the copy stream, and drops it again.
  std::unique_ptr<Loan> lend(const std::vector<Stream>& users = {kHome},
                             const Stream& copies = kCopies) {
    engine.loans().make_room(kNumBytes, copies);
    auto loan = std::make_unique<CountedLoan>(copies, this);
    engine.loans().lend(*loan);
    for (const Stream& user : users) engine.loans().use(loan.get(), user);
    return loan;
  }
  void drop(std::unique_ptr<Loan> loan) { engine.loans().drop(std::move(loan)); }
  // Drops memory until the copies wait for a step.
  void drop_to_the_limit(int64_t most) {
    for (int64_t i = 0; i < most; ++i) drop(lend());
    CHECK(count(runtime.take_calls(), "wait 0") == 0);
    drop(lend());
    drop(lend());
    CHECK(count(runtime.take_calls(), "wait 0") > 0);
  }
  void make_room() { engine.loans().make_room(0, kCopies); }
  void finish() {
    synchronize();
    make_room();
  }
  int64_t num_dropped() {
    return engine.loans().info(kCopies).dropped_nbytes / kNumBytes;
  }
};

TEST(test_memory_without_users_is_free_at_once) {
  Lending bench;
  bench.drop(bench.lend({}));
  bench.drop(bench.lend({kCopies}));  // its order protects the memory
  CHECK(bench.alive == 0);
  CHECK(bench.runtime.take_calls().empty());
}

TEST(test_memory_waits_for_every_user_and_no_copy_does) {
  for (const Stream& slow : {kHome, kOther}) {
    Lending bench;
    const auto gate = bench.stop(slow);
    bench.drop(bench.lend({kHome, kOther, kHome}));
    CHECK(bench.runtime.take_calls().empty());  // a destructor calls no device
    bench.engine.loans().record_dropped();
    CHECK(count(bench.runtime.take_calls(), "create_event") == 2);
    bench.runtime.synchronize(slow == kHome ? kOther : kHome);
    const auto other = bench.lend();
    CHECK(bench.alive == 2);
    bench.runtime.synchronize(kCopies);
    gate->open();
    bench.synchronize();
    bench.make_room();
    CHECK(bench.alive == 1);
  }
}

TEST(test_at_the_limit_the_copies_wait_for_the_oldest_users_alone) {
  Lending bench;
  const auto first = bench.stop(kHome);
  bench.drop(bench.lend());
  bench.drop(bench.lend());  // not over the limit: one waits, and one is new
  CHECK(count(bench.runtime.take_calls(), "wait 0") == 0);
  bench.engine.loans().record_dropped();
  const auto second = bench.stop(kHome);
  for (int i = 0; i < 20; ++i) {
    bench.drop(bench.lend());
    CHECK(bench.alive <= 2);
    CHECK(bench.num_dropped() == bench.alive);
  }
  first->open();
  second->open();
  bench.finish();
  CHECK(bench.alive == 0);
  CHECK(bench.num_dropped() == 0);
  CHECK(bench.engine.events().num_idle() == bench.engine.events().num_created());
}

TEST(test_lent_memory_raises_the_limit) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  std::vector<std::unique_ptr<Loan>> held;
  for (int i = 0; i < 3; ++i) held.push_back(bench.lend());
  bench.drop_to_the_limit(4);
  CHECK(bench.alive <= 8);
  gate->open();
  for (auto& loan : held) bench.drop(std::move(loan));
  bench.finish();
}

TEST(test_a_share_of_the_device_may_always_wait) {
  Lending bench;
  bench.runtime.num_bytes = 32 * 10 * kNumBytes;
  const auto gate = bench.stop(kHome);
  bench.drop_to_the_limit(11);
  CHECK(bench.alive <= 12);
  gate->open();
  bench.finish();
}

TEST(test_an_allocator_gets_memory_together_with_its_users) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  const auto other = bench.stop(kOther);
  const auto held = bench.lend();
  bench.drop(bench.lend({kHome, kOther}));
  bench.engine.loans().reclaim(0);
  CHECK(bench.alive == 1);
  CHECK(bench.given_to == (std::vector<Stream>{kHome, kOther}));
  bench.engine.loans().reclaim(0);  // has nothing to give
  CHECK(bench.given_to.size() == 2);
  CHECK(count(bench.runtime.take_calls(), "wait 0") == 0);
  CHECK(bench.num_dropped() == 1);  // until the users are done
  gate->open();
  other->open();
  bench.finish();
  CHECK(bench.num_dropped() == 0);
}

TEST(test_memory_beyond_the_limit_is_not_given) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  const auto held = bench.lend();
  for (int i = 0; i < 20; ++i) {
    bench.drop(bench.lend());
    bench.engine.loans().reclaim(0);
    CHECK(bench.given_to.size() <= 1);
    CHECK(bench.num_dropped() <= 1);
  }
  gate->open();
  bench.finish();
}

TEST(test_on_a_full_device_the_copies_wait) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  const auto held = bench.lend();
  bench.drop(bench.lend());
  bench.engine.loans().reclaim(0, &kOther);
  CHECK(bench.given_to.size() == 1);  // of another stream
  bench.drop(bench.lend());
  bench.engine.loans().reclaim(0, &kCopies);
  CHECK(bench.given_to.size() == 1);
  CHECK(bench.alive == 1);
  CHECK(count(bench.runtime.take_calls(), "wait 0") == 1);
  gate->open();
  bench.finish();
}

// An allocator holds the lock of its device meanwhile.
TEST(test_an_allocator_gets_no_memory_of_another_device) {
  const Stream away{kOther.id, 1};
  Lending bench;
  const auto gate = bench.stop(kHome);
  const auto held = bench.lend({kHome}, away);
  bench.drop(bench.lend({kHome}, away));
  bench.drop(bench.lend({away, kCopies}, away));
  bench.engine.loans().record_dropped();
  bench.runtime.synchronize(kCopies);
  bench.engine.loans().reclaim(0);
  CHECK(bench.alive == 3 && bench.given_to.empty());
  bench.engine.loans().reclaim(1);
  CHECK(bench.alive == 1 && bench.given_to == std::vector<Stream>{kHome});
  gate->open();
  bench.finish();
}

TEST(test_a_copy_stream_under_capture_waits_for_no_user) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  for (int i = 0; i < 3; ++i) bench.drop(bench.lend());
  bench.runtime.take_calls();
  bench.runtime.capturing = kCopies.id;
  bench.engine.loans().reclaim(0);
  CHECK(count(bench.runtime.take_calls(), "wait 0") == 0);
  bench.runtime.capturing = -1;
  gate->open();
  bench.finish();
}

TEST(test_memory_that_the_allocator_cannot_protect_waits_for_its_users) {
  Lending bench;
  bench.can_give = false;
  const auto gate = bench.stop(kHome);
  const auto held = bench.lend();
  bench.drop(bench.lend());
  bench.engine.loans().reclaim(0);
  CHECK(bench.alive == 2 && bench.given_to.empty());
  gate->open();
  bench.finish();
  CHECK(bench.alive == 1);
}

TEST(test_memory_that_the_allocator_rejects_is_never_free) {
  Lending bench;
  bench.accepts = false;
  const auto gate = bench.stop(kHome);
  const auto held = bench.lend();
  bench.drop(bench.lend());
  bench.engine.loans().reclaim(0);
  gate->open();
  bench.finish();
  CHECK(bench.alive == 2);
  delete bench.rejected;
}

TEST(test_a_user_under_capture_gets_its_event_later) {
  Lending bench;
  bench.runtime.capturing = kHome.id;
  bench.drop(bench.lend());
  for (int i = 0; i < 5; ++i) bench.drop(bench.lend({kOther}));
  bench.engine.loans().reclaim(0, &kCopies);
  bench.finish();
  CHECK(bench.alive == 1);
  CHECK(count(bench.runtime.take_calls(), "record 1") == 0);
  bench.runtime.capturing = -1;
  bench.engine.loans().record_dropped();
  bench.finish();
  CHECK(bench.alive == 0);
}

TEST(test_a_capture_that_begins_before_the_record_gets_no_event) {
  Lending bench;
  bench.runtime.before_recording = [&] { bench.runtime.capturing = kHome.id; };
  bench.drop(bench.lend());
  bench.finish();
  bench.finish();
  CHECK(bench.alive == 1);
  bench.runtime.capturing = -1;
  bench.make_room();
  bench.finish();
  CHECK(bench.alive == 0);
}

TEST(test_memory_without_an_event_is_never_free) {
  Lending bench;
  bench.drop(bench.lend());
  bench.runtime.fail("record", 1);
  bench.engine.loans().record_dropped();
  bench.finish();
  CHECK(bench.alive == 1);
  CHECK(bench.num_dropped() == 0);  // later copies wait for no step
}

TEST(test_memory_stays_if_the_stream_cannot_wait) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  bench.drop(bench.lend());
  bench.engine.loans().record_dropped();
  bench.runtime.fail("wait 0", 1);
  bench.engine.loans().reclaim(0, &kCopies);
  const auto other = bench.lend();
  CHECK(bench.alive == 2);
  bench.engine.loans().reclaim(0, &kCopies);
  CHECK(bench.alive == 1);
  gate->open();
}

TEST(test_a_forked_child_frees_nothing) {
  Lending bench;
  auto loan = bench.lend();
  const pid_t child = fork();
  if (child == 0) {
    bench.drop(std::move(loan));
    bench.engine.loans().reclaim(0);
    _exit(bench.alive == 1 ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  bench.drop(std::move(loan));
  bench.make_room();
}

}  // namespace
