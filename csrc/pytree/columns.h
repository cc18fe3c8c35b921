#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

namespace pyparallel::pytree {

// Dicts by columns. The values are borrowed references: Note [no Python code in a walk]
// in pytree/walk.h applies until they are in their lists or no longer needed.
struct Columns {
  size_t num_dicts = 0;
  PyObject* lists = nullptr;  // a new dict of lists with num_dicts empty places each
  std::vector<PyObject*>
      each;  // these lists, in the order of the keys of the first dict
  std::vector<PyObject*> values;  // ordered by dict, then by key

  PyObject* value(size_t dict, size_t column) const {
    return values[dict * each.size() + column];
  }

  // Puts the values of a column into its list.
  void fill(size_t column) const;
};

// Reads a list of dicts. Returns false, perhaps with a Python error set, unless all
// items are exactly dicts with the same keys in the same order. Keys are the same if
// they are one object or equal strings.
bool read_columns(PyObject* dicts, Columns* columns);

}  // namespace pyparallel::pytree
