// The functions that the engine needs from a device. Uses no torch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pyparallel::transfer {

// Opaque numbers. Only the runtime interprets them.
struct Stream {
  int64_t id;
  int64_t device;
};

inline bool operator==(const Stream& a, const Stream& b) {
  return a.id == b.id && a.device == b.device;
}

// An event that may be recorded repeatedly. A wait refers to the last record before the
// wait was queued; later records do not change it. Only the runtime interprets
// `handle`.
struct Event {
  void* handle;
  int64_t device;
};

// Pinned memory, aligned to 64 bytes. Only the runtime interprets `owner`.
struct Pinned {
  uint8_t* data;
  void* owner;
};

struct Copy {
  uint8_t* dst;
  const uint8_t* src;
  int64_t nbytes;
};

// Learns of copies that other code queues between a device and memory of the host.
class CopyObserver {
 public:
  // `data` is memory of the host that a copy on `stream` reads or writes. The copy was
  // queued before this call, by this thread. Returns true if the observer tracks this
  // memory.
  virtual bool on_copy(const void* data, const Stream& stream) noexcept = 0;

 protected:
  ~CopyObserver() = default;
};

// Makes several calls of one thread to one device cheaper, while it lives.
class CallScope {
 public:
  CallScope() = default;
  virtual ~CallScope() = default;
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
};

// The mode of exchange_capture_mode in which no call ends a capture.
constexpr int kRelaxed = 2;

// All functions are thread-safe and throw errors of their own types. After the first
// call, forked processes must not call any of them.
//
// No call opens a context on a device that the process does not use, ends a graph
// capture, or leaves an error state to the next call of its thread.
class Runtime {
 public:
  // Returns the bytes of memory that the device has in all.
  virtual int64_t memory_size(int64_t device) = 0;

  // Allocates memory that `device` reads.
  virtual Pinned allocate(int64_t nbytes, int64_t device) = 0;
  virtual void free(const Pinned& memory) noexcept = 0;

  // Pins memory of another allocator for all devices. Returns 0, or an error code if
  // the system refuses. Throws if the device has failed.
  virtual int pin(void* data, int64_t nbytes) = 0;
  virtual void unpin(void* data) = 0;
  // Returns true if the byte at `data` is in memory of the host that copies can read in
  // place to `device`. Other code may have pinned it.
  virtual bool is_pinned(const void* data, int64_t device) = 0;

  // Shows the observer all later copies of other code that no other owner of the memory
  // tracks. It must live as long as the process. Returns false if that is impossible.
  // Only the first call has an effect.
  virtual bool observe_copies(CopyObserver* observer) = 0;

  // Queue copies to the device. The host does not wait. Copies of one batch may run in
  // any order.
  virtual void copy(const Copy& copy, const Stream& stream) = 0;
  virtual void copy_batch(const Copy* copies, int64_t num, const Stream& stream) = 0;
  // Returns the error code with which the device refused to queue a batch by one call,
  // or 0. Since then each copy is a call of its own.
  virtual int refused_batch() = 0;

  virtual Event create_event(int64_t device) = 0;
  virtual void record(const Event& event, const Stream& stream) = 0;
  // Returns true if the work before the last record is done. The host does not wait.
  virtual bool is_done(const Event& event) = 0;
  virtual void wait(const Stream& stream, const Event& event) = 0;
  // Blocks the host until is_done, or throws if the device failed.
  virtual void wait_on_host(const Event& event) = 0;

  // Creates a stream that no other code has, and returns the handle of the device's own
  // interface. It does not wait for the default stream.
  virtual int64_t create_stream(int64_t device) = 0;
  // In the scope, the device is current and this thread may make all calls during graph
  // captures of others, also those of other libraries. May return null.
  virtual std::unique_ptr<CallScope> scope(int64_t device) = 0;
  // Sets the calls that this thread may make during graph captures of others, and
  // returns the setting before. kRelaxed allows every call. Other values come from
  // earlier calls.
  virtual int exchange_capture_mode(int mode, int64_t device) = 0;

  // Returns true if work on `stream` is captured into a graph.
  virtual bool is_capturing(const Stream& stream) = 0;
  // Returns true if `stream` has no work left. It must not be under capture.
  virtual bool is_idle(const Stream& stream) = 0;
  // Returns the current streams of this thread, one per device that the process uses.
  virtual std::vector<Stream> current_streams() = 0;

 protected:
  // Never destroyed: at the end of the process the driver may be gone.
  ~Runtime() = default;
};

}  // namespace pyparallel::transfer
