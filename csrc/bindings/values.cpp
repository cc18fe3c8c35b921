#include "bindings/values.h"

#include <c10/util/DimVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "bindings/arguments.h"
#include "ops/slab_plan.h"
#include "pytree/walk.h"

namespace pyparallel::bindings {
namespace {

using ops::SlabPlan;
using pytree::Structure;

SlabPlan new_plan(py::handle offsets, py::handle shapes, py::handle dtypes,
                  py::handle nbytes) {
  const auto starts = to_ints<std::vector<int64_t>>(offsets, {"SlabPlan", "offsets"});
  const py::tuple sizes =
      to_items(shapes, {"SlabPlan", "shapes"}, "a sequence of shapes");
  const py::tuple types =
      to_items(dtypes, {"SlabPlan", "dtypes"}, "a sequence of dtypes");
  const size_t num = starts.size();
  TORCH_CHECK_VALUE(
      sizes.size() == num && types.size() == num,
      "SlabPlan: offsets, shapes and dtypes must have the same length, but have ", num,
      ", ", sizes.size(), " and ", types.size(), ".");
  std::vector<ops::PlannedLeaf> leaves;
  leaves.reserve(num);
  for (size_t i = 0; i < num; ++i) {
    const py::handle type = item(types, i);
    const auto index = static_cast<int64_t>(i);
    if (!THPDtype_Check(type.ptr())) {
      wrong_type(c10::str(Where{"SlabPlan", "dtypes", index}), "a torch.dtype", type);
    }
    leaves.push_back(
        {starts[i], 0, reinterpret_cast<THPDtype*>(type.ptr())->scalar_type,
         to_ints<c10::DimVector>(item(sizes, i), {"SlabPlan", "shapes", index})});
  }
  return SlabPlan(std::move(leaves),
                  to_int(nbytes, [] { return std::string("SlabPlan: nbytes"); }));
}

// Returns the attributes of a plan in the order of the arguments of new_plan.
py::tuple plan_fields(const SlabPlan& plan) {
  const size_t num = plan.leaves().size();
  py::tuple offsets(num), shapes(num), dtypes(num);
  for (size_t i = 0; i < num; ++i) {
    const ops::PlannedLeaf& leaf = plan.leaves()[i];
    py::tuple shape(leaf.shape.size());
    for (size_t d = 0; d < leaf.shape.size(); ++d) shape[d] = leaf.shape[d];
    offsets[i] = leaf.offset;
    shapes[i] = std::move(shape);
    auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(leaf.dtype));
    dtypes[i] = py::reinterpret_borrow<py::object>(dtype);
  }
  return py::make_tuple(offsets, shapes, dtypes, plan.nbytes());
}

py::object unflatten(const Structure& structure, py::handle leaves) {
  PyObject* tree = structure.unflatten(leaves.ptr());
  if (tree == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(tree);
}

// Defines equality and hash by value, as for a frozen dataclass.
template <typename Class>
void define_value(py::class_<Class>* cls) {
  cls->def("__eq__", [](const Class& self, py::handle other) -> py::object {
    if (!py::isinstance<Class>(other))
      return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    return py::bool_(self == *other.cast<const Class*>());
  });
  cls->def("__hash__", &Class::hash);
}

void define_structure(py::module_* module) {
  py::class_<Structure> cls(*module, "Structure");
  define_value(&cls);
  cls.def("unflatten", &unflatten, py::arg("leaves"));
  cls.def_property_readonly("num_leaves", &Structure::num_leaves);
  cls.def("__repr__", [](const Structure& self) {
    const py::tuple stars = py::make_tuple(py::ellipsis());
    const py::object tree = unflatten(self, stars * py::int_(self.num_leaves()));
    return py::str("Structure({!r})").format(tree);
  });
}

void define_plan(py::module_* module) {
  py::class_<SlabPlan> cls(*module, "SlabPlan");
  define_value(&cls);
  cls.def(py::init(&new_plan), py::arg("offsets"), py::arg("shapes"), py::arg("dtypes"),
          py::arg("nbytes"));
  const char* names[] = {"offsets", "shapes", "dtypes"};
  for (size_t i = 0; i < 3; ++i) {
    cls.def_property_readonly(names[i], [i](const SlabPlan& self) -> py::object {
      return plan_fields(self)[i];
    });
  }
  cls.def_property_readonly("nbytes", &SlabPlan::nbytes);
  cls.def("__reduce__", [](const py::object& self) {
    return py::make_tuple(py::type::of(self), plan_fields(*self.cast<SlabPlan*>()));
  });
  cls.def("__repr__", [](const SlabPlan& self) {
    const py::str form("SlabPlan(offsets={!r}, shapes={!r}, dtypes={!r}, nbytes={!r})");
    return form.format(*plan_fields(self));
  });
}

}  // namespace

void define_values(py::module_* module) {
  define_plan(module);
  define_structure(module);
}

}  // namespace pyparallel::bindings
