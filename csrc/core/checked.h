// Arithmetic in 64 bits on numbers from outside. It reports overflow instead of
// wrapping: every function returns false, with *result unspecified, if the true value
// does not fit.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pyparallel {

[[nodiscard]] inline bool checked_add(int64_t a, int64_t b, int64_t* result) {
  return !__builtin_add_overflow(a, b, result);
}

[[nodiscard]] inline bool checked_mul(int64_t a, int64_t b, int64_t* result) {
  return !__builtin_mul_overflow(a, b, result);
}

template <typename To, typename From>
[[nodiscard]] inline bool checked_narrow(From value, To* result) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  return !__builtin_add_overflow(value, From{0}, result);
}

// Sets *result to the bytes of a contiguous tensor of these sizes.
[[nodiscard]] inline bool checked_nbytes(const int64_t* sizes, int64_t ndim,
                                         int64_t itemsize, int64_t* result) {
  bool fits = true;
  bool empty = false;
  *result = itemsize;
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] < 0) return false;
    empty |= sizes[d] == 0;
    fits &= sizes[d] == 0 || checked_mul(*result, sizes[d], result);
  }
  if (empty) *result = 0;
  return fits || empty;
}

// Sets *result to the end of the last element of a strided tensor, in bytes from the
// start of its storage; to 0 for a tensor without elements.
[[nodiscard]] inline bool checked_extent(const int64_t* sizes, const int64_t* strides,
                                         int64_t ndim, int64_t offset, int64_t itemsize,
                                         int64_t* result) {
  int64_t last = offset;
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] == 0) {
      *result = 0;
      return true;
    }
  }
  if (offset < 0) return false;
  for (int64_t d = 0; d < ndim; ++d) {
    int64_t reach = 0;
    if (sizes[d] < 0 || strides[d] < 0) return false;
    if (!checked_mul(sizes[d] - 1, strides[d], &reach)) return false;
    if (!checked_add(last, reach, &last)) return false;
  }
  return checked_add(last, 1, &last) && checked_mul(last, itemsize, result);
}

// Returns true if the elements are in row-major order without gaps.
[[nodiscard]] inline bool is_contiguous(const int64_t* sizes, const int64_t* strides,
                                        int64_t ndim) {
  int64_t expected = 1;
  bool contiguous = true;
  for (int64_t d = ndim; d-- > 0;) {
    if (sizes[d] == 0) return true;
    if (sizes[d] == 1) continue;
    contiguous &= strides[d] == expected;
    if (!checked_mul(expected, sizes[d], &expected)) contiguous = false;
  }
  return contiguous;
}

}  // namespace pyparallel
