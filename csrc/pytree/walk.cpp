#include "pytree/walk.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace pyparallel::pytree {
namespace {

// Deeper nests are left to optree: a cycle would overflow the C stack.
constexpr int kMaxDepth = 200;
constexpr size_t kNumRecent = 16;

// Returns true if the keys can be sorted without Python code: all str, or all int.
bool are_simple(PyObject* const* keys, size_t size) {
  if (size == 0) return true;
  PyTypeObject* const type = Py_TYPE(keys[0]);
  if (type != &PyUnicode_Type && type != &PyLong_Type) return false;
  return std::all_of(keys, keys + size,
                     [type](PyObject* key) { return Py_TYPE(key) == type; });
}

bool is_less(PyObject* a, PyObject* b) {
  if (PyUnicode_CheckExact(a)) return PyUnicode_Compare(a, b) < 0;
  return PyObject_RichCompareBool(a, b, Py_LT) == 1;
}

bool are_equal(PyObject* a, PyObject* b) {
  return a == b || (Py_TYPE(a) == Py_TYPE(b) && !is_less(a, b) && !is_less(b, a));
}

// Maps the sorted place of a key to its place of insertion; empty if the keys are
// sorted.
std::vector<size_t> sorted_order(PyObject* const* keys, size_t size) {
  if (std::is_sorted(keys, keys + size, is_less)) return {};
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [keys](size_t a, size_t b) { return is_less(keys[a], keys[b]); });
  return order;
}

// Returns false if a metaclass may define the hash of a class in Python.
bool is_simple_class(PyTypeObject* type) {
  return Py_TYPE(type)->tp_hash == PyType_Type.tp_hash;
}

// The empty containers that a walk takes as leaves, by the place of an object. See
// flatten().
enum class Hold : uint8_t {
  kNever,  // neither this object nor any object in it
  kRoots,  // its items are the roots
  kRoot,   // not this object, but its items
  kItem,   // this object and, if it is a dict, its values
  kLast    // only this object
};

Hold inside(Hold hold, Node::Kind kind) {
  switch (hold) {
    case Hold::kRoots:
      return Hold::kRoot;
    case Hold::kRoot:
      return kind == Node::kList ? Hold::kLast : Hold::kItem;
    case Hold::kItem:
      return kind == Node::kDict ? Hold::kItem : Hold::kNever;
    default:
      return Hold::kNever;
  }
}

bool is_held(Hold hold, Py_ssize_t size) {
  return size == 0 && (hold == Hold::kItem || hold == Hold::kLast);
}

// How many items of a list are asked for ahead.
constexpr Py_ssize_t kItemsAhead = 16;

// Asks for the memory of an object that is visited later: it may be a cache miss.
void fetch(PyObject* object) { __builtin_prefetch(object, /*rw=*/1); }

void combine(size_t* seed, size_t value) {
  *seed = (*seed ^ value) * 1099511628211u;  // FNV-1a
}

}  // namespace

// The classes of the leaves that a walk has found.
class LeafClasses {
 public:
  explicit LeafClasses(PyObject* leaf_types) : leaf_types_(leaf_types) {}

  // Returns true, and adds the class, if its objects are leaves.
  bool find(PyTypeObject* type) {
    if (type == last_) return true;
    if (!is_simple_class(type)) return false;
    const int found = PySet_Contains(leaf_types_, reinterpret_cast<PyObject*>(type));
    if (found < 0) PyErr_Clear();
    if (found > 0) add(type);
    return found > 0;
  }

  void add(PyTypeObject* type) {
    if (type == last_) return;
    last_ = type;
    if (std::find(all_.begin(), all_.end(), type) == all_.end()) all_.push_back(type);
  }

  std::vector<PyTypeObject*> take() { return std::move(all_); }

 private:
  PyObject* leaf_types_;
  PyTypeObject* last_ = nullptr;
  std::vector<PyTypeObject*> all_;  // borrowed from the leaves
};

class Walk {
 public:
  explicit Walk(PyObject* leaf_types) : classes_(leaf_types) { recent_.fill(SIZE_MAX); }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;
  ~Walk() {
    for (PyObject* leaf : leaves_) Py_DECREF(leaf);
  }

