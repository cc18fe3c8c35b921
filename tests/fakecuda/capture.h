// Stream capture: its rules, and the graphs that it returns.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "streams.h"

namespace fakecuda {

// Nodes in the order of their capture, which respects every dependency. A launch runs
// them one after the other.
struct Graph {
  std::vector<Task> nodes;
};

class Capture {
 public:
  Capture(Stream* origin, cudaStreamCaptureMode mode);

  const unsigned long long id;
  Stream* const origin;
  const cudaStreamCaptureMode mode;
  const std::thread::id thread;
  bool is_invalid = false;
  Graph graph;
  // For each captured stream the number of its nodes, and of the nodes of every other
  // stream that its next node follows.
  std::map<Stream*, std::map<Stream*, uint64_t>> seen;
};

// Guards all captures, and the members of streams and events that name it.
std::mutex& capture_mutex();

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

// An error, and the captures invalid, if the current thread must not call `name` now
// since the call is potentially unsafe: see cudaThreadExchangeStreamCaptureMode.
cudaError_t check_capture_permits(const char* name);

// The status of a stream. Capture() is null if it is not captured.
std::shared_ptr<Capture> capture_of(const Stream* stream);
// cudaErrorStreamCaptureImplicit if `stream` is the legacy stream of a device on which
// a blocking stream is captured.
cudaError_t check_legacy_is_usable(const Stream* stream);
// Invalidates the capture of `stream`, for a call that conflicts with it.
cudaError_t reject_capture(Stream* stream, const char* name, const char* reason);

cudaError_t begin_capture(Stream* stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream* stream, Graph** graph);

// Runs the task in stream order, now or at each launch of the graph under capture.
cudaError_t submit(Stream* stream, Task task);
cudaError_t record_event(Event* event, Stream* stream);
cudaError_t wait_event(Stream* stream, Event* event);

}  // namespace fakecuda
