// Defines the extension module. Converts Python arguments to C++ values and C++ errors
// to Python exceptions; makes no other decisions.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <string_view>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/image.h"
#include "bindings/leaves.h"
#include "bindings/memory.h"
#include "bindings/message.h"
#include "bindings/ring.h"
#include "bindings/run.h"
#include "bindings/transfer.h"
#include "bindings/values.h"
#include "ops/backend.h"
#include "ops/build_info.h"
#include "ops/generator.h"
#include "ops/pack.h"
#include "ops/pad_copy.h"
#include "ops/stack_equal.h"
#include "pytree/columns.h"

namespace py = pybind11;

namespace pyparallel {
namespace {

using bindings::item;
using bindings::kHoldGilBytes;
using bindings::run;
using bindings::Tensors;
using bindings::to_ints;
using bindings::to_items;
using bindings::to_plan;
using bindings::to_tensor;
using bindings::wrong_type;
using ops::SlabPlan;
using ops::Where;

std::vector<c10::DimVector> to_starts(py::handle starts) {
  const py::tuple rows =
      to_items(starts, {"pad_copy", "starts"}, "a sequence of sequences of ints");
  std::vector<c10::DimVector> made;
  made.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const Where where{"pad_copy", "starts", static_cast<int64_t>(i)};
    made.push_back(to_ints<c10::DimVector>(item(rows, i), where));
  }
  return made;
}

void pad_copy(py::handle dst, py::handle samples, py::handle fills, py::handle starts,
              py::handle mask) {
  const at::Tensor& to = to_tensor(dst, {"pad_copy", "dst"});
  const Tensors from(samples, "pad_copy", "samples");
  if (!PyBytes_Check(fills.ptr())) wrong_type("pad_copy: fills", "bytes", fills);
  const std::string_view bytes(PyBytes_AS_STRING(fills.ptr()),
                               static_cast<size_t>(PyBytes_GET_SIZE(fills.ptr())));
  ops::PadPlaces places;
  if (!starts.is_none()) places.starts = to_starts(starts);
  if (!mask.is_none()) places.mask = &to_tensor(mask, {"pad_copy", "mask"});
  ops::PadCopyJob job(to, from.refs, bytes, places);
  run(&job);
}

// The native pad_copy needs no short cut: see _C.pyi.
py::none pad_small_batch(py::handle, py::handle, py::handle) { return {}; }

SlabPlan plan_slab(py::handle leaves) {
  return SlabPlan(Tensors(leaves, "plan_slab", "leaves").refs);
}

void pack(py::handle dst, py::handle leaves, py::handle plan) {
  const at::Tensor& to = to_tensor(dst, {"pack", "dst"});
  const Tensors from(leaves, "pack", "leaves");
  ops::PackJob job(to, from.refs, to_plan(plan, {"pack", "plan"}));
  run(&job);
}

py::list views(py::handle slab, py::handle plan) {
  const at::Tensor& base = to_tensor(slab, {"views", "slab"});
  return bindings::to_tensors(ops::make_views(base, to_plan(plan, {"views", "plan"})));
}

py::object memory_of(py::handle tensor) {
  const at::Tensor& of = to_tensor(tensor, {"memory_of", "tensor"});
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(ops::memory_of(of)));
}

void forbid_use(py::handle tensors, const std::string& message) {
  for (const at::Tensor* tensor : Tensors(tensors, "forbid_use", "tensors").refs) {
    ops::forbid_use(*tensor, message);
  }
}

// Returns the result of stack_equal for the values of a column. Returns an undefined
// tensor if stack_equal would return None or release the GIL.
at::Tensor stack_column(PyObject* const* values, size_t num_values) {
  std::vector<const at::Tensor*> refs;
  refs.reserve(num_values);
  const PyTypeObject* exact = nullptr;  // the last class that was found to be exact
  for (size_t i = 0; i < num_values; ++i) {
    PyObject* object = values[i];
    if (Py_TYPE(object) != exact) {
      if (!THPVariable_CheckExact(object)) return {};
      exact = Py_TYPE(object);
    }
    refs.push_back(&THPVariable_Unpack(object));
  }
  const std::vector<const uint8_t*> sources = ops::equal_sources(refs);
  if (sources.empty()) return {};
  const auto num_refs = static_cast<int64_t>(refs.size());
  if (static_cast<int64_t>(refs[0]->nbytes()) > kHoldGilBytes / num_refs) return {};
  const at::Tensor stacked = ops::new_stack(refs);
  ops::copy_equal(stacked, sources);
  return stacked;
}

