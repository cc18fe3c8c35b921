// The names of arguments, shapes and dtypes in errors, as a user writes them in Python.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <ostream>
#include <string>

namespace pyparallel::ops {

// "pad_copy: samples[2]", or "pad_copy: dst" without an index.
struct Where {
  const char* op;
  const char* argument;
  int64_t index = -1;
};

inline std::ostream& operator<<(std::ostream& out, const Where& where) {
  out << where.op << ": " << where.argument;
  if (where.index >= 0) out << '[' << where.index << ']';
  return out;
}

// "(3, 4)", "(3,)", "()"
struct Tuple {
  c10::IntArrayRef values;
};

inline std::ostream& operator<<(std::ostream& out, const Tuple& tuple) {
  out << '(';
  for (size_t i = 0; i < tuple.values.size(); ++i) {
    if (i > 0) out << ", ";
    out << tuple.values[i];
  }
  return out << (tuple.values.size() == 1 ? ",)" : ")");
}

// "torch.float32"
inline std::string dtype_name(c10::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace pyparallel::ops
