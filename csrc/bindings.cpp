// Python's arguments to C++ values, and errors back. No decision is taken here.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string_view>
#include <vector>

#include "host/block_cache.h"
#include "ops/backend.h"
#include "ops/build_info.h"
#include "ops/host_memory.h"
#include "ops/pad_copy.h"
#include "ops/slab.h"
#include "ops/stack_equal.h"
#include "ops/wording.h"

namespace py = pybind11;

namespace pyparallel {
namespace {

using ops::Where;

// Copies of fewer bytes finish before another thread would have taken the lock.
constexpr int64_t kHoldGilBytes = 64 * 1024;

std::string type_name(py::handle object) {
  return py::str(py::type::of(object).attr("__name__"));
}

[[noreturn]] void wrong_type(const std::string& where, const char* rule,
                             py::handle found) {
  TORCH_CHECK_TYPE(false, where, " must be ", rule, ", but is of type ",
                   type_name(found), ".");
}

// Valid while the Python object lives.
const at::Tensor& to_tensor(py::handle object, const Where& where) {
  if (!THPVariable_Check(object.ptr())) {
    wrong_type(c10::str(where), "a torch.Tensor", object);
  }
  return THPVariable_Unpack(object.ptr());
}

// A tuple that no one else can change; TypeError with `rule` if there are no items.
py::tuple to_items(py::handle object, const Where& where, const char* rule) {
  PyObject* items = PySequence_Tuple(object.ptr());
  if (items == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    wrong_type(c10::str(where), rule, object);
  }
  return py::reinterpret_steal<py::tuple>(items);
}

py::handle item(const py::tuple& items, size_t i) {
  return PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
}

struct Tensors {
  Tensors(py::handle object, const char* op, const char* argument)
      : items(to_items(object, {op, argument}, "a sequence of tensors")) {
    refs.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      refs.push_back(
          &to_tensor(item(items, i), {op, argument, static_cast<int64_t>(i)}));
    }
  }

  py::tuple items;
  std::vector<const at::Tensor*> refs;  // into items
};

int64_t to_int(py::handle object, const Where& where, size_t i) {
  const auto place = [&] { return c10::str(where, "[", i, "]"); };
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!index) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    wrong_type(place(), "an int", object);
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  TORCH_CHECK_VALUE(overflow == 0, place(), " must fit in 64 bits, but is ",
                    std::string(py::str(index)), ".");
  return value;
}

template <typename Ints>
Ints to_ints(py::handle object, const Where& where) {
  const py::tuple items = to_items(object, where, "a sequence of ints");
  Ints ints;
  ints.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    ints.push_back(to_int(item(items, i), where, i));
  }
  return ints;
}

template <typename Job>
void run(Job* job) {
  if (job->nbytes() <= kHoldGilBytes) {
    job->run();
    return;
  }
  const py::gil_scoped_release unlocked;
  job->run();
}

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

void pack(py::handle dst, py::handle leaves, py::handle offsets) {
  const at::Tensor& to = to_tensor(dst, {"pack", "dst"});
  const Tensors from(leaves, "pack", "leaves");
  ops::PackJob job(to, from.refs,
                   to_ints<std::vector<int64_t>>(offsets, {"pack", "offsets"}));
  run(&job);
}

py::object stack_equal(py::handle samples) {
  const Tensors from(samples, "stack_equal", "samples");
  for (const py::handle sample : from.items) {
    if (!THPVariable_CheckExact(sample.ptr())) return py::none();
  }
  if (from.refs.empty() || !ops::are_equal(from.refs)) return py::none();
  const at::Tensor stacked = ops::new_stack(from.refs);
  if (static_cast<int64_t>(stacked.nbytes()) <= kHoldGilBytes) {
    ops::copy_equal(stacked, from.refs);
  } else {
    const std::string no_fill(stacked.itemsize(), 0);
    ops::PadCopyJob job(stacked, from.refs, no_fill);
    run(&job);
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(stacked));
}