// The values of one key of all dicts: stacked, or as they are.
struct __attribute__((visibility("hidden"))) Column {
  py::object key;
  at::Tensor stacked;
  std::vector<py::object> values;

  Column(const pytree::Columns& columns, size_t i, bool stack)
      : key(py::reinterpret_borrow<py::object>(columns.keys[i])) {
    PyObject* const* found = columns.column(i);
    if (stack) stacked = stack_column(found, columns.num_dicts);
    if (stacked.defined()) return;
    values.reserve(columns.num_dicts);
    for (size_t at = 0; at < columns.num_dicts; ++at) {
      values.push_back(py::reinterpret_borrow<py::object>(found[at]));
    }
  }

  // Returns the tensor, or a list of the values, and leaves nothing behind.
  py::object take() {
    if (stacked.defined()) {
      PyObject* const wrapped = THPVariable_Wrap(std::move(stacked));
      if (wrapped == nullptr) throw py::error_already_set();
      return py::reinterpret_steal<py::object>(wrapped);
    }
    py::list list(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i),
                      values[i].release().ptr());
    }
    return list;
  }
};

py::object columns(py::handle dicts, bool stack) {
  if (!PyList_CheckExact(dicts.ptr())) wrong_type("columns: dicts", "a list", dicts);
  pytree::Columns found;
  if (!pytree::read_columns(dicts.ptr(), &found)) return py::none();
  std::vector<Column> owned;
  owned.reserve(found.keys.size());
  for (size_t i = 0; i < found.keys.size(); ++i) owned.emplace_back(found, i, stack);
  // No object is borrowed any more, so Python objects may be made.
  py::dict result;
  for (Column& column : owned) {
    const py::object value = column.take();
    if (PyDict_SetItem(result.ptr(), column.key.ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return result;
}

py::object stack_equal(py::handle samples) {
  const Tensors from(samples, "stack_equal", "samples");
  for (const py::handle sample : from.items) {
    if (!THPVariable_CheckExact(sample.ptr())) return py::none();
  }
  if (from.refs.empty()) return py::none();
  const std::vector<const uint8_t*> sources = ops::equal_sources(from.refs);
  if (sources.empty()) return py::none();
  const at::Tensor stacked = ops::new_stack(from.refs);
  if (static_cast<int64_t>(stacked.nbytes()) <= kHoldGilBytes) {
    ops::copy_equal(stacked, sources);
  } else {
    const std::string no_fill(stacked.itemsize(), 0);
    ops::PadCopyJob job(stacked, from.refs, no_fill);
    run(&job);
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(stacked));
}

py::tuple devices() { return bindings::to_names(ops::registered_devices()); }

py::dict build_info() {
  py::dict info;
  for (const auto& [name, value] : ops::build_info()) info[name.c_str()] = value;
  return info;
}

// Uses torch's handler, which knows the classes of torch's errors: a CUDA error becomes
// a torch.AcceleratorError with its error_code, if torch has that class.
void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(caught);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(caught);
  }
}

}  // namespace
}  // namespace pyparallel

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace pp = pyparallel;
  py::register_local_exception_translator(&pp::translate);
  module.doc() = "Native kernels of pyparallel; the contract is in _C.pyi.";
  pp::bindings::define_values(&module);
  pp::bindings::define_image(&module);
  pp::bindings::define_leaves(&module);
  pp::bindings::define_memory(&module);
  pp::bindings::define_message(&module);
  pp::ops::hold_generator_in_forks();
  pp::bindings::define_ring(&module);
  pp::bindings::define_transfer(&module);
  module.def("pad_copy", &pp::pad_copy, py::arg("dst"), py::arg("samples"),
             py::arg("fills"), py::arg("starts") = py::none(),
             py::arg("mask") = py::none());
  module.def("pad_small_batch", &pp::pad_small_batch, py::arg("samples"),
             py::arg("pad_dims"), py::arg("values"));
  module.def("stack_equal", &pp::stack_equal, py::arg("samples"));
  module.def("plan_slab", &pp::plan_slab, py::arg("leaves"));
  module.def("pack", &pp::pack, py::arg("dst"), py::arg("leaves"), py::arg("plan"));
  module.def("views", &pp::views, py::arg("slab"), py::arg("plan"));
  module.def("memory_of", &pp::memory_of, py::arg("tensor"));
  module.def("forbid_use", &pp::forbid_use, py::arg("tensors"), py::arg("message"));
  module.def("columns", &pp::columns, py::arg("dicts"), py::arg("stack"));
  module.def("devices", &pp::devices);
  module.def("build_info", &pp::build_info);
}
