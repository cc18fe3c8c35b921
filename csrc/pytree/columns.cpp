#include "pytree/columns.h"

namespace pyparallel::pytree {
namespace {

// Returns true only for certain equality. Python code compares other keys.
bool are_same(PyObject* a, PyObject* b) {
  return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) &&
                    PyUnicode_Compare(a, b) == 0);
}

bool is_dict_of(PyObject* object, size_t size) {
  return PyDict_CheckExact(object) &&
         static_cast<size_t>(PyDict_GET_SIZE(object)) == size;
}

// Reads the values of dict `i`, which has as many keys as the first one.
bool read_values(PyObject* dict, size_t i, Columns* columns) {
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  PyObject** place = &columns->values[i];
  for (PyObject* expected : columns->keys) {
    if (!PyDict_Next(dict, &at, &key, &value) || !are_same(key, expected)) {
      return false;
    }
    *place = value;
    place += columns->num_dicts;
  }
  return true;
}

}  // namespace

bool read_columns(PyObject* dicts, Columns* columns) {
  columns->num_dicts = static_cast<size_t>(PyList_GET_SIZE(dicts));
  if (columns->num_dicts == 0) return false;
  PyObject* first = PyList_GET_ITEM(dicts, 0);
  if (!PyDict_CheckExact(first)) return false;
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  while (PyDict_Next(first, &at, &key, nullptr)) columns->keys.push_back(key);
  const size_t num_keys = columns->keys.size();
  columns->values.resize(num_keys * columns->num_dicts);
  for (size_t i = 0; i < columns->num_dicts; ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts, static_cast<Py_ssize_t>(i));
    if (!is_dict_of(dict, num_keys)) return false;
    if (num_keys != 0 && !read_values(dict, i, columns)) return false;
  }
  return true;
}

}  // namespace pyparallel::pytree
