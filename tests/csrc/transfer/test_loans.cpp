// Device memory of batches: the waits for its users, and its limit.
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "check.h"
#include "fake_runtime.h"
#include "transfer/loans.h"
#include "transfers.h"

namespace {

using namespace fake;
using namespace pyparallel::transfer;

constexpr int64_t kNumBytes = 100;

// Counts the loans that have memory.
class CountedLoan final : public Loan {
 public:
  CountedLoan(const Stream& stream, int64_t* alive)
      : Loan(stream, kNumBytes), alive_(alive) {
    ++*alive_;
  }
  ~CountedLoan() override { --*alive_; }

 private:
  int64_t* alive_;
};

struct Lending : Bench {
  // Lends memory of the copy stream, and drops it again.
  std::unique_ptr<Loan> lend(const std::vector<Stream>& users = {kHome}) {
    engine.loans().make_room(kNumBytes, kCopies);
    auto loan = std::make_unique<CountedLoan>(kCopies, &alive);
    engine.loans().lend(*loan);
    for (const Stream& user : users) engine.loans().use(loan.get(), user);
    return loan;
  }
  void drop(std::unique_ptr<Loan> loan) { engine.loans().drop(std::move(loan)); }
  void make_room() { engine.loans().make_room(0, kCopies); }

  int64_t alive = 0;
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
    CHECK(bench.engine.loans().info(kCopies).dropped_nbytes == kNumBytes * bench.alive);
  }
  first->open();
  second->open();
  bench.synchronize();
  bench.make_room();
  CHECK(bench.alive == 0);
  CHECK(bench.engine.loans().info(kCopies).dropped_nbytes == 0);
  CHECK(bench.engine.events().num_idle() == bench.engine.events().num_created());
}

TEST(test_lent_memory_raises_the_limit) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  std::vector<std::unique_ptr<Loan>> held;
  for (int i = 0; i < 3; ++i) held.push_back(bench.lend());
  for (int i = 0; i < 4; ++i) bench.drop(bench.lend());
  CHECK(count(bench.runtime.take_calls(), "wait 0") == 0);
  bench.drop(bench.lend());
  bench.drop(bench.lend());
  CHECK(count(bench.runtime.take_calls(), "wait 0") > 0);
  CHECK(bench.alive <= 8);
  gate->open();
  for (auto& loan : held) bench.drop(std::move(loan));
  bench.synchronize();
  bench.make_room();
}

TEST(test_a_user_under_capture_gets_its_event_later) {
  Lending bench;
  bench.runtime.capturing = kHome.id;
  bench.drop(bench.lend());
  for (int i = 0; i < 5; ++i) bench.drop(bench.lend({kOther}));
  bench.synchronize();
  bench.make_room();
  CHECK(bench.alive == 1);
  CHECK(count(bench.runtime.take_calls(), "record 1") == 0);
  bench.runtime.capturing = -1;
  bench.engine.loans().record_dropped();
  bench.synchronize();
  bench.make_room();
  CHECK(bench.alive == 0);
}

TEST(test_memory_without_an_event_is_never_free) {
  Lending bench;
  bench.drop(bench.lend());
  bench.runtime.fail("record", 1);
  bench.engine.loans().record_dropped();
  bench.synchronize();
  bench.make_room();
  CHECK(bench.alive == 1);
}

TEST(test_memory_stays_if_the_stream_cannot_wait) {
  Lending bench;
  const auto gate = bench.stop(kHome);
  bench.drop(bench.lend());
  bench.engine.loans().record_dropped();
  bench.runtime.fail("wait 0", 1);
  bench.engine.loans().free_all();
  const auto other = bench.lend();
  CHECK(bench.alive == 2);
  bench.engine.loans().free_all();
  CHECK(bench.alive == 1);
  gate->open();
}

TEST(test_a_forked_child_frees_nothing) {
  Lending bench;
  auto loan = bench.lend();
  const pid_t child = fork();
  if (child == 0) {
    bench.drop(std::move(loan));
    bench.engine.loans().free_all();
    _exit(bench.alive == 1 ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  bench.drop(std::move(loan));
  bench.make_room();
}

}  // namespace
