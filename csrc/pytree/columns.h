#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

namespace pyparallel::pytree {

// Dicts by columns. All references are borrowed: Note [no Python code in a walk] in
// pytree/walk.h applies until the caller owns those that it needs.
struct Columns {
  size_t num_dicts = 0;
  std::vector<PyObject*> keys;    // in the order of the first dict
  std::vector<PyObject*> values;  // ordered by key, then by dict

  // Returns the values of a key, `num_dicts` of them.
  PyObject* const* column(size_t key) const { return &values[key * num_dicts]; }
};

// Reads a list of dicts. Returns false unless all items are exactly dicts with the same
// keys in the same order. Keys are the same if they are one object or equal strings.
bool read_columns(PyObject* dicts, Columns* columns);

}  // namespace pyparallel::pytree
