#include "bindings/leaves.h"

#include <algorithm>

#include "bindings/arguments.h"
#include "ops/pack.h"
#include "ops/snapshot.h"
#include "pytree/walk.h"

namespace pyparallel::bindings {
namespace {

constexpr int64_t kMostRoots = 2;

pytree::Roots to_roots(py::handle object) {
  const int64_t roots = to_int(object, [] { return std::string("flatten: roots"); });
  TORCH_CHECK_VALUE(roots >= 0 && roots <= kMostRoots,
                    "flatten: roots must be between 0 and ", kMostRoots, ", but is ",
                    roots, ".");
  return static_cast<pytree::Roots>(roots);
}

void check_set(py::handle leaf_types, const char* where) {
  if (!PySet_Check(leaf_types.ptr())) wrong_type(where, "a set", leaf_types);
}

py::tuple to_classes(const std::vector<PyTypeObject*>& types) {
  py::tuple classes(types.size());
  for (size_t i = 0; i < types.size(); ++i) {
    classes[i] = py::handle(reinterpret_cast<PyObject*>(types[i]));
  }
  return classes;
}

py::object flatten(py::handle tree, py::handle leaf_types, py::handle roots) {
  check_set(leaf_types, "flatten: leaf_types");
  std::optional<pytree::Flat> flat =
      pytree::flatten(tree.ptr(), leaf_types.ptr(), to_roots(roots));
  if (!flat) return py::none();
  if (flat->leaves == nullptr) throw py::error_already_set();
  const auto leaves = py::reinterpret_steal<py::list>(flat->leaves);
  return py::make_tuple(leaves, std::move(flat->structure), to_classes(flat->classes));
}

bool is_tensor(py::handle object) { return THPVariable_CheckExact(object.ptr()); }

py::tuple to_leaves(py::handle leaves, const char* op) {
  return to_items(leaves, {op, "leaves"}, "a sequence");
}

py::list select_tensors(py::handle leaves) {
  py::list tensors;
  for (const py::handle leaf : to_leaves(leaves, "select_tensors")) {
    if (is_tensor(leaf)) tensors.append(leaf);
  }
  return tensors;
}

py::list replace_tensors(py::handle leaves, py::handle tensors) {
  const py::tuple old = to_leaves(leaves, "replace_tensors");
  const py::tuple fresh =
      to_items(tensors, {"replace_tensors", "tensors"}, "a sequence of tensors");
  py::list replaced(old.size());
  size_t num_tensors = 0;
  for (size_t i = 0; i < old.size(); ++i) {
    py::handle leaf = item(old, i);
    if (is_tensor(leaf) && num_tensors++ < fresh.size()) {
      leaf = item(fresh, num_tensors - 1);
    }
    PyList_SET_ITEM(replaced.ptr(), static_cast<Py_ssize_t>(i), leaf.inc_ref().ptr());
  }
  TORCH_CHECK_VALUE(num_tensors == fresh.size(), "replace_tensors: tensors must have ",
                    num_tensors, " entries, as leaves has tensors, but has ",
                    fresh.size(), ".");
  return replaced;
}

py::list find_unpackable(py::handle tensors) {
  const Tensors found(tensors, "find_unpackable", "tensors");
  py::list indices;
  for (size_t i = 0; i < found.refs.size(); ++i) {
    if (!is_tensor(item(found.items, i)) || !ops::can_pack(*found.refs[i])) {
      indices.append(i);
    }
  }
  return indices;
}

bool are_on_one_device(py::handle tensors) {
  const Tensors found(tensors, "are_on_one_device", "tensors");
  return are_exact(found) && ops::are_on_one_device(found.refs);
}

// Returns true for an object that needs no copy on the host.
bool is_compact(py::handle leaf, bool on_cpu) {
  if (!is_tensor(leaf)) return true;
  const at::Tensor& tensor = THPVariable_Unpack(leaf.ptr());
  return ops::is_compact(tensor) && (!on_cpu || tensor.is_cpu());
}

bool are_compact(py::handle leaves, bool on_cpu) {
  const py::tuple items = to_leaves(leaves, "are_compact");
  return std::all_of(items.begin(), items.end(),
                     [on_cpu](py::handle leaf) { return is_compact(leaf, on_cpu); });
}

py::object copy_compact(py::handle tree, py::handle leaf_types, py::handle roots,
                        bool on_cpu) {
  check_set(leaf_types, "copy_compact: leaf_types");
  const std::optional<pytree::Copied> copied = pytree::copy_containers(
      tree.ptr(), leaf_types.ptr(), to_roots(roots),
      [on_cpu](PyObject* leaf) { return is_compact(leaf, on_cpu); });
  if (!copied) return py::none();
  if (copied->tree == nullptr) throw py::error_already_set();
  return py::make_tuple(py::reinterpret_steal<py::object>(copied->tree),
                        to_classes(copied->classes));
}

}  // namespace

void define_leaves(py::module_* module) {
  module->def("flatten", &flatten, py::arg("tree"), py::arg("leaf_types"),
              py::arg("roots") = 0);
  module->def("select_tensors", &select_tensors, py::arg("leaves"));
  module->def("replace_tensors", &replace_tensors, py::arg("leaves"),
              py::arg("tensors"));
  module->def("find_unpackable", &find_unpackable, py::arg("tensors"));
  module->def("are_on_one_device", &are_on_one_device, py::arg("tensors"));
  module->def("copy_compact", &copy_compact, py::arg("tree"), py::arg("leaf_types"),
              py::arg("roots"), py::arg("on_cpu"));
  module->def("are_compact", &are_compact, py::arg("leaves"), py::arg("on_cpu"));
}

}  // namespace pyparallel::bindings
