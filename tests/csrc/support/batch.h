// A random ragged batch, and its padded result, computed element by element.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/box_plan.h"

namespace pyparallel::testing {

using Bytes = std::vector<uint8_t>;

struct Batch {
  PadShapes shapes;
  std::vector<Bytes> samples;  // without spare memory, for the sanitizers
  std::vector<Bytes> fills;    // one item each
  int64_t row_nbytes = 0;

  int64_t nbytes() const { return row_nbytes * static_cast<int64_t>(samples.size()); }
};

inline int64_t product(const int64_t* sizes, size_t count) {
  int64_t result = 1;
  for (size_t d = 0; d < count; ++d) result *= sizes[d];
  return result;
}

// Makes `num` samples at any address, or all at multiples of four bytes, smaller than
// target in random dimensions. They start at 0, or with `placed` anywhere.
template <typename Numbers>
Batch make_batch(Numbers* random, const std::vector<int64_t>& target, int64_t num,
                 int64_t itemsize, bool one_byte_fill, bool placed = false) {
  Batch batch;
  const size_t ndim = target.size();
  batch.shapes.itemsize = itemsize;
  batch.shapes.target = target;
  batch.row_nbytes = product(target.data(), ndim) * itemsize;
  std::vector<bool> padded(ndim);
  for (size_t d = 0; d < ndim; ++d) padded[d] = random->between(0, 1) == 0;
  const int64_t grain = random->between(0, 1) == 0 ? 1 : 4;
  batch.samples.resize(static_cast<size_t>(num));
  batch.fills.resize(static_cast<size_t>(num));
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    for (size_t d = 0; d < ndim; ++d) {
      const bool zero = padded[d] && random->between(0, 9) == 0;
      const int64_t low = zero ? 0 : (target[d] + 1) / 2;
      batch.shapes.sizes.push_back(padded[d] ? random->between(low, target[d])
                                             : target[d]);
      if (!placed) continue;
      const int64_t room = target[d] - batch.shapes.sizes.back();
      batch.shapes.starts.push_back(random->between(0, room));
    }
    const int64_t numel = product(batch.shapes.sizes.data() + i * ndim, ndim);
    Bytes& sample = batch.samples[i];
    const int64_t past = random->between(0, 15) / grain * grain;
    sample.resize(static_cast<size_t>(past + numel * itemsize));
    for (uint8_t& byte : sample) byte = static_cast<uint8_t>(random->next());
    sample.shrink_to_fit();
    Bytes& fill = batch.fills[i];
    const auto first = static_cast<uint8_t>(random->next());
    fill.assign(static_cast<size_t>(itemsize), first);
    if (!one_byte_fill) {
      for (uint8_t& byte : fill) byte = static_cast<uint8_t>(random->next());
    }
    const auto* item = reinterpret_cast<const char*>(fill.data());
    batch.shapes.sources.push_back(
        {numel == 0 ? nullptr : sample.data() + past, repeat_fill(item, itemsize)});
  }
  return batch;
}

// Makes a batch of up to six dimensions and four samples of at most `most` elements.
template <typename Numbers>
Batch make_any_batch(Numbers* random, int64_t most = int64_t{1} << 40) {
  std::vector<int64_t> target(static_cast<size_t>(random->between(0, 6)));
  const int64_t limit = target.size() > 3 ? 4 : 9;
  for (int64_t& size : target) {
    const int64_t low = random->between(0, 30) == 0 ? 0 : 1;
    size = random->between(low, most < limit ? most : limit);
    if (size > 0) most /= size;
  }
  const int64_t itemsize = int64_t{1} << random->between(0, 4);
  const int64_t num = random->between(0, 4);
  const bool plain = random->between(0, 1) == 0;
  const bool placed = random->between(0, 1) == 0;
  return make_batch(random, target, num, itemsize, plain, placed);
}

// Returns the index in a sample of an element of a row of `target`, or -1 if the sample
// does not have it.
inline int64_t find_element(int64_t element, size_t ndim, const int64_t* target,
                            const int64_t* sizes, const int64_t* starts) {
  int64_t source = 0;
  int64_t scale = 1;
  bool inside = true;
  for (size_t d = ndim; d-- > 0;) {
    const int64_t at = element % target[d] - (starts == nullptr ? 0 : starts[d]);
    element /= target[d];
    inside = inside && at >= 0 && at < sizes[d];
    source += at * scale;
    scale *= sizes[d];
  }
  return inside ? source : -1;
}

// Returns the destination, computed by the coordinates of each element.
inline Bytes padded_slowly(const Batch& batch) {
  const PadShapes& shapes = batch.shapes;
  const auto itemsize = static_cast<size_t>(shapes.itemsize);
  const size_t ndim = shapes.target.size();
  Bytes out;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const int64_t* starts =
        shapes.starts.empty() ? nullptr : shapes.starts.data() + i * ndim;
    for (int64_t element = 0; element * shapes.itemsize < batch.row_nbytes; ++element) {
      const int64_t source = find_element(element, ndim, shapes.target.data(),
                                          shapes.sizes.data() + i * ndim, starts);
      const uint8_t* item = batch.fills[i].data();
      if (source >= 0) {
        item = shapes.sources[i].data + static_cast<size_t>(source) * itemsize;
      }
      out.insert(out.end(), item, item + itemsize);
    }
  }
  return out;
}

// Returns the mask of the last num_dims dimensions, computed element by element.
inline Bytes marked_slowly(const Batch& batch, size_t num_dims) {
  const PadShapes& shapes = batch.shapes;
  const size_t ndim = shapes.target.size();
  const size_t skipped = ndim - num_dims;
  const int64_t* target = shapes.target.data() + skipped;
  const int64_t numel = product(target, num_dims);
  Bytes out;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const size_t row = i * ndim + skipped;
    const int64_t* starts =
        shapes.starts.empty() ? nullptr : shapes.starts.data() + row;
    for (int64_t element = 0; element < numel; ++element) {
      const int64_t found =
          find_element(element, num_dims, target, shapes.sizes.data() + row, starts);
      out.push_back(found >= 0 ? 1 : 0);
    }
  }
  return out;
}

}  // namespace pyparallel::testing
