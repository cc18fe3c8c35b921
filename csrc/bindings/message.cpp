#include "bindings/message.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <string_view>

#include "bindings/arguments.h"
#include "ops/tensor_bytes.h"
#include "pytree/message.h"

namespace pyparallel::bindings {
namespace {

class TensorLeaves final : public pytree::Leaves {
 public:
  explicit TensorLeaves(int64_t limit) : left_(limit) {}

  bool append(PyObject* leaf, std::string* message) override {
    // THPVariable_CheckExact accepts a Parameter, which is pickled with its class.
    return reinterpret_cast<PyObject*>(Py_TYPE(leaf)) == THPVariableClass &&
           ops::append_tensor(THPVariable_Unpack(leaf), &left_, message);
  }

  PyObject* take(std::string_view* rest) override {
    at::Tensor tensor = ops::take_tensor(rest);
    return tensor.defined() ? THPVariable_Wrap(std::move(tensor)) : nullptr;
  }

  int64_t left() const { return left_; }

 private:
  int64_t left_;
};

// The bytes of a Python object, which cannot change their size meanwhile.
class Bytes {
 public:
  explicit Bytes(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) == 0) return;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    wrong_type("decode: message", "a bytes-like object", object);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  std::string_view all() const {
    return {static_cast<const char*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

py::object encode(py::handle tree, py::handle limit) {
  const int64_t most = to_int(limit, [] { return std::string("encode: limit"); });
  TensorLeaves leaves(most);
  std::string message;
  if (!pytree::append_nest(tree.ptr(), &leaves, &message)) return py::none();
  return py::make_tuple(py::bytes(message), most - leaves.left());
}

py::object decode(py::handle message) {
  const Bytes bytes(message);
  std::string_view rest = bytes.all();
  TensorLeaves leaves(0);
  PyObject* tree = pytree::take_nest(&rest, &leaves);
  auto made = py::reinterpret_steal<py::object>(tree);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  TORCH_CHECK_VALUE(made && rest.empty(),
                    "decode: message must be bytes of encode, but is damaged.");
  return made;
}

}  // namespace

void define_message(py::module_* module) {
  module->def("encode", &encode, py::arg("tree"), py::arg("limit"));
  module->def("decode", &decode, py::arg("message"));
}

}  // namespace pyparallel::bindings