  bool visit(PyObject* object, int depth, Hold hold) {
    if (PyDict_CheckExact(object)) {
      if (is_held(hold, PyDict_GET_SIZE(object))) return add_leaf(object);
      return depth < kMaxDepth && visit_dict(object, depth, hold);
    }
    if (PyList_CheckExact(object)) {
      return visit_items(Node::kList, object, PyList_GET_SIZE(object), depth, hold);
    }
    if (PyTuple_CheckExact(object)) {
      return visit_items(Node::kTuple, object, PyTuple_GET_SIZE(object), depth, hold);
    }
    return classes_.find(Py_TYPE(object)) && add_leaf(object);
  }

  Flat finish() {
    structure_.num_leaves_ = leaves_.size();
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(leaves_.size()));
    if (list != nullptr) {
      Py_ssize_t i = 0;
      for (PyObject* leaf : leaves_) PyList_SET_ITEM(list, i++, leaf);
      leaves_.clear();
    }
    return {list, std::move(structure_), classes_.take()};
  }

 private:
  bool add_leaf(PyObject* object) {
    classes_.add(Py_TYPE(object));
    leaves_.push_back(object);
    Py_INCREF(object);
    std::vector<Node>& nodes = structure_.nodes_;
    if (nodes.empty() || nodes.back().kind != Node::kLeaves) {
      nodes.push_back({Node::kLeaves, 0});
    }
    ++nodes.back().size;
    return true;
  }

  bool visit_items(Node::Kind kind, PyObject* items, Py_ssize_t size, int depth,
                   Hold hold) {
    if (is_held(hold, size)) return add_leaf(items);
    if (depth >= kMaxDepth) return false;
    structure_.nodes_.push_back({kind, size});
    const Hold below = inside(hold, kind);
    // No Python code runs in a walk, so the items stay.
    PyObject* const* const all = PySequence_Fast_ITEMS(items);
    for (Py_ssize_t i = 0; i < std::min(size, kItemsAhead); ++i) fetch(all[i]);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (i + kItemsAhead < size) fetch(all[i + kItemsAhead]);
      if (!visit(all[i], depth + 1, below)) return false;
    }
    return true;
  }

  bool visit_dict(PyObject* dict, int depth, Hold hold) {
    const auto size = static_cast<size_t>(PyDict_GET_SIZE(dict));
    const size_t base = scratch_.size();
    scratch_.resize(base + 2 * size);
    PyObject** keys = scratch_.data() + base;
    Py_ssize_t at = 0;
    for (size_t i = 0; i < size; ++i) {
      if (!PyDict_Next(dict, &at, &keys[i], &keys[size + i])) return false;
      fetch(keys[size + i]);
    }
    size_t index = recent_[size % kNumRecent];
    if (index == SIZE_MAX || !are_same(structure_.keys_[index], keys, size)) {
      if (!are_simple(keys, size)) return false;
      index = add_keys(keys, size);
    }
    structure_.nodes_.push_back({Node::kDict, static_cast<int64_t>(size), index});
    const Hold below = inside(hold, Node::kDict);
    for (size_t i = 0; i < size; ++i) {
      const size_t place = structure_.keys_[index].place(i);
      if (!visit(scratch_[base + size + place], depth + 1, below)) return false;
    }
    scratch_.resize(base);
    return true;
  }

  bool are_same(const Keys& known, PyObject* const* keys, size_t size) const {
    PyObject* const* first = structure_.objects_.data() + known.first;
    return known.size == size && std::equal(keys, keys + size, first);
  }

  size_t add_keys(PyObject* const* keys, size_t size) {
    std::vector<PyObject*>& objects = structure_.objects_;
    const size_t index = structure_.keys_.size();
    structure_.keys_.push_back({objects.size(), size, sorted_order(keys, size)});
    objects.insert(objects.end(), keys, keys + size);
    for (size_t i = 0; i < size; ++i) Py_INCREF(keys[i]);
    recent_[size % kNumRecent] = index;
    return index;
  }

  LeafClasses classes_;
  Structure structure_;
  std::vector<PyObject*> leaves_;   // owned
  std::vector<PyObject*> scratch_;  // keys and values of the open dicts; borrowed
  // The last keys of dicts of each size: batches have many dicts with the same keys.
  std::array<size_t, kNumRecent> recent_{};
};

namespace {

constexpr Hold kHolds[] = {Hold::kNever, Hold::kRoot, Hold::kRoots};

// Copies containers. A new container may start a garbage collection, which runs any
// Python code. So it is a copy first, with references of its own, and its items are
// replaced then.
class Copy {
 public:
  Copy(PyObject* leaf_types, const std::function<bool(PyObject*)>& keeps)
      : classes_(leaf_types), keeps_(keeps) {}

