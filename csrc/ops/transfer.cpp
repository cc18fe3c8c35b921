#include "ops/transfer.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>

#include "memory/block_cache.h"

namespace pyparallel::ops {
namespace {

using transfer::Engine;

transfer::Stream to_stream(const c10::Stream& stream) {
  return {stream.id(), stream.device_index()};
}

std::string type_name(c10::DeviceType type) { return c10::DeviceTypeName(type, true); }

bool debug_enabled() {
  const char* value = std::getenv("PYPARALLEL_DEBUG");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

// The engines by device type. Made at the first call and never destroyed, because at
// the end of the process the driver may be gone. No lock protects them: a forked child
// would wait for ever for a lock that another thread held.
std::array<std::atomic<Engine*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> engines{};

std::atomic<int64_t>& pinned_limit() {
  static std::atomic<int64_t> limit{memory::default_limit()};
  return limit;
}

transfer::Runtime* runtime_for(c10::DeviceType type, const Where& where) {
  const Backend* backend = find_backend(type);
  const bool found = backend != nullptr && backend->runtime != nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(found, where, " must be of a device type in ",
                              "transfers(), but is of '", type_name(type), "'.");
  return backend->runtime();
}

Engine* engine_for(c10::DeviceType type, transfer::Runtime* runtime) {
  std::atomic<Engine*>& place = engines.at(static_cast<size_t>(type));
  Engine* engine = place.load();
  if (engine != nullptr) return engine;
  transfer::Limits limits;
  limits.poison = debug_enabled();
  limits.max_bytes = pinned_limit();
  const Engine::PackBytes pack = [](const Pack& body) {
    find_backend(c10::kCPU)->pack(body, c10::kCPU);
  };
  auto made = std::make_unique<Engine>(runtime, pack, limits);
  if (!place.compare_exchange_strong(engine, made.get())) return engine;
  engine = made.release();
  // The limit may have changed before the engine was published.
  engine->set_limit(pinned_limit());
  return engine;
}

void check_type(const c10::Stream& stream, c10::DeviceType type, const Where& where) {
  TORCH_CHECK_VALUE(stream.device_type() == type, where, " must be of '",
                    type_name(type), "', but is of '", type_name(stream.device_type()),
                    "'.");
}

// The memory of a batch, from torch's allocator.
class TensorLoan final : public transfer::Loan {
 public:
  using Loan::Loan;

  // Torch records no user of memory with another deleter, such as that of a tensor
  // which was sent to another process.
  bool can_give() const override {
    return memory.get_deleter() ==
           c10::GetAllocator(memory.device().type())->raw_deleter();
  }

  void give(const std::vector<transfer::Stream>& users) override {
    const c10::DeviceType type = memory.device().type();
    for (const transfer::Stream& user : users) {
      const c10::Device device(type, static_cast<c10::DeviceIndex>(user.device));
      c10::impl::getDeviceGuardImpl(type)->recordDataPtrOnStream(
          memory, c10::Stream(c10::Stream::UNSAFE, device, user.id));
    }
  }

  c10::DataPtr memory;
};

// The memory that this thread allocates for a batch.
struct Wanted {
  transfer::Stream stream;
  int64_t nbytes;
};
thread_local const Wanted* wanted = nullptr;

// Torch asks the device for up to this number of bytes more than it needs.
constexpr int64_t kLargestExcess = 20 << 20;

c10::DataPtr allocate_memory(c10::DeviceType type, const Wanted& request) {
  wanted = &request;
  const auto done = c10::make_scope_exit([] { wanted = nullptr; });
  return c10::GetAllocator(type)->allocate(static_cast<size_t>(request.nbytes));
}

// A storage of memory that is lent to a batch. Torch's own allocator has the memory, so
// `Tensor.record_stream` works. It cannot be resized: that would free the memory at
// once, although other streams use it.
class LentStorage final : public c10::StorageImpl {
 public:
  LentStorage(c10::DataPtr memory, int64_t nbytes, transfer::Loans* loans,
              std::unique_ptr<TensorLoan> loan)
      : StorageImpl(use_byte_size_t(), nbytes, std::move(memory), nullptr, false),
        loans_(loans),
        loan_(std::move(loan)) {
    loans_->lend(*loan_);
  }
  ~LentStorage() override { drop(); }

  // Called before the destructor while weak references remain.
  void release_resources() override {
    drop();
    StorageImpl::release_resources();
  }

  void use(const transfer::Stream& stream) { loans_->use(loan_.get(), stream); }

 private:
  void drop() noexcept {
    if (loan_ == nullptr) return;
    loan_->memory = set_data_ptr(c10::DataPtr(nullptr, device()));
    loans_->drop(std::move(loan_));
  }

  transfer::Loans* loans_;
  std::unique_ptr<TensorLoan> loan_;
};

at::Tensor lent_tensor(c10::DataPtr memory, int64_t nbytes, transfer::Loans* loans,
                       const transfer::Stream& stream) {
  const c10::DispatchKey key =
      c10::computeDispatchKey(c10::kByte, c10::kStrided, memory.device());
  c10::Storage storage(c10::make_intrusive<LentStorage>(
      std::move(memory), nbytes, loans, std::make_unique<TensorLoan>(stream, nbytes)));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key),
      c10::scalarTypeToTypeMeta(c10::kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(nbytes);
  return tensor;
}

// Only an allocator that asks for memory back lends any: no other allocation shall fail
// because of memory that waits.
bool may_lend(c10::DeviceType type) {
  const Backend* backend = find_backend(type);
  return backend->reclaims != nullptr && backend->reclaims();
}

void check_device(const Snapshot& snapshot, const Where& where,
                  const c10::Stream& stream) {
  const c10::Device device = snapshot.device;
  const bool same = device.type() == stream.device_type() &&
                    (!device.has_index() || device.index() == stream.device_index());
  TORCH_CHECK_VALUE(same, where, " must be on ", stream.device().str(),
                    ", the device of stream, but is on ", device.str(), ".");
}

void take_contiguous(const at::Tensor& tensor, const Where& where, Snapshot* snapshot) {
  take_snapshot(tensor, where, snapshot);
  TORCH_CHECK_VALUE(snapshot->contiguous, where, " must be contiguous, but has shape ",
                    Tuple{snapshot->sizes}, " and strides ", Tuple{snapshot->strides},
                    ".");
  check_storage(*snapshot, where);
}

}  // namespace

c10::Stream current_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

bool RecordedEvent::is_done() const {
  return sent_.event != nullptr && engine_->is_done(*sent_.event);
}

void RecordedEvent::wait(const c10::Stream& stream) const {
  check_type(stream, type_, {"RecordedEvent.wait", "stream"});
  if (sent_.event == nullptr) check();
  engine_->wait(to_stream(stream), *sent_.event);
}

void RecordedEvent::synchronize() const {
  if (sent_.event == nullptr) check();
  engine_->wait_on_host(*sent_.event);
}

void RecordedEvent::check() const {
  if (sent_.error != nullptr) std::rethrow_exception(sent_.error);
}

Runtime::Runtime(c10::DeviceType type)
    : type_(type), runtime_(runtime_for(type, {"Runtime", "device_type"})) {}

bool Runtime::observe_copies() const { return engine()->observe_copies(); }

int Runtime::pin(void* data, int64_t nbytes) const {
  return engine()->pin(data, nbytes);
}

void Runtime::unpin(void* data) const { engine()->unpin(data); }

std::unique_ptr<transfer::Fence> Runtime::take_copies(const void* data) const {
  return engine()->take_copies(data);
}

RecordedEvent Runtime::record(const c10::Stream& stream) const {
  check_type(stream, type_, {"Runtime.record", "stream"});
  return {engine(), type_, {engine()->record(to_stream(stream)), nullptr}};
}

std::vector<at::Tensor> Runtime::allocate(const std::vector<int64_t>& sizes,
                                          const c10::Stream& stream) const {
  check_type(stream, type_, {"Runtime.allocate", "stream"});
  int64_t total = 0;
  for (const int64_t nbytes : sizes) {
    const bool fits = nbytes >= 0 && !__builtin_add_overflow(total, nbytes, &total);
    TORCH_CHECK_VALUE(fits,
                      "Runtime.allocate: sizes must be at least 0 and have a sum ",
                      "of 64 bits, but one is ", nbytes, ".");
  }
  at::globalContext().lazyInitDevice(type_);
  const transfer::Stream owner = to_stream(stream);
  const std::unique_ptr<transfer::CallScope> scope = runtime_->scope(owner.device);
  const c10::StreamGuard guard(stream);
  std::vector<at::Tensor> blocks;
  blocks.reserve(sizes.size());
  if (!may_lend(type_)) {
    const at::TensorOptions options = at::device(stream.device()).dtype(at::kByte);
    for (const int64_t nbytes : sizes) blocks.push_back(at::empty({nbytes}, options));
    return blocks;
  }
  transfer::Loans* const loans = &engine()->loans();
  loans->make_room(total, owner);
  for (const int64_t nbytes : sizes) {
    blocks.push_back(
        lent_tensor(allocate_memory(type_, {owner, nbytes}), nbytes, loans, owner));
  }
  return blocks;
}

std::vector<size_t> Runtime::keep(TensorRefs tensors, const c10::Stream& stream) const {
  check_type(stream, type_, {"Runtime.keep", "stream"});
  std::vector<size_t> others;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_plain(*tensors[i], {"Runtime.keep", "tensors", static_cast<int64_t>(i)});
    auto* const lent =
        dynamic_cast<LentStorage*>(tensors[i]->storage().unsafeGetStorageImpl());
    if (lent == nullptr) {
      others.push_back(i);
    } else {
      lent->use(to_stream(stream));
    }
  }
  engine()->loans().record_dropped();
  return others;
}

int64_t Runtime::create_stream(int64_t device) const {
  return runtime_->create_stream(device);
}

int Runtime::exchange_capture_mode(int mode, int64_t device) const {
  return runtime_->exchange_capture_mode(mode, device);
}

bool Runtime::is_capturing(const c10::Stream& stream) const {
  check_type(stream, type_, {"Runtime.is_capturing", "stream"});
  return runtime_->is_capturing(to_stream(stream));
}

bool Runtime::is_idle(const c10::Stream& stream) const {
  check_type(stream, type_, {"Runtime.is_idle", "stream"});
  return runtime_->is_idle(to_stream(stream));
}

void Runtime::check_not_capturing(const c10::Stream& stream, const char* name) const {
  engine()->check_not_capturing(to_stream(stream), name);
}

void Runtime::check_usable() const { engine()->events().check_usable(); }

RecordedEvent Runtime::send(transfer::Job job, const c10::Stream& stream) const {
  job.stream = to_stream(stream);
  return {engine(), type_, engine()->send(job)};
}

std::unique_ptr<transfer::Fence> Runtime::fence() const { return engine()->fence(); }

Engine* Runtime::engine() const { return engine_for(type_, runtime_); }

SendJob::SendJob(c10::Stream stream, int64_t chunk)
    : stream_(stream),
      chunk_(chunk),
      engine_(engine_for(stream.device_type(),
                         runtime_for(stream.device_type(), {"send", "stream"}))) {
  TORCH_CHECK_VALUE(chunk >= 1 && chunk <= transfer::kLargestBlock,
                    "send: chunk_nbytes must be between 1 and ",
                    transfer::kLargestBlock, ", but is ", chunk, ".");
}

void SendJob::pack(const at::Tensor& slab, TensorRefs leaves, const SlabPlan& plan) {
  const Where where{"send", "slab"};
  slab_ = take_slab(slab, where, plan);
  check_device(slab_, where, stream_);
  leaves_.emplace("send", leaves.size(), c10::kCPU).add(leaves, plan, slab_);
}

void SendJob::read_in_place(TensorRefs targets, TensorRefs sources) {
  TORCH_CHECK_VALUE(targets.size() == sources.size(), "send: targets must have ",
                    sources.size(), " entries, as sources, but has ", targets.size(),
                    ".");
  snapshots_.reserve(2 * sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    const Where to{"send", "targets", static_cast<int64_t>(i)};
    const Where from{"send", "sources", static_cast<int64_t>(i)};
    Snapshot& target = snapshots_.emplace_back();
    Snapshot& source = snapshots_.emplace_back();
    take_contiguous(*targets[i], to, &target);
    take_contiguous(*sources[i], from, &source);
    check_device(target, to, stream_);
    TORCH_CHECK_VALUE(source.device.is_cpu(), from, " must be on the CPU, but is on ",
                      source.device.str(), ".");
    TORCH_CHECK_VALUE(source.nbytes == target.nbytes, to, " must have ", source.nbytes,
                      " bytes, as its source, but has ", target.nbytes, ".");
    check_apart(source, target, from);
    if (source.nbytes == 0) continue;
    direct_.push_back({target.mutable_data(), source.data(), source.nbytes});
  }
}

RecordedEvent SendJob::run() {
  transfer::Job job{nullptr,
                    0,
                    nullptr,
                    0,
                    nullptr,
                    direct_.data(),
                    static_cast<int64_t>(direct_.size()),
                    to_stream(stream_),
                    chunk_};
  if (leaves_ && slab_.nbytes > 0) {
    const std::vector<Slot>& slots = leaves_->read();
    job.dst = slab_.mutable_data();
    job.nbytes = slab_.nbytes;
    job.slots = slots.data();
    job.num_slots = static_cast<int64_t>(slots.size());
  }
  return {engine_, stream_.device_type(), engine_->send(job)};
}

ReturnJob::ReturnJob(TensorRefs leaves)
    : home_(current_stream(leaves.front()->device())),
      runtime_(home_.device_type()),
      engine_(runtime_.engine()),
      plan_(leaves) {
  leaves_.emplace("pack", leaves.size(), home_.device());
  for (size_t i = 0; i < leaves.size(); ++i)
    leaves_->add(*leaves[i], plan_.leaves()[i]);
}

at::Tensor ReturnJob::pinned(int64_t nbytes) const {
  const std::unique_ptr<transfer::CallScope> scope = runtime_.scope(home_);
  const at::TensorOptions options = at::device(c10::kCPU).dtype(at::kByte);
  return at::empty({nbytes}, options.pinned_memory(!home_.device().is_cpu()));
}

void ReturnJob::take_host(const at::Tensor& host) {
  const Where where{"ReturnJob.run", "host"};
  TORCH_CHECK_VALUE(leaves_.has_value(), "ReturnJob.run: the job must be new, but has ",
                    "run. Prepare another one.");
  check_slab(ops::take_slab(host, where, plan_), where, /*on_cpu=*/true);
  host_ = host;
}

RecordedEvent ReturnJob::run(const std::optional<c10::Stream>& other) {
  const std::unique_ptr<transfer::CallScope> scope = runtime_.scope(home_);
  const c10::Stream stream = other.value_or(home_);
  runtime_.check_not_capturing(stream, "copy");
  transfer::SendResult sent;
  try {
    queue(stream);
  } catch (...) {
    sent.error = std::current_exception();
  }
  // Also after an error: the copy may have been queued.
  try {
    sent.event = engine_->record(to_stream(stream));
  } catch (...) {
    if (sent.error == nullptr) sent.error = std::current_exception();
  }
  return {engine_, stream.device_type(), std::move(sent)};
}

void ReturnJob::queue(const c10::Stream& stream) {
  const at::Tensor slab = runtime_.allocate({plan_.nbytes()}, home_)[0];
  const std::vector<Slot>& slots = leaves_->read();
  const Pack body{slab.mutable_data_ptr<uint8_t>(), plan_.nbytes(), 1, slots.data(),
                  static_cast<int64_t>(slots.size())};
  find_backend(home_.device_type())->pack(body, home_.device());
  c10::OptionalStreamGuard guard;
  if (stream != home_) {
    engine_->wait(to_stream(stream), *engine_->record(to_stream(home_)));
    const at::Tensor* const kept = &slab;
    if (!runtime_.keep(kept, stream).empty()) slab.record_stream(stream);
    guard.reset_stream(stream);
  }
  host_.copy_(slab, /*non_blocking=*/true);
}

PinnedInfo pinned_info() {
  PinnedInfo sum{0, 0, pinned_limit(), 0};
  for (const std::atomic<Engine*>& place : engines) {
    const Engine* const engine = place.load();
    // A forked child can use none of it.
    if (engine == nullptr || engine->events().forked()) continue;
    const transfer::Staging::Info info = engine->staging().info();
    sum.in_use += info.nbytes - info.idle_nbytes;
    sum.cached += info.idle_nbytes;
    sum.waits += info.num_waits;
  }
  return sum;
}

void bound_pinned(int64_t limit) {
  pinned_limit() = limit;
  for (const std::atomic<Engine*>& place : engines) {
    if (Engine* const engine = place.load()) engine->set_limit(limit);
  }
}

void reclaim_memory(c10::Device device, int64_t (*num_free)(int64_t index)) noexcept {
  Engine* const engine = engines.at(static_cast<size_t>(device.type())).load();
  if (engine == nullptr) return;
  bool is_full = false;
  if (wanted != nullptr && wanted->stream.device == device.index()) {
    try {
      is_full = num_free(wanted->stream.device) < wanted->nbytes + kLargestExcess;
    } catch (...) {
      // The device failed. The allocation reports that.
    }
  }
  engine->loans().reclaim(device.index(), is_full ? &wanted->stream : nullptr);
}

std::vector<c10::DeviceType> transfers() {
  std::vector<c10::DeviceType> types;
  for (const c10::DeviceType type : registered_devices()) {
    if (find_backend(type)->runtime != nullptr) types.push_back(type);
  }
  return types;
}

}  // namespace pyparallel::ops
