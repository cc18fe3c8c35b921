#include "pytree/message.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace pyparallel::pytree {
namespace {

// A cycle would overflow the C stack.
constexpr int kMaxNesting = 200;

struct Release {
  void operator()(PyObject* object) const { Py_XDECREF(object); }
};
// A reference that is released if a leaf throws.
using Owned = std::unique_ptr<PyObject, Release>;

template <typename Number>
void append(Number number, std::string* message) {
  message->append(reinterpret_cast<const char*>(&number), sizeof number);
}

template <typename Number>
bool take(std::string_view* rest, Number* number) {
  if (rest->size() < sizeof *number) return false;
  memcpy(number, rest->data(), sizeof *number);
  rest->remove_prefix(sizeof *number);
  return true;
}

class NestWriter {
 public:
  NestWriter(Leaves* leaves, std::string* message)
      : leaves_(leaves), message_(message) {}

  bool visit(PyObject* object, int depth) {
    if (PyDict_CheckExact(object)) return depth < kMaxNesting && dict(object, depth);
    if (PyList_CheckExact(object)) {
      return items('l', object, PySequence_Fast_ITEMS(object), depth);
    }
    if (PyTuple_CheckExact(object)) {
      return items('t', object, PySequence_Fast_ITEMS(object), depth);
    }
    if (value(object)) return true;
    note(object);
    message_->push_back('x');
    return leaves_->append(object, message_);
  }

  // Returns true if a container or a leaf was visited twice.
  bool has_shared() {
    std::sort(shared_.begin(), shared_.end());
    return std::adjacent_find(shared_.begin(), shared_.end()) != shared_.end();
  }

 private:
  // An object that occurs twice has at least two references.
  void note(PyObject* object) {
    if (Py_REFCNT(object) > 1) shared_.push_back(object);
  }

  bool sized(char tag, Py_ssize_t size) {
    if (size > static_cast<Py_ssize_t>(UINT32_MAX)) return false;
    message_->push_back(tag);
    append(static_cast<uint32_t>(size), message_);
    return true;
  }

  bool bytes(char tag, const char* data, Py_ssize_t size) {
    if (data == nullptr) PyErr_Clear();  // half of a surrogate pair
    if (data == nullptr || !sized(tag, size)) return false;
    message_->append(data, static_cast<size_t>(size));
    return true;
  }

  bool text(PyObject* object) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(object, &size);
    return bytes('s', data, size);
  }

  bool integer(PyObject* object) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
    message_->push_back('i');
    append(number, message_);
    return overflow == 0;
  }

  // Appends an object that cannot change and contains no others.
  bool value(PyObject* object) {
    if (PyUnicode_CheckExact(object)) return text(object);
    if (PyLong_CheckExact(object)) return integer(object);
    if (PyBytes_CheckExact(object)) {
      return bytes('b', PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object));
    }
    if (PyFloat_CheckExact(object)) {
      message_->push_back('f');
      append(PyFloat_AS_DOUBLE(object), message_);
      return true;
    }
    const bool is_bool = object == Py_True || object == Py_False;
    if (!is_bool && object != Py_None) return false;
    message_->push_back(object == Py_None ? 'N' : object == Py_True ? 'T' : 'F');
    return true;
  }

  bool items(char tag, PyObject* sequence, PyObject** each, int depth) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence);
    if (depth >= kMaxNesting || !sized(tag, size)) return false;
    if (size > 0) note(sequence);  // the empty tuple is one object everywhere
    return std::all_of(each, each + size,
                       [&](PyObject* item) { return visit(item, depth + 1); });
  }

  bool dict(PyObject* dict, int depth) {
    note(dict);
    if (!sized('d', PyDict_GET_SIZE(dict))) return false;
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    while (PyDict_Next(dict, &at, &key, &item)) {
      const bool is_plain = PyUnicode_CheckExact(key) || PyLong_CheckExact(key);
      if (!is_plain || !value(key) || !visit(item, depth + 1)) return false;
    }
    return true;
  }

  Leaves* leaves_;
  std::string* message_;
  std::vector<PyObject*> shared_;  // that may occur twice
};

class NestReader {
 public:
  NestReader(std::string_view* rest, Leaves* leaves) : rest_(rest), leaves_(leaves) {}

  PyObject* next(int depth) {
    char tag = 0;
    if (depth > kMaxNesting || !take(rest_, &tag)) return nullptr;
    switch (tag) {
      case 'x':
        return leaves_->take(rest_);
      case 'd':
        return dict(depth);
      case 'l':
      case 't':
        return items(tag == 'l', depth);
      case 's':
      case 'b':
        return text(tag == 's');
      default:
        return value(tag);
    }
  }

 private:
  // Each item takes at least one byte, so a damaged size cannot allocate much.
  bool take_size(uint32_t* size) { return take(rest_, size) && *size <= rest_->size(); }

  PyObject* value(char tag) {
    int64_t integer = 0;
    double real = 0;
    if (tag == 'i' && take(rest_, &integer)) return PyLong_FromLongLong(integer);
    if (tag == 'f' && take(rest_, &real)) return PyFloat_FromDouble(real);
    PyObject* const known = tag == 'N'   ? Py_None
                            : tag == 'T' ? Py_True
                            : tag == 'F' ? Py_False
                                         : nullptr;
    Py_XINCREF(known);
    return known;
  }

  PyObject* text(bool is_str) {
    uint32_t size = 0;
    if (!take_size(&size)) return nullptr;
    const char* const data = rest_->data();
    rest_->remove_prefix(size);
    return is_str ? PyUnicode_DecodeUTF8(data, size, nullptr)
                  : PyBytes_FromStringAndSize(data, size);
  }

  PyObject* items(bool is_list, int depth) {
    uint32_t size = 0;
    if (!take_size(&size)) return nullptr;
    Owned items(is_list ? PyList_New(size) : PyTuple_New(size));
    for (uint32_t i = 0; items != nullptr && i < size; ++i) {
      PyObject* const item = next(depth + 1);
      if (item == nullptr) return nullptr;
      if (is_list) {
        PyList_SET_ITEM(items.get(), i, item);
      } else {
        PyTuple_SET_ITEM(items.get(), i, item);
      }
    }
    return items.release();
  }

  PyObject* dict(int depth) {
    uint32_t size = 0;
    if (!take_size(&size)) return nullptr;
    Owned dict(PyDict_New());
    for (uint32_t i = 0; dict != nullptr && i < size; ++i) {
      const Owned key(next(depth + 1));
      if (key == nullptr) return nullptr;
      if (!PyUnicode_CheckExact(key.get()) && !PyLong_CheckExact(key.get())) {
        return nullptr;
      }
      const Owned item(next(depth + 1));
      if (item == nullptr) return nullptr;
      if (PyDict_SetItem(dict.get(), key.get(), item.get()) != 0) return nullptr;
    }
    return dict.release();
  }

  std::string_view* rest_;
  Leaves* leaves_;
};

}  // namespace

bool append_nest(PyObject* tree, Leaves* leaves, std::string* message) {
  NestWriter writer(leaves, message);
  return writer.visit(tree, 0) && !writer.has_shared();
}

PyObject* take_nest(std::string_view* message, Leaves* leaves) {
  return NestReader(message, leaves).next(0);
}

}  // namespace pyparallel::pytree
