#include "capture.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "calls.h"

namespace fakecuda {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::vector<std::shared_ptr<Capture>>& active() {
  static auto& captures = *new std::vector<std::shared_ptr<Capture>>;
  return captures;
}

// Lets calls skip the mutex while nothing is captured, which is nearly always.
std::atomic<int> num_active{0};

unsigned long long next_id() {
  static std::atomic<unsigned long long> last{0};
  return ++last;
}

bool prohibits(const Capture& capture) {
  if (capture.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return true;
  return capture.mode == cudaStreamCaptureModeGlobal &&
         thread_mode == cudaStreamCaptureModeGlobal;
}

cudaError_t check_valid(const Capture& capture) {
  return capture.is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

void add_node(Capture* capture, Stream* stream, Task task) {
  capture->graph.nodes.push_back(std::move(task));
  ++capture->seen[stream][stream];
}

cudaError_t check_legacy_locked(const Stream* stream) {
  if (!stream->is_legacy) return cudaSuccess;
  for (const auto& capture : active()) {
    for (const auto& member : capture->seen) {
      if (member.first->is_blocking && member.first->device == stream->device) {
        return cudaErrorStreamCaptureImplicit;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t reject(Capture* capture, const std::string& problem, cudaError_t error) {
  capture->is_invalid = true;
  add_problem(problem);
  return error;
}

// Each stream that joined the capture must have been waited for, directly or not.
bool is_joined(const Capture& capture) {
  const auto& origin = capture.seen.at(capture.origin);
  for (const auto& member : capture.seen) {
    const auto own = member.second.find(member.first);
    if (member.first == capture.origin || own == member.second.end()) continue;
    const auto joined = origin.find(member.first);
    if (joined == origin.end() || joined->second < own->second) return false;
  }
  return true;
}

void merge(std::map<Stream*, uint64_t>* into, const std::map<Stream*, uint64_t>& from) {
  for (const auto& [stream, number] : from) {
    uint64_t& seen = (*into)[stream];
    seen = std::max(seen, number);
  }
}

}  // namespace

Capture::Capture(Stream* origin, cudaStreamCaptureMode mode)
    : id(next_id()), origin(origin), mode(mode), thread(std::this_thread::get_id()) {
  seen[origin] = {};
}

std::mutex& capture_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode) {
  return std::exchange(thread_mode, mode);
}

cudaError_t check_capture_permits(const char* name) {
  if (num_active == 0 || thread_mode == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> lock(capture_mutex());
  cudaError_t error = cudaSuccess;
  for (const auto& capture : active()) {
    if (!prohibits(*capture)) continue;
    capture->is_invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  if (error != cudaSuccess) {
    add_problem(std::string(name) + " is not allowed while a stream is captured");
  }
  return error;
}

std::shared_ptr<Capture> capture_of(const Stream* stream) {
  if (num_active == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(capture_mutex());
  return stream->capture;
}

cudaError_t check_legacy_is_usable(const Stream* stream) {
  if (num_active == 0) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(capture_mutex());
  return check_legacy_locked(stream);
}

cudaError_t reject_capture(Stream* stream, const char* name, const char* reason) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream->capture == nullptr) return cudaSuccess;
  return reject(stream->capture.get(), std::string(name) + " " + reason,
                cudaErrorStreamCaptureUnsupported);
}

cudaError_t begin_capture(Stream* stream, cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture != nullptr) return cudaErrorIllegalState;
  stream->capture = std::make_shared<Capture>(stream, mode);
  active().push_back(stream->capture);
  ++num_active;
  return cudaSuccess;
}

cudaError_t end_capture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  const std::lock_guard<std::mutex> lock(capture_mutex());
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  for (const auto& member : capture->seen) member.first->capture = nullptr;
  auto& captures = active();
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  --num_active;
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (!is_joined(*capture)) {
    add_problem("a captured stream was not joined before the end of the capture");
    return cudaErrorStreamCaptureUnjoined;
  }
  *graph = new Graph(std::move(capture->graph));
  return cudaSuccess;
}

cudaError_t submit(Stream* stream, Task task) {
  if (num_active != 0) {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (stream->capture != nullptr) {
      const cudaError_t error = check_valid(*stream->capture);
      if (error == cudaSuccess) {
        add_node(stream->capture.get(), stream, std::move(task));
      }
      return error;
    }
    const cudaError_t error = check_legacy_locked(stream);
    if (error != cudaSuccess) return error;
  }
  enqueue(stream, std::move(task));
  return cudaSuccess;
}

cudaError_t record_event(Event* event, Stream* stream) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  Capture* const capture = stream->capture.get();
  if (capture == nullptr) {
    const cudaError_t error = check_legacy_locked(stream);
    if (error != cudaSuccess) return error;
    event->is_captured = false;
    event->capture.reset();
    record(event, stream);
    return cudaSuccess;
  }
  const cudaError_t error = check_valid(*capture);
  if (error != cudaSuccess) return error;
  event->is_captured = true;
  event->capture = stream->capture;
  event->captured_seen = capture->seen[stream];
  return cudaSuccess;
}

cudaError_t wait_event(Stream* stream, Event* event) {
  const std::lock_guard<std::mutex> lock(capture_mutex());
  const std::shared_ptr<Capture> of_event = event->capture.lock();
  const std::shared_ptr<Capture> of_stream = stream->capture;
  if (event->is_captured) {
    if (of_event == nullptr || of_event->origin->capture != of_event) {
      return cudaErrorCapturedEvent;  // its capture has ended
    }
    const cudaError_t error = check_valid(*of_event);
    if (error != cudaSuccess) return error;
    if (of_stream != nullptr && of_stream != of_event) {
      of_stream->is_invalid = true;
      return reject(of_event.get(), "a wait would merge two captures",
                    cudaErrorStreamCaptureMerge);
    }
    if (stream->is_legacy) return cudaErrorStreamCaptureImplicit;
    stream->capture = of_event;
    merge(&of_event->seen[stream], event->captured_seen);
    return cudaSuccess;
  }
  const std::shared_ptr<Recording> recording = event->recording();
  if (of_stream != nullptr) {
    const cudaError_t error = check_valid(*of_stream);
    if (error != cudaSuccess || recording == nullptr) return error;
    return reject(of_stream.get(),
                  "a captured stream waits for an event from outside of the capture",
                  cudaErrorStreamCaptureIsolation);
  }
  const cudaError_t error = check_legacy_locked(stream);
  if (error == cudaSuccess && recording != nullptr) wait_for(stream, recording);
  return error;
}

}  // namespace fakecuda
