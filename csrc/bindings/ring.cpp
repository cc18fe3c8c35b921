#include "bindings/ring.h"

#include "bindings/arguments.h"
#include "ops/ring.h"

namespace pyparallel::bindings {
namespace {

int64_t to_number(py::handle object, const char* op, const char* argument) {
  return to_int(object, [&] { return c10::str(Where{op, argument}); });
}

py::list to_list(const std::vector<int64_t>& numbers) {
  py::list list(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) list[i] = py::int_(numbers[i]);
  return list;
}

void ring_format(py::handle header, py::handle num_slots) {
  const at::Tensor& memory = to_tensor(header, {"ring_format", "header"});
  ops::format_ring(memory, to_number(num_slots, "ring_format", "num_slots"));
}

int64_t ring_claim(py::handle header, py::handle holder, py::handle fd) {
  const at::Tensor& memory = to_tensor(header, {"ring_claim", "header"});
  const int64_t claimer = to_number(holder, "ring_claim", "holder");
  to_number(fd, "ring_claim", "fd");
  return ops::claim_slot(memory, claimer);
}

bool ring_pass(py::handle header, py::handle slot, py::handle holder, py::handle to) {
  const at::Tensor& memory = to_tensor(header, {"ring_pass", "header"});
  const int64_t index = to_number(slot, "ring_pass", "slot");
  const int64_t giver = to_number(holder, "ring_pass", "holder");
  return ops::pass_slot(memory, index, giver, to_number(to, "ring_pass", "to"));
}

py::list ring_reclaim(py::handle header, py::handle holder) {
  const at::Tensor& memory = to_tensor(header, {"ring_reclaim", "header"});
  const int64_t lost = to_number(holder, "ring_reclaim", "holder");
  return to_list(ops::reclaim_slots(memory, lost));
}

py::list ring_holders(py::handle header) {
  return to_list(ops::slot_holders(to_tensor(header, {"ring_holders", "header"})));
}

}  // namespace

void define_ring(py::module_* module) {
  module->def("ring_format", &ring_format, py::arg("header"), py::arg("num_slots"));
  module->def("ring_claim", &ring_claim, py::arg("header"), py::arg("holder"),
              py::arg("fd"));
  module->def("ring_pass", &ring_pass, py::arg("header"), py::arg("slot"),
              py::arg("holder"), py::arg("to"));
  module->def("ring_reclaim", &ring_reclaim, py::arg("header"), py::arg("holder"));
  module->def("ring_holders", &ring_holders, py::arg("header"));
}

}  // namespace pyparallel::bindings
