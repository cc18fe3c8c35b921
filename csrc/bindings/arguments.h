// Converts Python arguments to C++ values, or throws a TypeError that names them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/error_format.h"
#include "ops/slab_plan.h"

namespace pyparallel::bindings {

namespace py = pybind11;
using ops::Where;

inline std::string type_name(py::handle object) {
  return py::str(py::type::of(object).attr("__name__"));
}

[[noreturn]] inline void wrong_type(const std::string& where, const char* rule,
                                    py::handle found) {
  TORCH_CHECK_TYPE(false, where, " must be ", rule, ", but is of type ",
                   type_name(found), ".");
}

// Valid while the Python object lives.
inline const at::Tensor& to_tensor(py::handle object, Where where) {
  if (!THPVariable_Check(object.ptr())) {
    wrong_type(c10::str(where), "a torch.Tensor", object);
  }
  return THPVariable_Unpack(object.ptr());
}

// Returns the items of a sequence as a tuple of its own, so that other threads cannot
// change it. Throws TypeError with `rule` if the object is no sequence.
inline py::tuple to_items(py::handle object, const Where& where, const char* rule) {
  PyObject* items = PySequence_Tuple(object.ptr());
  if (items == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    wrong_type(c10::str(where), rule, object);
  }
  return py::reinterpret_steal<py::tuple>(items);
}

inline py::handle item(const py::tuple& items, size_t i) {
  return PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
}

// Hidden, because its member of pybind11 is hidden.
struct __attribute__((visibility("hidden"))) Tensors {
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

// Returns true if all are of the classes Tensor and Parameter, not of subclasses.
inline bool are_exact(const Tensors& tensors) {
  return std::all_of(tensors.items.begin(), tensors.items.end(), [](py::handle each) {
    return THPVariable_CheckExact(each.ptr());
  });
}

// Returns a list of new Python tensors.
inline py::list to_tensors(std::vector<at::Tensor> tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* const wrapped = THPVariable_Wrap(std::move(tensors[i]));
    if (wrapped == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), wrapped);
  }
  return list;
}

// `place()` returns the name of the object for messages.
template <typename Place>
int64_t to_int(py::handle object, const Place& place) {
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
    ints.push_back(
        to_int(item(items, i), [&] { return c10::str(where, "[", i, "]"); }));
  }
  return ints;
}

// Returns names in lower case, as those of torch.device.type.
inline py::tuple to_names(const std::vector<c10::DeviceType>& types) {
  py::tuple names(types.size());
  for (size_t i = 0; i < types.size(); ++i) {
    names[i] = py::str(c10::DeviceTypeName(types[i], /*lower_case=*/true));
  }
  return names;
}

inline const ops::SlabPlan& to_plan(py::handle object, Where where) {
  if (!py::isinstance<ops::SlabPlan>(object)) {
    wrong_type(c10::str(where), "a SlabPlan", object);
  }
  return *object.cast<const ops::SlabPlan*>();
}

}  // namespace pyparallel::bindings
