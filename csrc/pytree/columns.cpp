#include "pytree/columns.h"

namespace pyparallel::pytree {
namespace {

// Returns true only for certain equality. Python code compares other keys.
bool are_same(PyObject* a, PyObject* b) {
  return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) &&
                    PyUnicode_Compare(a, b) == 0);
}

// Replaces every value of `lists` by a list, and adds it to `each`.
bool make_lists(Columns* columns) {
  const auto size = static_cast<Py_ssize_t>(columns->num_dicts);
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  while (PyDict_Next(columns->lists, &at, &key, nullptr)) {
    PyObject* list = PyList_New(size);
    // A new value under an existing key does not disturb the iteration.
    const bool good = list != nullptr && PyDict_SetItem(columns->lists, key, list) == 0;
    Py_XDECREF(list);
    if (!good) return false;
    columns->each.push_back(list);
  }
  return true;
}

bool read_values(PyObject* dict, Columns* columns) {
  const auto size = static_cast<Py_ssize_t>(columns->each.size());
  if (!PyDict_CheckExact(dict) || PyDict_GET_SIZE(dict) != size) return false;
  Py_ssize_t at = 0;
  Py_ssize_t expected_at = 0;
  PyObject* key = nullptr;
  PyObject* expected = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(columns->lists, &expected_at, &expected, nullptr)) {
    if (!PyDict_Next(dict, &at, &key, &value) || !are_same(key, expected)) {
      return false;
    }
    columns->values.push_back(value);
  }
  return true;
}

}  // namespace

void Columns::fill(size_t column) const {
  for (size_t i = 0; i < num_dicts; ++i) {
    PyObject* item = value(i, column);
    Py_INCREF(item);
    PyList_SET_ITEM(each[column], static_cast<Py_ssize_t>(i), item);
  }
}

bool read_columns(PyObject* dicts, Columns* columns) {
  columns->num_dicts = static_cast<size_t>(PyList_GET_SIZE(dicts));
  if (columns->num_dicts == 0) return false;
  PyObject* first = PyList_GET_ITEM(dicts, 0);
  if (!PyDict_CheckExact(first)) return false;
  columns->lists = PyDict_Copy(first);
  if (columns->lists == nullptr || !make_lists(columns)) return false;
  columns->values.reserve(columns->num_dicts * columns->each.size());
  // The new objects may have started a garbage collection, which runs any Python code.
  if (static_cast<size_t>(PyList_GET_SIZE(dicts)) != columns->num_dicts) return false;
  for (size_t i = 0; i < columns->num_dicts; ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts, static_cast<Py_ssize_t>(i));
    if (!read_values(dict, columns)) return false;
  }
  return true;
}

}  // namespace pyparallel::pytree