  // Returns a new reference. Returns null for a nest that is not copied, also with a
  // Python error set.
  PyObject* visit(PyObject* object, int depth, Hold hold) {
    if (PyDict_CheckExact(object)) {
      if (is_held(hold, PyDict_GET_SIZE(object))) return leaf(object);
      return depth < kMaxDepth ? dict(object, depth, inside(hold, Node::kDict))
                               : nullptr;
    }
    const bool is_list = PyList_CheckExact(object);
    if (is_list || PyTuple_CheckExact(object)) {
      if (is_held(hold, Py_SIZE(object))) return leaf(object);
      if (depth >= kMaxDepth) return nullptr;
      return is_list ? list(object, depth, inside(hold, Node::kList))
                     : tuple(object, depth, inside(hold, Node::kTuple));
    }
    const bool is_kept = classes_.find(Py_TYPE(object)) && keeps_(object);
    return is_kept ? leaf(object) : nullptr;
  }

  std::vector<PyTypeObject*> take_classes() { return classes_.take(); }

 private:
  PyObject* leaf(PyObject* object) {
    classes_.add(Py_TYPE(object));
    return Py_NewRef(object);
  }

  PyObject* dict(PyObject* object, int depth, Hold below) {
    PyObject* copy = PyDict_Copy(object);
    if (copy == nullptr) return nullptr;
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    PyTypeObject* const first = first_key_type(copy);
    bool good = true;
    while (good && PyDict_Next(copy, &at, &key, &value)) {
      PyObject* const item =
          Py_TYPE(key) == first ? visit(value, depth + 1, below) : nullptr;
      // The key exists, so the dict keeps its size.
      good = item != nullptr && (item == value || PyDict_SetItem(copy, key, item) == 0);
      Py_XDECREF(item);
    }
    if (!good) Py_CLEAR(copy);
    return copy;
  }

  // Returns the type of all simple keys: see are_simple().
  static PyTypeObject* first_key_type(PyObject* dict) {
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    if (!PyDict_Next(dict, &at, &key, nullptr)) return nullptr;
    return are_simple(&key, 1) ? Py_TYPE(key) : nullptr;
  }

  PyObject* list(PyObject* object, int depth, Hold below) {
    const Py_ssize_t size = PyList_GET_SIZE(object);
    PyObject* copy = PyList_New(size);
    if (copy == nullptr) return nullptr;
    // A collection may have changed the list. PyList_GetSlice() does not check that.
    if (PyList_GET_SIZE(object) != size) Py_CLEAR(copy);
    for (Py_ssize_t i = 0; copy != nullptr && i < size; ++i) {
      PyList_SET_ITEM(copy, i, Py_NewRef(PyList_GET_ITEM(object, i)));
    }
    for (Py_ssize_t i = 0; copy != nullptr && i < PyList_GET_SIZE(copy); ++i) {
      PyObject* const item = visit(PyList_GET_ITEM(copy, i), depth + 1, below);
      if (item == nullptr) {
        Py_CLEAR(copy);
      } else {
        PyList_SetItem(copy, i, item);
      }
    }
    return copy;
  }

  PyObject* tuple(PyObject* object, int depth, Hold below) {
    PyObject* copy = PyTuple_New(PyTuple_GET_SIZE(object));
    for (Py_ssize_t i = 0; copy != nullptr && i < PyTuple_GET_SIZE(object); ++i) {
      PyObject* const item = visit(PyTuple_GET_ITEM(object, i), depth + 1, below);
      if (item == nullptr) {
        Py_CLEAR(copy);
      } else {
        PyTuple_SET_ITEM(copy, i, item);
      }
    }
    return copy;
  }

  LeafClasses classes_;
  const std::function<bool(PyObject*)>& keeps_;
};

}  // namespace

std::optional<Flat> flatten(PyObject* tree, PyObject* leaf_types, Roots roots) {
  Walk walk(leaf_types);
  if (!walk.visit(tree, 0, kHolds[static_cast<size_t>(roots)])) return std::nullopt;
  return walk.finish();
}

