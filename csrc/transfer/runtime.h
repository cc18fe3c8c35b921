// What the engine asks of a device. Knows no torch.
#pragma once

#include <cstdint>
#include <vector>

namespace pyparallel::transfer {

// Opaque numbers: only the runtime knows what stands behind them.
struct Stream {
  int64_t id;
  int64_t device;
};

inline bool operator==(const Stream& a, const Stream& b) {
  return a.id == b.id && a.device == b.device;
}

// An event that may be recorded again and again. A wait holds for what had been
// recorded when it was queued, whatever becomes of the event later. `handle` is the
// runtime's own.
struct Event {
  void* handle;
  int64_t device;
};

// Page-locked memory, at a multiple of 64 bytes. `owner` is the runtime's own.
struct Pinned {
  uint8_t* data;
  void* owner;
};

struct Copy {
  uint8_t* dst;
  const uint8_t* src;
  int64_t nbytes;
};

// All functions may be called from any thread at a time, and throw whatever says best
// what went wrong. None may be called in a process that was forked after the first.
//
// No call opens a context on a device that the process does not use, ends a graph
// capture, or leaves an error behind for the next call of its thread.
class Runtime {
 public:
  // Allocates memory that `device` reads.
  virtual Pinned allocate(int64_t nbytes, int64_t device) = 0;
  virtual void free(const Pinned& memory) noexcept = 0;

  // Pins memory of another allocator for all devices. Returns 0, or the code of the
  // error if the system refuses.
  virtual int pin(void* data, int64_t nbytes) = 0;
  virtual void unpin(void* data) = 0;

  // Queue copies to the device; the host waits for none. Those of one call may run in
  // any order.
  virtual void copy(const Copy& copy, const Stream& stream) = 0;
  virtual void copy_batch(const Copy* copies, int64_t num, const Stream& stream) = 0;

  virtual Event create_event(int64_t device) = 0;
  virtual void record(const Event& event, const Stream& stream) = 0;
  // Whether all that was queued before the last record is done; the host does not wait.
  virtual bool is_done(const Event& event) = 0;
  virtual void wait(const Stream& stream, const Event& event) = 0;
  // Blocks the host until is_done, or until it is known that it never will be.
  virtual void wait_on_host(const Event& event) = 0;

  // Whether what is queued on `stream` goes to a graph instead of the device.
  virtual bool is_capturing(const Stream& stream) = 0;
  // Whether all that was queued on `stream` is done. It must not be under capture.
  virtual bool is_idle(const Stream& stream) = 0;
  // The current streams of this thread, one for each device that the process uses.
  virtual std::vector<Stream> current_streams() = 0;

 protected:
  // Runtimes live as long as the process: at its end nobody may call the device.
  ~Runtime() = default;
};

}  // namespace pyparallel::transfer