std::vector<ops::ViewSpec> to_specs(py::handle offsets, py::handle dtypes,
                                    py::handle shapes) {
  const auto starts = to_ints<std::vector<int64_t>>(offsets, {"views", "offsets"});
  const py::tuple types = to_items(dtypes, {"views", "dtypes"}, "a sequence of dtypes");
  const py::tuple sizes = to_items(shapes, {"views", "shapes"}, "a sequence of shapes");
  const size_t num = starts.size();
  TORCH_CHECK_VALUE(types.size() == num && sizes.size() == num,
                    "views: offsets, dtypes and shapes must have the same length, but ",
                    "have ", num, ", ", types.size(), " and ", sizes.size(), ".");
  std::vector<ops::ViewSpec> specs;
  specs.reserve(num);
  for (size_t i = 0; i < num; ++i) {
    const py::handle type = item(types, i);
    const auto index = static_cast<int64_t>(i);
    if (!THPDtype_Check(type.ptr())) {
      wrong_type(c10::str(Where{"views", "dtypes", index}), "a torch.dtype", type);
    }
    specs.push_back(
        {starts[i], reinterpret_cast<THPDtype*>(type.ptr())->scalar_type,
         to_ints<c10::DimVector>(item(sizes, i), {"views", "shapes", index})});
  }
  return specs;
}

py::list views(py::handle slab, py::handle offsets, py::handle dtypes,
               py::handle shapes) {
  const at::Tensor& base = to_tensor(slab, {"views", "slab"});
  std::vector<at::Tensor> made =
      ops::make_views(base, to_specs(offsets, dtypes, shapes));
  py::list list(made.size());
  for (size_t i = 0; i < made.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i),
                    THPVariable_Wrap(std::move(made[i])));
  }
  return list;
}

py::object empty(py::handle shape, py::handle dtype) {
  const auto sizes = to_ints<c10::DimVector>(shape, {"empty", "shape"});
  if (!THPDtype_Check(dtype.ptr())) wrong_type("empty: dtype", "a torch.dtype", dtype);
  const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  return py::reinterpret_steal<py::object>(
      THPVariable_Wrap(ops::new_host_tensor(sizes, type)));
}

py::tuple cache_info() {
  const host::CacheInfo info = host::cache_info();
  return py::make_tuple(info.in_use, info.cached, info.limit, info.hits, info.misses);
}

void bound_cache(int64_t limit, double idle_seconds) {
  const auto patience = std::chrono::duration<double>(idle_seconds);
  host::bound_cache(limit,
                    std::chrono::duration_cast<std::chrono::milliseconds>(patience));
}

py::tuple devices() {
  py::list names;
  for (const c10::DeviceType type : ops::registered_devices()) {
    names.append(c10::DeviceTypeName(type, /*lower_case=*/true));
  }
  return py::tuple(names);
}

py::dict build_info() {
  py::dict info;
  for (const auto& [name, value] : ops::build_info()) info[name.c_str()] = value;
  return info;
}

// Torch's own translation may add a C++ backtrace; a message here is one sentence.
void translate(std::exception_ptr caught) {
  try {
    std::rethrow_exception(caught);
  } catch (const c10::ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& error) {
    const py::object type = py::module_::import("torch").attr("OutOfMemoryError");
    PyErr_SetString(type.ptr(), error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace
}  // namespace pyparallel

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace pp = pyparallel;
  py::register_local_exception_translator(&pp::translate);
  module.doc() = "Native kernels of pyparallel; the contract is in _C.pyi.";
  module.def("pad_copy", &pp::pad_copy, py::arg("dst"), py::arg("samples"),
             py::arg("fills"), py::arg("starts") = py::none(),
             py::arg("mask") = py::none());
  module.def("stack_equal", &pp::stack_equal, py::arg("samples"));
  module.def("pack", &pp::pack, py::arg("dst"), py::arg("leaves"), py::arg("offsets"));
  module.def("views", &pp::views, py::arg("slab"), py::arg("offsets"),
             py::arg("dtypes"), py::arg("shapes"));
  module.def("empty", &pp::empty, py::arg("shape"), py::arg("dtype"));
  module.def("cache_info", &pp::cache_info);
  module.def("bound_cache", &pp::bound_cache, py::arg("limit"),
             py::arg("idle_seconds"));
  module.def("clear_cache", &pp::host::clear_cache,
             py::call_guard<py::gil_scoped_release>());
  module.def("devices", &pp::devices);
  module.def("build_info", &pp::build_info);
}
