// The CUDA runtime API: streams, events, capture and graphs.
#include <cuda_runtime_api.h>

#include <vector>

#include "calls.h"
#include "capture.h"
#include "streams.h"

using fakecuda::Event;
using fakecuda::fail;
using fakecuda::Graph;
using fakecuda::Stream;

namespace {

constexpr unsigned kUnsafeCall = fakecuda::kOpensContext | fakecuda::kUnsafe;

// The stream of a call that the capture of that stream does not allow in any mode.
cudaError_t uncaptured_stream(cudaStream_t handle, const char* name, Stream** stream) {
  *stream = fakecuda::find_stream(handle, name);
  if (*stream == nullptr) return cudaErrorInvalidResourceHandle;
  const cudaError_t error =
      fakecuda::reject_capture(*stream, name, "of a captured stream");
  return error != cudaSuccess ? error : fakecuda::check_legacy_is_usable(*stream);
}

cudaError_t uncaptured_event(cudaEvent_t handle, const char* name, Event** event) {
  *event = fakecuda::find_event(handle, name);
  if (*event == nullptr) return cudaErrorInvalidResourceHandle;
  const std::lock_guard<std::mutex> lock(fakecuda::capture_mutex());
  if (!(*event)->is_captured) return cudaSuccess;
  if (const auto capture = (*event)->capture.lock()) capture->is_invalid = true;
  fakecuda::add_problem(std::string(name) + " of a captured event");
  return cudaErrorCapturedEvent;
}

cudaStreamCaptureStatus status_of(const fakecuda::Capture* capture) {
  if (capture == nullptr) return cudaStreamCaptureStatusNone;
  return capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                             : cudaStreamCaptureStatusActive;
}

cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority) {
  const bool is_blocking = flags != cudaStreamNonBlocking;
  *stream = reinterpret_cast<cudaStream_t>(
      fakecuda::create_stream(fakecuda::current_device(), is_blocking, priority));
  return cudaSuccess;
}

struct GraphExec {
  std::vector<fakecuda::Task> nodes;
};

}  // namespace

