#include "bindings/transfer.h"

#include <c10/core/Stream.h>

#include <optional>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/run.h"
#include "ops/transfer.h"

namespace pyparallel::bindings {
namespace {

// Any object that has the three numbers of a torch.Stream.
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

ops::Sent send(py::handle slab, py::handle leaves, py::handle plan, py::handle targets,
               py::handle sources, py::handle stream, py::handle home,
               py::handle chunk_nbytes) {
  const auto chunk =
      to_int(chunk_nbytes, [] { return std::string("send: chunk_nbytes"); });
  ops::SendJob job(to_stream(stream, "send", "stream"), to_stream(home, "send", "home"),
                   chunk);
  const Tensors packed(leaves, "send", "leaves");
  if (!plan.is_none()) {
    job.pack(to_tensor(slab, {"send", "slab"}), packed.refs,
             to_plan(plan, {"send", "plan"}));
  }
  const Tensors to(targets, "send", "targets");
  const Tensors from(sources, "send", "sources");
  job.read_in_place(to.refs, from.refs);
  // Also for few bytes: a driver may block in any call, and staging at its limit.
  std::optional<ops::Sent> sent;
  unlocked([&] { sent.emplace(job.run()); });
  return *std::move(sent);
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
  py::class_<ops::Sent> cls(*module, "Sent");
  cls.def("is_done", &ops::Sent::is_done);
  cls.def(
      "wait",
      [](const ops::Sent& self, py::handle stream) {
        self.wait(to_stream(stream, "Sent.wait", "stream"));
      },
      py::arg("stream"));
  cls.def("check", &ops::Sent::check);
  module->def("send", &send, py::arg("slab"), py::arg("leaves"), py::arg("plan"),
              py::arg("targets"), py::arg("sources"), py::arg("stream"),
              py::arg("home"), py::arg("chunk_nbytes") = transfer::kLargestBlock);
  module->def("transfers", &transfers);
  module->def("pinned_info", &pinned_info);
  module->def("bound_pinned", &bound_pinned, py::arg("limit"));
}

}  // namespace pyparallel::bindings
