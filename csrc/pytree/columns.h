#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

namespace pyparallel::pytree {

// Dicts read by columns. The values are borrowed: see Note: [no Python code in a walk]
// in pytree/walk.h, which holds until each was taken over or is no longer needed.
struct Columns {
  size_t num_dicts = 0;
  PyObject* lists = nullptr;    // a new dict of lists, each with num_dicts free places
  std::vector<PyObject*> each;  // these lists, in the order of the first dict's keys
  std::vector<PyObject*> values;  // in the order of dicts, and of keys in each

  PyObject* value(size_t dict, size_t column) const {
    return values[dict * each.size() + column];
  }

  // Puts the values of a column into its list.
  void fill(size_t column) const;
};

// Reads a list. False, perhaps with the Python error set, unless all its items are
// exactly dicts with equal keys in one order, each the very object, or an equal str.
bool read_columns(PyObject* dicts, Columns* columns);

}  // namespace pyparallel::pytree
