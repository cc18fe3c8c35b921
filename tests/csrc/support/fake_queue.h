// Streams of the fake device: work that a thread does in order, and gates to stop it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "check.h"

namespace fake {

// Opens once, for all waiting threads.
class Gate {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_.store(true, std::memory_order_release);
    opened_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [this] { return is_open_.load(std::memory_order_relaxed); });
  }
  bool is_open() const { return is_open_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  std::atomic<bool> is_open_{false};
};

using GateRef = std::shared_ptr<Gate>;
using Work = std::function<void()>;

// Work that one thread does in order, some of it after a delay.
class Queue {
 public:
  Queue(uint64_t seed, int max_delay_us)
      : random_(seed), max_delay_us_(max_delay_us), thread_([this] { run(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }

  void push(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    ++num_left_;
    pushed_.notify_one();
  }

  bool is_idle() const { return num_left_ == 0; }

 private:
  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        pushed_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (!work) return;
      if (max_delay_us_ > 0) {
        const int64_t delay = random_.between(-max_delay_us_, max_delay_us_);
        if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      work();
      --num_left_;
    }
  }

  Random random_;
  int max_delay_us_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Work> work_;
  std::atomic<int64_t> num_left_{0};  // including the running one
  std::thread thread_;
};

}  // namespace fake
