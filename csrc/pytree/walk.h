// Flattens nests of exactly dict, list and tuple to a list of leaves and a structure.
//
// Note: [no Python code in a walk]
// Containers are read through borrowed references, which are valid while the containers
// do not change. So the GIL is held, only strings and integers are compared, and no
// object is allocated that could start a garbage collection.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace pyparallel::pytree {

// A container, followed by its children, or a run of consecutive leaves of the walk. A
// run continues over the end of a container.
struct Node {
  enum Kind : uint8_t { kLeaves, kList, kTuple, kDict };

  Kind kind;
  int64_t size;     // number of children, or of leaves
  size_t keys = 0;  // of a dict: index of its Keys
};

// The keys of dicts with equal keys: a range of all keys, in the order of insertion.
struct Keys {
  size_t first;
  size_t size;
  std::vector<size_t> order;  // by sorted place: place of insertion; empty if the same

  size_t place(size_t sorted) const { return order.empty() ? sorted : order[sorted]; }
};

// The containers of a nest. Immutable. All functions need the GIL.
class Structure {
 public:
  Structure() = default;
  Structure(Structure&& other) noexcept = default;
  Structure& operator=(Structure&&) = delete;
  ~Structure();

  size_t num_leaves() const { return num_leaves_; }

  // Returns new containers around `leaves`, an iterable: a new reference, or null with
  // a Python error set. Dicts get their keys in the order of insertion.
  PyObject* unflatten(PyObject* leaves) const;

  // Equal nests have equal structures, whatever the order in which keys were inserted.
  bool operator==(const Structure& other) const;
  size_t hash() const;

 private:
  friend class Walk;
  friend class Build;

  PyObject* key(const Node& dict, size_t sorted) const {
    const Keys& keys = keys_[dict.keys];
    return objects_[keys.first + keys.place(sorted)];
  }

  size_t num_leaves_ = 0;
  std::vector<Node> nodes_;
  std::vector<Keys> keys_;
  std::vector<PyObject*> objects_;  // all keys, each exactly a str or an int; owned
};

struct Flat {
  PyObject* leaves;  // a list, a new reference
  Structure structure;
  std::vector<PyTypeObject*> classes;  // of the leaves, each once; alive with them
};

// The roots of a nest, near which empty containers are leaves: none, the nest itself,
// or its items.
enum class Roots : uint8_t { kNone, kTree, kItems };

// Flattens a nest. Returns nullopt, without a Python error, unless all containers are
// exactly dict (with keys all exactly str, or all exactly int), list or tuple, at most
// 200 deep, and the classes of all other objects are in the set `leaf_types`. Visits
// dicts in the order of their sorted keys. Returns null leaves, with a Python error
// set, if memory runs out.
//
// The empty items of a root are leaves. If the root is no list, so are the empty values
// of each dict that the root contains directly or through dicts alone.
std::optional<Flat> flatten(PyObject* tree, PyObject* leaf_types, Roots roots);

// A copy of the containers of a nest, as flatten() and Structure::unflatten() make it.
struct Copied {
  PyObject* tree;                      // a new reference
  std::vector<PyTypeObject*> classes;  // as of Flat
};

// Returns nothing for a nest that flatten() does not take, or if `keeps` returns false
// for a leaf. It must neither raise nor call Python code. Returns a null tree, with a
// Python error set, if memory runs out.
std::optional<Copied> copy_containers(PyObject* tree, PyObject* leaf_types, Roots roots,
                                      const std::function<bool(PyObject*)>& keeps);

}  // namespace pyparallel::pytree