std::optional<Copied> copy_containers(PyObject* tree, PyObject* leaf_types, Roots roots,
                                      const std::function<bool(PyObject*)>& keeps) {
  Copy copy(leaf_types, keeps);
  PyObject* copied = copy.visit(tree, 0, kHolds[static_cast<size_t>(roots)]);
  if (copied == nullptr && PyErr_Occurred() == nullptr) return std::nullopt;
  return Copied{copied, copy.take_classes()};
}

class Build {
 public:
  Build(const Structure& structure, PyObject* leaves)
      : structure_(structure), leaves_(leaves) {}

  // Returns the next leaf or container: a new reference, or null with a Python error
  // set.
  PyObject* next() {
    const Node& node = structure_.nodes_[at_];
    if (node.kind == Node::kLeaves) {
      if (++num_taken_ == node.size) {
        num_taken_ = 0;
        ++at_;
      }
      PyObject* leaf = PyTuple_GET_ITEM(leaves_, leaf_++);
      Py_INCREF(leaf);
      return leaf;
    }
    ++at_;
    if (node.kind == Node::kDict) return dict(node);
    const bool is_list = node.kind == Node::kList;
    PyObject* items = is_list ? PyList_New(node.size) : PyTuple_New(node.size);
    for (Py_ssize_t i = 0; items != nullptr && i < node.size; ++i) {
      PyObject* item = next();
      if (item == nullptr) {
        Py_CLEAR(items);
      } else if (is_list) {
        PyList_SET_ITEM(items, i, item);
      } else {
        PyTuple_SET_ITEM(items, i, item);
      }
    }
    return items;
  }

 private:
  PyObject* dict(const Node& node) {
    const Keys& keys = structure_.keys_[node.keys];
    const size_t base = values_.size();
    values_.resize(base + keys.size, nullptr);
    bool good = true;
    for (size_t i = 0; good && i < keys.size; ++i) {
      PyObject* value = next();
      values_[base + keys.place(i)] = value;
      good = value != nullptr;
    }
    PyObject* dict = good ? PyDict_New() : nullptr;
    good = dict != nullptr;
    for (size_t i = 0; i < keys.size; ++i) {
      PyObject* value = values_[base + i];
      PyObject* key = structure_.objects_[keys.first + i];
      good = good && PyDict_SetItem(dict, key, value) == 0;
      Py_XDECREF(value);
    }
    values_.resize(base);
    if (!good) Py_CLEAR(dict);
    return dict;
  }

  const Structure& structure_;
  PyObject* leaves_;
  size_t at_ = 0;
  int64_t num_taken_ = 0;  // of the leaves at nodes_[at_]
  Py_ssize_t leaf_ = 0;
  std::vector<PyObject*> values_;  // of the open dicts, by insertion; owned
};

Structure::~Structure() {
  for (PyObject* object : objects_) Py_DECREF(object);
}

PyObject* Structure::unflatten(PyObject* leaves) const {
  PyObject* items = PySequence_Tuple(leaves);
  if (items == nullptr) return nullptr;
  PyObject* tree = nullptr;
  if (PyTuple_GET_SIZE(items) == static_cast<Py_ssize_t>(num_leaves_)) {
    tree = Build(*this, items).next();
  } else {
    PyErr_Format(PyExc_ValueError,
                 "unflatten: leaves must have %zu entries, as the structure, but has "
                 "%zd.",
                 num_leaves_, PyTuple_GET_SIZE(items));
  }
  Py_DECREF(items);
  return tree;
}

bool Structure::operator==(const Structure& other) const {
  if (nodes_.size() != other.nodes_.size()) return false;
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const Node& a = nodes_[n];
    const Node& b = other.nodes_[n];
    if (a.kind != b.kind || a.size != b.size) return false;
    if (a.kind != Node::kDict) continue;
    for (size_t i = 0; i < static_cast<size_t>(a.size); ++i) {
      if (!are_equal(key(a, i), other.key(b, i))) return false;
    }
  }
  return true;
}

size_t Structure::hash() const {
  size_t seed = 14695981039346656037u;
  for (const Node& node : nodes_) {
    combine(&seed, static_cast<size_t>(node.kind));
    combine(&seed, static_cast<size_t>(node.size));
    if (node.kind != Node::kDict) continue;
    for (size_t i = 0; i < static_cast<size_t>(node.size); ++i) {
      combine(&seed, static_cast<size_t>(PyObject_Hash(key(node, i))));
    }
  }
  return seed;
}

}  // namespace pyparallel::pytree
