#include "streams.h"

#include <chrono>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "calls.h"

namespace fakecuda {
namespace {

struct State {
  std::mutex mutex;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::vector<Stream*> legacy;
  // Held while work is queued, so that the streams of a device have one order.
  std::mutex submission;
  std::atomic<int> delay{0};
};

State& state() {
  static State& instance = *new State;
  return instance;
}

void sleep_randomly() {
  const int limit = state().delay;
  if (limit <= 0) return;
  thread_local std::minstd_rand random{std::random_device{}()};
  const auto time = random() % static_cast<unsigned>(limit);
  std::this_thread::sleep_for(std::chrono::microseconds(time));
}

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void depend_on(Stream* stream, const Point& point) {
  if (point.stream == stream || point.stream->is_done(point.number)) return;
  stream->push([point] { point.stream->wait(point.number); });
}

}  // namespace

uint64_t Stream::push(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  return ++pushed_;
}

uint64_t Stream::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Stream::is_done(uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= number;
}

void Stream::wait(uint64_t number) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= number; });
}

void Stream::hold(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_ = on;
  changed_.notify_all();
}

void Stream::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !held_ && (closed_ || !tasks_.empty()); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    sleep_randomly();
    // A device that has failed runs nothing.
    if (device_failure() == cudaSuccess) task();
    task = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

std::shared_ptr<Recording> Event::recording() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return recording_;
}

void Event::set_recording(std::shared_ptr<Recording> recording) {
  const std::lock_guard<std::mutex> lock(mutex_);
  recording_ = std::move(recording);
}

Stream* create_stream(int device, bool is_blocking, int priority) {
  State& s = state();
  auto* const stream = new Stream(device, is_blocking, false, priority);
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.streams.insert(stream);
  return stream;
}

Stream* legacy_stream(int device) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  const auto index = static_cast<size_t>(device);
  if (s.legacy.size() <= index) s.legacy.resize(index + 1);
  if (s.legacy[index] == nullptr) {
    s.legacy[index] = new Stream(device, true, true, 0);
    s.streams.insert(s.legacy[index]);
  }
  return s.legacy[index];
}

Stream* find_stream(cudaStream_t handle, const char* caller) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return legacy_stream(current_device());
  }
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto* const stream = reinterpret_cast<Stream*>(handle);
  if (s.streams.count(stream) != 0) return stream;
  add_problem(std::string(caller) + " of a stream that does not exist");
  return nullptr;
}

cudaError_t destroy_stream(cudaStream_t handle) {
  Stream* const stream = find_stream(handle, "cudaStreamDestroy");
  if (stream == nullptr || stream->is_legacy) return cudaErrorInvalidResourceHandle;
  State& s = state();
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.streams.erase(stream);
  }
  stream->close();  // not deleted: events and other streams may wait for its work
  return cudaSuccess;
}

std::vector<Stream*> streams_of(int device) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  std::vector<Stream*> found;
  for (Stream* stream : s.streams) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

Event* create_event(int device, unsigned flags) {
  State& s = state();
  auto* const event = new Event(device, flags);
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.events.insert(event);
  return event;
}

Event* find_event(cudaEvent_t handle, const char* caller) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  auto* const event = reinterpret_cast<Event*>(handle);
  if (s.events.count(event) != 0) return event;
  add_problem(std::string(caller) + " of an event that does not exist");
  return nullptr;
}

cudaError_t destroy_event(cudaEvent_t handle) {
  Event* const event = find_event(handle, "cudaEventDestroy");
  if (event == nullptr) return cudaErrorInvalidResourceHandle;
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.events.erase(event);
  delete event;
  return cudaSuccess;
}

Point enqueue(Stream* stream, Task task) {
  const std::lock_guard<std::mutex> lock(state().submission);
  if (stream->is_legacy) {
    for (Stream* other : streams_of(stream->device)) {
      if (other->is_blocking) depend_on(stream, {other, other->last()});
    }
  } else if (stream->is_blocking) {
    Stream* const legacy = legacy_stream(stream->device);
    depend_on(stream, {legacy, legacy->last()});
  }
  return {stream, stream->push(std::move(task))};
}

void record(Event* event, Stream* stream) {
  auto recording = std::make_shared<Recording>();
  recording->point = enqueue(stream, [recording] { recording->nanoseconds = now(); });
  event->set_recording(std::move(recording));
}

void wait_for(Stream* stream, const std::shared_ptr<Recording>& recording) {
  const Point point = recording->point;
  enqueue(stream, [point] { point.stream->wait(point.number); });
}

void synchronize(int device) {
  for (Stream* stream : streams_of(device)) stream->wait(stream->last());
}

void set_delay(int microseconds) { state().delay = microseconds; }

void reset_streams() {
  State& s = state();
  s.delay = 0;
  const std::lock_guard<std::mutex> lock(s.mutex);
  for (Stream* stream : s.streams) stream->hold(false);
}

}  // namespace fakecuda
