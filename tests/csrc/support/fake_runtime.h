// A device of threads that records its calls. Streams work late and at their own speed,
// on memory by address. The device counts copies that read memory which the host has
// begun to overwrite.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fake_queue.h"
#include "transfer/runtime.h"

namespace fake {

using pyparallel::transfer::Copy;
using pyparallel::transfer::Event;
using pyparallel::transfer::Pinned;
using pyparallel::transfer::Stream;

class Runtime : public pyparallel::transfer::Runtime {
 public:
  Runtime(int64_t num_streams, int max_delay_us) {
    for (int64_t i = 0; i < num_streams; ++i) {
      queues_.push_back(
          std::make_unique<Queue>(static_cast<uint64_t>(i), max_delay_us));
    }
  }
  ~Runtime() {
    queues_.clear();
    for (Slab* slab : slabs_) delete slab;
  }

  // The functions that pyparallel calls.

  Pinned allocate(int64_t nbytes, int64_t) override {
    begin("allocate");
    auto* slab = new Slab(static_cast<size_t>(nbytes) + 64, uint8_t{0xEE});
    const std::lock_guard<std::mutex> lock(mutex_);
    slabs_.insert(slab);
    nbytes_ += nbytes;
    most_nbytes = std::max(most_nbytes.load(), nbytes_);
    const auto past = reinterpret_cast<uintptr_t>(slab->data()) % 64;
    return {slab->data() + (64 - past), slab};
  }

  void free(const Pinned& memory) noexcept override {
    begin("free");
    if (Work meanwhile = std::exchange(before_freeing, nullptr)) meanwhile();
    auto* slab = static_cast<Slab*>(memory.owner);
    check_unread(memory.data, 1);
    const std::lock_guard<std::mutex> lock(mutex_);
    slabs_.erase(slab);
    nbytes_ -= static_cast<int64_t>(slab->size()) - 64;
    delete slab;
  }

  int64_t memory_size(int64_t) override { return num_bytes; }
  int pin(void*, int64_t) override { return 0; }
  void unpin(void*) override {}
  bool is_pinned(const void*, int64_t) override { return false; }

  bool observe_copies(pyparallel::transfer::CopyObserver* one) override {
    observer = one;
    return true;
  }

  void copy(const Copy& copy, const Stream& stream) override {
    begin("copy");
    queue_copy(copy, stream);
  }

  void copy_batch(const Copy* copies, int64_t num, const Stream& stream) override {
    begin("copy_batch");
    for (int64_t i = num; i > 0; --i) queue_copy(copies[i - 1], stream);
  }

  Event create_event(int64_t device) override {
    begin("create_event");
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.emplace_back(std::make_shared<Gate>()).get()->open();
    return {&events_.back(), device};
  }

  void record(const Event& event, const Stream& stream) override {
    if (Work meanwhile = std::exchange(before_recording, nullptr)) meanwhile();
    begin("record " + std::to_string(stream.id));
    const auto reached = std::make_shared<Gate>();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      *static_cast<GateRef*>(event.handle) = reached;
    }
    push(stream, [reached] { reached->open(); });
  }

  bool is_done(const Event& event) override {
    begin("is_done");
    const bool done = gate(event)->is_open();
    if (Work meanwhile = std::exchange(before_answer, nullptr)) meanwhile();
    return done;
  }

  void wait(const Stream& stream, const Event& event) override {
    begin("wait " + std::to_string(stream.id));
    const GateRef reached = gate(event);
    push(stream, [reached] { reached->wait(); });
  }

  void wait_on_host(const Event& event) override {
    begin("wait_on_host");
    if (Work meanwhile = std::exchange(before_waiting, nullptr)) meanwhile();
    gate(event)->wait();
  }

  int refused_batch() override { return 0; }
  int64_t create_stream(int64_t) override { return 0; }
  std::unique_ptr<pyparallel::transfer::CallScope> scope(int64_t) override {
    return nullptr;
  }
  int exchange_capture_mode(int mode, int64_t) override { return mode; }

  bool is_capturing(const Stream& stream) override { return stream.id == capturing; }

  bool is_idle(const Stream& stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queues_[static_cast<size_t>(stream.id)]->is_idle();
  }

  std::vector<Stream> current_streams() override { return current; }

  // The functions for models and tests.

  // Queues `work` on `stream`.
  void run(const Stream& stream, Work work) { push(stream, std::move(work)); }

  void synchronize(const Stream& stream) {
    const auto reached = std::make_shared<Gate>();
    push(stream, [reached] { reached->open(); });
    reached->wait();
  }

  // Call this before the host writes: counts pending copies that read this memory.
  void check_unread(const uint8_t* data, int64_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& each : unread_) {
      const Copy& copy = each.second;
      if (copy.src < data + nbytes && data < copy.src + copy.nbytes) ++num_overwritten;
    }
  }

  std::vector<std::string> take_calls() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> calls;
    calls.swap(calls_);
    return calls;
  }

  // Makes the n-th call from now that begins with `name` fail; 0: every such call.
  void fail(const std::string& name, int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failing_ = name;
    calls_until_failure_ = n;
  }

  static constexpr int64_t kCopies = 0;  // the stream of the copies in all tests
  std::atomic<int64_t> capturing{-1};
  int64_t num_bytes = 0;        // of the memory of a device
  std::vector<Stream> current;  // of every thread
  pyparallel::transfer::CopyObserver* observer = nullptr;
  Work before_answer;     // runs once, between the answer of is_done and its return
  Work before_recording;  // runs once, before an event is recorded
  Work before_waiting;    // runs once, before the host waits
  Work before_freeing;    // runs once, before memory is freed
  std::atomic<int64_t> num_overwritten{0};
  std::atomic<int64_t> most_nbytes{0};  // the most bytes allocated at a time

 private:
  using Slab = std::vector<uint8_t>;

  void begin(const std::string& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (call != "is_done") calls_.push_back(call);
    if (failing_.empty() || call.rfind(failing_, 0) != 0) return;
    if (calls_until_failure_ > 1) {
      --calls_until_failure_;
      return;
    }
    if (calls_until_failure_ == 1) failing_.clear();
    throw std::runtime_error("no more " + call);
  }

  GateRef gate(const Event& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *static_cast<GateRef*>(event.handle);
  }

  void queue_copy(const Copy& copy, const Stream& stream) {
    int64_t number = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      number = num_copies_++;
      unread_[number] = copy;
    }
    push(stream, [this, copy, number] {
      memcpy(copy.dst, copy.src, static_cast<size_t>(copy.nbytes));
      const std::lock_guard<std::mutex> lock(mutex_);
      unread_.erase(number);
    });
  }

  void push(const Stream& stream, Work work) {
    queues_[static_cast<size_t>(stream.id)]->push(std::move(work));
  }

  std::mutex mutex_;
  std::set<Slab*> slabs_;
  std::deque<GateRef> events_;
  std::map<int64_t, Copy> unread_;
  std::vector<std::string> calls_;
  std::string failing_;
  int64_t calls_until_failure_ = 0;
  int64_t num_copies_ = 0;
  int64_t nbytes_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
};

}  // namespace fake