// Starts a call with the stream of `handle`, as `stream`.
#define FAKECUDA_BEGIN_ON_STREAM(name)                        \
  FAKECUDA_BEGIN(name, fakecuda::kOpensContext);              \
  Stream* const stream = fakecuda::find_stream(handle, name); \
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle)

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  FAKECUDA_BEGIN("cudaStreamCreate", fakecuda::kOpensContext);
  return create_stream(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                         int priority) {
  FAKECUDA_BEGIN("cudaStreamCreateWithPriority", fakecuda::kOpensContext);
  return create_stream(stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FAKECUDA_BEGIN("cudaStreamDestroy", fakecuda::kPlain);
  return fail(fakecuda::destroy_stream(stream));
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamGetPriority");
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FAKECUDA_BEGIN("cudaStreamSynchronize", kUnsafeCall);
  Stream* stream = nullptr;
  const cudaError_t error = uncaptured_stream(handle, "cudaStreamSynchronize", &stream);
  if (error != cudaSuccess) return fail(error);
  stream->wait(stream->last());
  return fail(fakecuda::device_failure());
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  FAKECUDA_BEGIN("cudaStreamQuery", kUnsafeCall);
  Stream* stream = nullptr;
  const cudaError_t error = uncaptured_stream(handle, "cudaStreamQuery", &stream);
  if (error != cudaSuccess) return fail(error);
  return stream->is_done(stream->last()) ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                  cudaStreamCaptureStatus* status) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamIsCapturing");
  *status = status_of(fakecuda::capture_of(stream).get());
  return fail(fakecuda::check_legacy_is_usable(stream));
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                     cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges,
                                     size_t* num_dependencies) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamGetCaptureInfo");
  const auto capture = fakecuda::capture_of(stream);
  *status = status_of(capture.get());
  if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
  if (graph != nullptr) {
    *graph = reinterpret_cast<cudaGraph_t>(capture ? &capture->graph : nullptr);
  }
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return fail(fakecuda::check_legacy_is_usable(stream));
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamBeginCapture");
  return fail(fakecuda::begin_capture(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamEndCapture");
  Graph* captured = nullptr;
  const cudaError_t error = fakecuda::end_capture(stream, &captured);
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  return fail(error);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle,
                                unsigned) {
  FAKECUDA_BEGIN("cudaStreamWaitEvent", fakecuda::kOpensContext);
  Stream* const stream = fakecuda::find_stream(handle, "cudaStreamWaitEvent");
  Event* const event = fakecuda::find_event(event_handle, "cudaStreamWaitEvent");
  if (stream == nullptr || event == nullptr) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  return fail(fakecuda::wait_event(stream, event));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  FAKECUDA_BEGIN_ON_STREAM("cudaLaunchHostFunc");
  return fail(fakecuda::submit(stream, [=] { function(data); }));
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                  void* data, unsigned) {
  FAKECUDA_BEGIN_ON_STREAM("cudaStreamAddCallback");
  return fail(fakecuda::submit(stream, [=] { callback(handle, cudaSuccess, data); }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  FAKECUDA_BEGIN("cudaEventCreateWithFlags", fakecuda::kOpensContext);
  *event = reinterpret_cast<cudaEvent_t>(
      fakecuda::create_event(fakecuda::current_device(), flags));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  FAKECUDA_BEGIN("cudaEventCreate", fakecuda::kOpensContext);
  *event = reinterpret_cast<cudaEvent_t>(
      fakecuda::create_event(fakecuda::current_device(), cudaEventDefault));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FAKECUDA_BEGIN("cudaEventDestroy", fakecuda::kPlain);
  return fail(fakecuda::destroy_event(event));
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t handle,
                                     unsigned flags) {
  FAKECUDA_BEGIN("cudaEventRecord", fakecuda::kOpensContext);
  Stream* const stream = fakecuda::find_stream(handle, "cudaEventRecord");
  Event* const event = fakecuda::find_event(event_handle, "cudaEventRecord");
  if (stream == nullptr || event == nullptr) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (event->device != stream->device) {
    fakecuda::add_problem("cudaEventRecord on a stream of another device");
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (flags != cudaEventRecordDefault) return fail(cudaErrorNotSupported);
  return fail(fakecuda::record_event(event, stream));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  FAKECUDA_BEGIN("cudaEventQuery", fakecuda::kOpensContext);
  Event* event = nullptr;
  cudaError_t error = uncaptured_event(handle, "cudaEventQuery", &event);
  if (error == cudaSuccess) error = fakecuda::check_capture_permits("cudaEventQuery");
  if (error != cudaSuccess) return fail(error);
  const auto recording = event->recording();
  if (recording == nullptr) return cudaSuccess;
  const bool is_done = recording->point.stream->is_done(recording->point.number);
  return is_done ? fail(fakecuda::device_failure()) : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  FAKECUDA_BEGIN("cudaEventSynchronize", fakecuda::kOpensContext);
  Event* event = nullptr;
  cudaError_t error = uncaptured_event(handle, "cudaEventSynchronize", &event);
  if (error == cudaSuccess) {
    error = fakecuda::check_capture_permits("cudaEventSynchronize");
  }
  if (error != cudaSuccess) return fail(error);
  const auto recording = event->recording();
  if (recording != nullptr) recording->point.stream->wait(recording->point.number);
  return fail(fakecuda::device_failure());
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle,
                                 cudaEvent_t end_handle) {
  FAKECUDA_BEGIN("cudaEventElapsedTime", fakecuda::kOpensContext);
  const Event* const start = fakecuda::find_event(start_handle, "cudaEventElapsedTime");
  const Event* const end = fakecuda::find_event(end_handle, "cudaEventElapsedTime");
  if (start == nullptr || end == nullptr || !start->recording() || !end->recording() ||
      (start->flags | end->flags) & cudaEventDisableTiming) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  const int64_t first = start->recording()->nanoseconds;
  const int64_t last = end->recording()->nanoseconds;
  if (first == 0 || last == 0) return fail(cudaErrorNotReady);
  *milliseconds = static_cast<float>(last - first) / 1e6F;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long) {
  FAKECUDA_BEGIN("cudaGraphInstantiate", fakecuda::kOpensContext);
  if (graph == nullptr) return fail(cudaErrorInvalidValue);
  auto* const created = new GraphExec{reinterpret_cast<Graph*>(graph)->nodes};
  *exec = reinterpret_cast<cudaGraphExec_t>(created);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  FAKECUDA_BEGIN_ON_STREAM("cudaGraphLaunch");
  for (const auto& node : reinterpret_cast<GraphExec*>(exec)->nodes) {
    const cudaError_t error = fakecuda::submit(stream, node);
    if (error != cudaSuccess) return fail(error);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num) {
  FAKECUDA_BEGIN("cudaGraphGetNodes", fakecuda::kPlain);
  if (nodes != nullptr) return fail(cudaErrorNotSupported);
  *num = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  FAKECUDA_BEGIN("cudaGraphDestroy", fakecuda::kPlain);
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  FAKECUDA_BEGIN("cudaGraphExecDestroy", fakecuda::kPlain);
  delete reinterpret_cast<GraphExec*>(exec);
  return cudaSuccess;
}

}  // extern "C"
