#include "bindings/image.h"

#include "bindings/arguments.h"
#include "bindings/run.h"
#include "ops/image.h"

namespace pyparallel::bindings {
namespace {

float to_float(py::handle object, const Where& where, size_t index) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    wrong_type(c10::str(where, "[", index, "]"), "a float", object);
  }
  return static_cast<float>(value);
}

std::vector<float> to_floats(py::handle object, const char* argument) {
  const Where where{"image_batch", argument};
  const py::tuple items = to_items(object, where, "a sequence of floats");
  std::vector<float> floats;
  floats.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    floats.push_back(to_float(item(items, i), where, i));
  }
  return floats;
}

bool to_bool(py::handle object, const char* argument) {
  if (!PyBool_Check(object.ptr())) {
    wrong_type(c10::str(Where{"image_batch", argument}), "a bool", object);
  }
  return object.ptr() == Py_True;
}

void image_batch(py::handle dst, py::handle images, py::handle mask, py::handle mean,
                 py::handle std, py::handle fill, py::handle swap_channels,
                 py::handle exact) {
  const at::Tensor& to = to_tensor(dst, {"image_batch", "dst"});
  const Tensors from(images, "image_batch", "images");
  const at::Tensor* mask_tensor = nullptr;
  if (!mask.is_none()) mask_tensor = &to_tensor(mask, {"image_batch", "mask"});
  const ops::ImageNormalization normalization{
      to_floats(mean, "mean"), to_floats(std, "std"), to_floats(fill, "fill"),
      to_bool(swap_channels, "swap_channels"), to_bool(exact, "exact")};
  ops::ImageBatchJob job(to, from.refs, mask_tensor, normalization);
  run(&job);
}

}  // namespace

void define_image(py::module_* module) {
  module->def("image_batch", &image_batch, py::arg("dst"), py::arg("images"),
              py::arg("mask"), py::arg("mean"), py::arg("std"), py::arg("fill"),
              py::arg("swap_channels"), py::arg("exact"));
}

}  // namespace pyparallel::bindings
