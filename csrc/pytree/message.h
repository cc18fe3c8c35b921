// Nests of plain values and leaves as bytes.
//
// Note: [messages]
// A message describes itself, so neither side keeps a table that the other must match.
// Each object is a tag and its content, in native byte order:
//
//   N T F     None, True, False      s b   str in UTF-8, bytes: uint32 size, bytes
//   i f       int64, double          l t   list, tuple: uint32 size, items
//   x         a leaf, see Leaves     d     dict: uint32 size, keys and values in turn
//
// No tag is 0x80, the first byte of a pickle.
#pragma once

#include <Python.h>

#include <string>
#include <string_view>

namespace pyparallel::pytree {

// The leaves of a nest. Note [no Python code in a walk] in pytree/walk.h applies to
// append().
class Leaves {
 public:
  virtual ~Leaves() = default;
  // Appends the bytes of a leaf. Returns false if it takes no such object.
  virtual bool append(PyObject* leaf, std::string* message) = 0;
  // Returns a new leaf, made of the first bytes of `rest`, and removes these.
  virtual PyObject* take(std::string_view* rest) = 0;
};

// Appends a nest to a message. Returns false, without a Python error, unless all
// containers are exactly dict (with keys that are exactly str or int), list or tuple,
// at most 200 deep, and all other objects are leaves, None, or exactly bool, int of 64
// bits, float, str or bytes. Returns false, too, if a container or a leaf occurs twice:
// pickle keeps it one object.
bool append_nest(PyObject* tree, Leaves* leaves, std::string* message);

// Returns the nest that a message begins with, a new reference, and removes its bytes.
// Returns null, with a Python error set, if memory runs out; without one, if the
// message is damaged.
PyObject* take_nest(std::string_view* message, Leaves* leaves);

}  // namespace pyparallel::pytree
