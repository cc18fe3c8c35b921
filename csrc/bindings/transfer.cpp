#include "bindings/transfer.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/run.h"
#include "ops/batch_copy.h"
#include "ops/transfer.h"
#include "pytree/walk.h"

namespace pyparallel::bindings {
namespace {

// Converts any object with the three numbers of a torch.Stream.
c10::Stream to_stream(py::handle object, const char* op, const char* argument) {
  const auto number = [&](const char* attribute) {
    PyObject* found = PyObject_GetAttrString(object.ptr(), attribute);
    if (found == nullptr) {
      PyErr_Clear();
      wrong_type(c10::str(Where{op, argument}), "a torch.Stream", object);
    }
    const auto value = py::reinterpret_steal<py::object>(found);
    return to_int(value, [&] { return c10::str(op, ": ", argument, ".", attribute); });
  };
  return c10::Stream::unpack3(number("stream_id"),
                              static_cast<c10::DeviceIndex>(number("device_index")),
                              static_cast<c10::DeviceType>(number("device_type")));
}

c10::DeviceType to_type(py::handle object) {
  const auto type = py::reinterpret_borrow<py::object>(object);
  if (!py::isinstance<py::str>(type)) wrong_type("Runtime: device_type", "a str", type);
  return c10::Device(type.cast<std::string>()).type();
}

void* to_address(py::handle object) {
  const int64_t address =
      to_int(object, [] { return std::string("Runtime: address"); });
  return reinterpret_cast<void*>(static_cast<uintptr_t>(address));
}

ops::RecordedEvent send(py::handle slab, py::handle leaves, py::handle plan,
                        py::handle targets, py::handle sources, py::handle stream,
                        py::handle chunk_nbytes) {
  const auto chunk =
      to_int(chunk_nbytes, [] { return std::string("send: chunk_nbytes"); });
  ops::SendJob job(to_stream(stream, "send", "stream"), chunk);
  const Tensors packed(leaves, "send", "leaves");
  if (!plan.is_none()) {
    job.pack(to_tensor(slab, {"send", "slab"}), packed.refs,
             to_plan(plan, {"send", "plan"}));
  }
  const Tensors to(targets, "send", "targets");
  const Tensors from(sources, "send", "sources");
  job.read_in_place(to.refs, from.refs);
  return result_unlocked([&] { return job.run(); });
}

using Storages = std::vector<c10::Storage>;

// The copy of a batch, and what wait() makes of its tensors.
struct __attribute__((visibility("hidden"))) PlannedCopy {
  std::unique_ptr<ops::BatchCopy> copy;
  py::object structure;            // None: a list
  std::vector<py::object> leaves;  // of the structure; null in the places of tensors
};

py::object plan_copy(py::handle leaves, py::handle stream, int64_t leaf_nbytes,
                     int64_t mean_nbytes, std::optional<at::ScalarType> dtype,
                     const py::object& structure) {
  const bool is_nest = !structure.is_none();
  if (is_nest && !py::isinstance<pytree::Structure>(structure)) {
    wrong_type("plan_copy: structure", "a Structure or None", structure);
  }
  const py::tuple items =
      to_items(leaves, {"plan_copy", "leaves"}, "a sequence of tensors");
  PlannedCopy planned{nullptr, structure, {}};
  if (is_nest) planned.leaves.resize(items.size());
  std::vector<const at::Tensor*> tensors;
  tensors.reserve(items.size());
  bool are_plain = true;
  for (size_t i = 0; i < items.size(); ++i) {
    const py::handle leaf = item(items, i);
    if (is_nest && !THPVariable_Check(leaf.ptr())) {
      planned.leaves[i] = py::reinterpret_borrow<py::object>(leaf);
      continue;
    }
    tensors.push_back(
        &to_tensor(leaf, {"plan_copy", "leaves", static_cast<int64_t>(i)}));
    are_plain = are_plain && THPVariable_CheckExact(leaf.ptr());
  }
  if (!are_plain || (is_nest && tensors.empty())) return py::none();
  planned.copy = ops::BatchCopy::plan(tensors, to_stream(stream, "plan_copy", "stream"),
                                      {leaf_nbytes, mean_nbytes}, dtype);
  if (planned.copy == nullptr) return py::none();
  return py::cast(std::move(planned));
}

// Returns an object that keeps the memory alive.
py::object sources(const PlannedCopy& planned) {
  if (planned.copy->sources().empty()) return py::none();
  return py::capsule(new Storages(planned.copy->sources()),
                     [](void* held) { delete static_cast<Storages*>(held); });
}

void start(const PlannedCopy& planned, bool waits_here, bool may_go_home) {
  ops::BatchCopy* const copy = planned.copy.get();
  TORCH_CHECK(!copy->is_started(), "BatchCopy.start: must be called once, but was ",
              "called twice.");
  unlocked([&] { copy->start(waits_here, may_go_home); });
  copy->finish();
}

py::object reading(const PlannedCopy& planned) {
  const ops::RecordedEvent* const event = planned.copy->reading();
  return event == nullptr ? py::object(py::none()) : py::cast(*event);
}

py::object wait(const PlannedCopy& planned) {
  const ops::BatchCopy& copy = *planned.copy;
  TORCH_CHECK(copy.is_started(), "BatchCopy.wait: start must be called before, but ",
              "was not.");
  std::vector<at::Tensor> views = result_unlocked([&] { return copy.wait(); });
  if (planned.structure.is_none()) return to_tensors(std::move(views));
  py::tuple leaves(planned.leaves.size());
  auto next = views.begin();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const py::object& leaf = planned.leaves[i];
    PyObject* const made =
        leaf ? py::object(leaf).release().ptr() : THPVariable_Wrap(std::move(*next++));
    if (made == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(i), made);
  }
  const auto& structure = *planned.structure.cast<const pytree::Structure*>();
  PyObject* const nest = structure.unflatten(leaves.ptr());
  if (nest == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(nest);
}

py::object prepare_return(py::handle leaves, std::optional<int64_t> most_leaf_nbytes) {
  const Tensors tensors(leaves, "prepare_return", "leaves");
  if (!are_exact(tensors) || !ops::are_on_one_device(tensors.refs)) return py::none();
  const auto is_large = [&](const at::Tensor* leaf) {
    return static_cast<int64_t>(leaf->nbytes()) >= *most_leaf_nbytes &&
           leaf->is_contiguous();
  };
  if (most_leaf_nbytes &&
      std::any_of(tensors.refs.begin(), tensors.refs.end(), is_large)) {
    return py::none();
  }
  auto job = std::make_unique<ops::ReturnJob>(tensors.refs);
  if (job->plan().nbytes() == 0) return py::none();
  if (result_unlocked([&] { return job->is_capturing(); })) return py::none();
  return py::cast(std::move(job));
}

ops::RecordedEvent run_return(ops::ReturnJob& job, py::handle host, py::handle stream) {
  std::optional<c10::Stream> other;
  if (!stream.is_none()) other = to_stream(stream, "ReturnJob.run", "stream");
  job.take_host(to_tensor(host, {"ReturnJob.run", "host"}));
  ops::RecordedEvent event = result_unlocked([&] { return job.run(other); });
  job.finish();
  return event;
}

py::tuple pinned_info() {
  const ops::PinnedInfo info = ops::pinned_info();
  return py::make_tuple(info.in_use, info.cached, info.limit, info.waits);
}

void bound_pinned(int64_t limit) {
  unlocked([limit] { ops::bound_pinned(limit); });
}

py::tuple transfers() { return to_names(ops::transfers()); }

}  // namespace

void define_transfer(py::module_* module) {
  using ops::RecordedEvent;
  using ops::Runtime;
  using transfer::Fence;
  // A driver may block in any call, and `send` at the limit of staging blocks.
  py::class_<RecordedEvent>(*module, "RecordedEvent")
      .def("is_done",
           [](const RecordedEvent& self) {
             return result_unlocked([&] { return self.is_done(); });
           })
      .def(
          "wait",
          [](const RecordedEvent& self, py::handle stream) {
            const auto waiting = to_stream(stream, "RecordedEvent.wait", "stream");
            unlocked([&] { self.wait(waiting); });
          },
          py::arg("stream"))
      .def("synchronize",
           [](const RecordedEvent& self) { unlocked([&] { self.synchronize(); }); })
      .def("check", &RecordedEvent::check);
  py::class_<Fence>(*module, "Fence").def("is_done", [](Fence& self) {
    return result_unlocked([&] { return self.is_done(); });
  });
  py::class_<Runtime>(*module, "Runtime")
      .def(py::init([](py::handle type) { return Runtime(to_type(type)); }),
           py::arg("device_type"))
      .def(
          "pin",
          [](const Runtime& self, py::handle address, int64_t nbytes) {
            void* const data = to_address(address);
            return result_unlocked([&] { return self.pin(data, nbytes); });
          },
          py::arg("address"), py::arg("nbytes"))
      .def(
          "unpin",
          [](const Runtime& self, py::handle address) {
            void* const data = to_address(address);
            unlocked([&] { self.unpin(data); });
          },
          py::arg("address"))
      .def("observe_copies",
           [](const Runtime& self) {
             return result_unlocked([&] { return self.observe_copies(); });
           })
      .def(
          "take_copies",
          [](const Runtime& self, py::handle address) {
            const void* const data = to_address(address);
            return result_unlocked([&] { return self.take_copies(data); });
          },
          py::arg("address"))
      .def(
          "record",
          [](const Runtime& self, py::handle stream) {
            const auto recorded = to_stream(stream, "Runtime.record", "stream");
            return result_unlocked([&] { return self.record(recorded); });
          },
          py::arg("stream"))
      .def(
          "allocate",
          [](const Runtime& self, const std::vector<int64_t>& sizes,
             py::handle stream) {
            const auto owner = to_stream(stream, "Runtime.allocate", "stream");
            return result_unlocked([&] { return self.allocate(sizes, owner); });
          },
          py::arg("sizes"), py::arg("stream"))
      .def(
          "keep",
          [](const Runtime& self, py::handle tensors, py::handle stream) {
            const Tensors kept(tensors, "Runtime.keep", "tensors");
            const auto user = to_stream(stream, "Runtime.keep", "stream");
            py::list others;
            for (const size_t i :
                 result_unlocked([&] { return self.keep(kept.refs, user); })) {
              others.append(*kept.refs[i]);
            }
            return others;
          },
          py::arg("tensors"), py::arg("stream"))
      .def(
          "create_stream",
          [](const Runtime& self, int64_t device) {
            return result_unlocked([&] { return self.create_stream(device); });
          },
          py::arg("device"))
      .def(
          "exchange_capture_mode",
          [](const Runtime& self, int mode, int64_t device) {
            return result_unlocked(
                [&] { return self.exchange_capture_mode(mode, device); });
          },
          py::arg("mode"), py::arg("device"))
      .def(
          "is_capturing",
          [](const Runtime& self, py::handle stream) {
            const auto asked = to_stream(stream, "Runtime.is_capturing", "stream");
            return result_unlocked([&] { return self.is_capturing(asked); });
          },
          py::arg("stream"))
      .def(
          "is_idle",
          [](const Runtime& self, py::handle stream) {
            const auto asked = to_stream(stream, "Runtime.is_idle", "stream");
            return result_unlocked([&] { return self.is_idle(asked); });
          },
          py::arg("stream"))
      .def("refused_batch", &Runtime::refused_batch)
      .def("fence", [](const Runtime& self) {
        return result_unlocked([&] { return self.fence(); });
      });
  py::class_<PlannedCopy>(*module, "BatchCopy")
      .def_property_readonly("sources", &sources)
      .def_property_readonly("reading", &reading)
      .def_property_readonly(
          "num_in_place",
          [](const PlannedCopy& planned) { return planned.copy->num_in_place(); })
      .def_property_readonly(
          "pageable_nbytes",
          [](const PlannedCopy& planned) { return planned.copy->pageable_nbytes(); })
      .def("start", &start, py::arg("waits_here"), py::arg("may_go_home"))
      .def("wait", &wait);
  module->def("plan_copy", &plan_copy, py::arg("leaves"), py::arg("stream"),
              py::arg("leaf_nbytes"), py::arg("mean_nbytes"),
              py::arg("dtype") = py::none(), py::arg("structure") = py::none());
  py::class_<ops::ReturnJob>(*module, "ReturnJob")
      .def_property_readonly("plan", &ops::ReturnJob::plan)
      .def(
          "pinned",
          [](const ops::ReturnJob& self, int64_t nbytes) {
            return result_unlocked([&] { return self.pinned(nbytes); });
          },
          py::arg("nbytes"))
      .def("run", &run_return, py::arg("host"), py::arg("stream"));
  module->def("prepare_return", &prepare_return, py::arg("leaves"),
              py::arg("most_leaf_nbytes"));
  module->def("send", &send, py::arg("slab"), py::arg("leaves"), py::arg("plan"),
              py::arg("targets"), py::arg("sources"), py::arg("stream"),
              py::arg("chunk_nbytes") = transfer::kLargestBlock);
  module->def("transfers", &transfers);
  module->def("pinned_info", &pinned_info);
  module->def("bound_pinned", &bound_pinned, py::arg("limit"));
}

}  // namespace pyparallel::bindings
