// Streams, each with a thread that runs its tasks in order, and events.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace fakecuda {

class Capture;
using Task = std::function<void()>;

class Stream {
 public:
  Stream(int device, bool is_blocking, bool is_legacy, int priority)
      : device(device),
        is_blocking(is_blocking),
        is_legacy(is_legacy),
        priority(priority) {}

  const int device;
  // Synchronizes with the legacy default stream of its device.
  const bool is_blocking;
  const bool is_legacy;
  const int priority;
  // The capture that records this stream's work; guarded by capture_mutex().
  std::shared_ptr<Capture> capture;

  // Queues a task behind all earlier ones, and returns its number.
  uint64_t push(Task task);
  uint64_t last() const;
  bool is_done(uint64_t number) const;
  void wait(uint64_t number) const;
  // While held, the stream starts no task.
  void hold(bool on);
  // The thread ends behind the last task.
  void close();

 private:
  void run();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  bool started_ = false;
  bool held_ = false;
  bool closed_ = false;
};

// The work of one stream up to a place.
struct Point {
  Stream* stream;
  uint64_t number;
};

struct Recording {
  Point point;
  std::atomic<int64_t> nanoseconds{0};  // set when the stream reaches the point
};

class Event {
 public:
  Event(int device, unsigned flags) : device(device), flags(flags) {}

  const int device;
  const unsigned flags;

  // The last record on a stream that was not captured; null before the first.
  std::shared_ptr<Recording> recording() const;
  void set_recording(std::shared_ptr<Recording> recording);

  // The last record if it belongs to a capture; guarded by capture_mutex().
  std::weak_ptr<Capture> capture;
  bool is_captured = false;
  // The nodes of each stream that the event follows.
  std::map<Stream*, uint64_t> captured_seen;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Recording> recording_;
};

Stream* create_stream(int device, bool is_blocking, int priority);
Stream* legacy_stream(int device);
// The stream of a handle of the API; null, with a problem, for an unknown handle.
Stream* find_stream(cudaStream_t handle, const char* caller);
cudaError_t destroy_stream(cudaStream_t handle);
std::vector<Stream*> streams_of(int device);

Event* create_event(int device, unsigned flags);
Event* find_event(cudaEvent_t handle, const char* caller);
cudaError_t destroy_event(cudaEvent_t handle);

// Queues work that a capture does not record. Applies the rules of the legacy stream.
Point enqueue(Stream* stream, Task task);
void record(Event* event, Stream* stream);
// Lets all later work of `stream` wait for a recording.
void wait_for(Stream* stream, const std::shared_ptr<Recording>& recording);
void synchronize(int device);

// Each task starts after a random time of at most this.
void set_delay(int microseconds);
// Lets held streams run and removes the delay.
void reset_streams();

}  // namespace fakecuda
