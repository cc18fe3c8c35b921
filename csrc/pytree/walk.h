// Nests of exactly dict, list and tuple as a flat list of leaves and a structure.
//
// Note: [no Python code in a walk]
// Containers are read through borrowed references, which stay good while nobody changes
// the containers: the GIL is held, only strings and integers are compared, and nothing
// is allocated that could start a garbage collection.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace pyparallel::pytree {

// A container, followed by its children; or leaves that follow one another in the walk,
// even where one container ends among them and another does not begin.
struct Node {
  enum Kind : uint8_t { kLeaves, kList, kTuple, kDict };

  Kind kind;
  int64_t size;     // number of children, or of leaves
  size_t keys = 0;  // of a dict: index of its Keys
};

// The keys of equal dicts: a part of all keys, in the order of insertion.
struct Keys {
  size_t first;
  size_t size;
  std::vector<size_t> order;  // by sorted place: place of insertion; empty if the same

  size_t place(size_t sorted) const { return order.empty() ? sorted : order[sorted]; }
};

// The containers of a nest. Immutable. All calls need the GIL.
class Structure {
 public:
  Structure() = default;
  Structure(Structure&& other) noexcept = default;
  Structure& operator=(Structure&&) = delete;
  ~Structure();

  size_t num_leaves() const { return num_leaves_; }

  // New containers around `leaves`, an iterable: a new reference, or null with the
  // Python error set. Dicts get their keys in the order of insertion.
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
};

// Nothing, without a Python error, unless all containers are exactly dicts (with keys
// all exactly str, or all exactly int), lists and tuples, not nested by the hundreds,
// and the classes of all else are in the set `leaf_types`. Dicts are walked in the
// order of their sorted keys. Null leaves, with a Python error, if memory runs out.
std::optional<Flat> flatten(PyObject* tree, PyObject* leaf_types);

}  // namespace pyparallel::pytree
