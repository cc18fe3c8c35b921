// Makes the smallest box table for given shapes. Runs on the host only.
//
// A dimension without padding merges into the one before it. So equal shapes become one
// row per sample, and a batch of images padded below and at the right becomes planes of
// rows. A frame has room for three padded dimensions, with whole planes above them.
// Each place of a further outer dimension becomes a box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/boxes.h"

namespace pyparallel {

// One source of a pad-copy. Its sizes are the row of the same index in
// PadShapes::sizes.
struct PadSource {
  const uint8_t* data;  // contiguous; may be null if it has no bytes
  Fill fill;
};

// Shapes that the caller has checked: no start is negative, every start and size
// together are at most their target, and the bytes of sources.size() targets fit 64
// bits.
struct PadShapes {
  int64_t itemsize = 1;
  std::vector<int64_t> target;
  std::vector<int64_t> sizes;  // sources.size() rows of target.size()
  std::vector<PadSource> sources;
  std::vector<int64_t> starts;  // as sizes, or empty: all 0
  int64_t source_ratio = 1;     // bytes of a source for each byte of its copy
};

// Repeats one fill value, the `itemsize` bytes at `item`.
inline Fill repeat_fill(const char* item, int64_t itemsize) {
  unsigned char bytes[16];
  for (int64_t b = 0; b < 16; b += itemsize) {
    memcpy(bytes + b, item, static_cast<size_t>(itemsize));
  }
  Fill fill;
  memcpy(&fill, bytes, sizeof(fill));
  return fill;
}

// Consecutive dimensions as one: a dimension that may be padded, followed by dimensions
// without padding. `inner` is the product of the targets of the latter.
struct MergedDim {
  size_t first;
  int64_t inner;
  int64_t target;
  bool padded;
};

inline std::vector<MergedDim> merge_dims(const PadShapes& shapes) {
  const size_t ndim = shapes.target.size();
  std::vector<MergedDim> merged;
  merged.reserve(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t target = shapes.target[d];
    bool padded = false;
    for (size_t at = d; at < shapes.sizes.size(); at += ndim) {
      padded |= shapes.sizes[at] != target;
    }
    if (d == 0 || padded) {
      merged.push_back({d, 1, target, padded});
    } else {
      merged.back().inner *= target;
      merged.back().target *= target;
    }
  }
  return merged;
}

// The boxes of a destination, and the frame that they share. There are no boxes if the
// destination has no bytes.
class BoxPlan {
 public:
  BoxPlan(uint8_t* dst, const PadShapes& shapes) : shapes_(shapes), dst_(dst) {
    for (int64_t size : shapes.target) {
      if (size == 0) return;
    }
    merged_ = merge_dims(shapes);
    choose_frame();
    boxes_.reserve(shapes.sources.size());
    if (!shapes.starts.empty()) starts_.reserve(shapes.sources.size());
    for (size_t i = 0; i < shapes.sources.size(); ++i) add_boxes(i);
  }

  bool empty() const { return boxes_.empty(); }

  // Valid while this plan lives.
  BoxTable table() const {
    return {dst_, boxes_.data(), starts_.empty() ? nullptr : starts_.data(),
            static_cast<int64_t>(boxes_.size()), frame_};
  }

 private:
  // merged_ = [outer dimensions ...][planes][depth][height][width], from the right.
  void choose_frame() {
    const size_t num = merged_.size();
    const bool whole_planes = num > 3 && !merged_[num - 4].padded;
    num_outer_ = num > 3 ? num - 3 - (whole_planes ? 1 : 0) : 0;
    const auto target = [&](size_t from_right) {
      return num - num_outer_ >= from_right ? merged_[num - from_right].target : 1;
    };
    frame_.planes = target(4);
    frame_.depth = target(3);
    frame_.height = target(2);
    frame_.width = target(1) * shapes_.itemsize;
    frame_.pieces = 1;
    frame_.piece_width = frame_.width;
  }

  int64_t size_of(size_t sample, size_t dim) const {
    const MergedDim& merged = merged_[dim];
    return shapes_.sizes[sample * shapes_.target.size() + merged.first] * merged.inner;
  }

  // A dimension with a start above 0 is padded, so the dimensions merged into `dim`
  // start at 0.
  int64_t start_of(size_t sample, size_t dim) const {
    if (shapes_.starts.empty()) return 0;
    const MergedDim& merged = merged_[dim];
    return shapes_.starts[sample * shapes_.target.size() + merged.first] * merged.inner;
  }

  Start inner_start(size_t sample) const {
    const size_t num = merged_.size();
    const auto start = [&](size_t from_right) {
      return num - num_outer_ >= from_right ? start_of(sample, num - from_right) : 0;
    };
    return {start(3), start(2), start(1) * shapes_.itemsize};
  }

  Box inner_box(size_t sample) const {
    const size_t num = merged_.size();
    const auto size = [&](size_t from_right) {
      return num - num_outer_ >= from_right ? size_of(sample, num - from_right) : 1;
    };
    const PadSource& source = shapes_.sources[sample];
    return {source.data, size(3), size(2), size(1) * shapes_.itemsize, source.fill};
  }

  void add_boxes(size_t sample) {
    const Box box = inner_box(sample);
    const Start start = inner_start(sample);
    const int64_t nbytes = frame_.planes * box.depth * box.height * box.width;
    std::vector<int64_t> place(num_outer_, 0);
    int64_t next_src = 0;
    do {
      bool inside = nbytes > 0;
      for (size_t d = 0; d < num_outer_; ++d) {
        const int64_t at = place[d] - start_of(sample, d);
        inside &= at >= 0 && at < size_of(sample, d);
      }
      if (!shapes_.starts.empty()) starts_.push_back(start);
      if (inside) {
        boxes_.push_back(box);
        boxes_.back().src = box.src + next_src;
        next_src += nbytes * shapes_.source_ratio;
      } else {
        boxes_.push_back({nullptr, 0, 0, 0, box.fill});
      }
    } while (advance(&place));
  }

  // Advances to the next place in the outer dimensions, the last one fastest. Returns
  // false after the last place.
  bool advance(std::vector<int64_t>* place) const {
    for (size_t d = num_outer_; d-- > 0;) {
      if (++(*place)[d] < merged_[d].target) return true;
      (*place)[d] = 0;
    }
    return false;
  }

  const PadShapes& shapes_;
  uint8_t* dst_;
  std::vector<MergedDim> merged_;
  size_t num_outer_ = 0;
  Frame frame_{1, 1, 1, 1, 1, 1};
  std::vector<Box> boxes_;
  std::vector<Start> starts_;
};

// Returns the shapes of a mask over the last `num_dims` dimensions of `shapes`: one
// byte per element, 0 outside the samples. Its boxes point into the mask and are not
// read.
inline PadShapes mask_shapes(const PadShapes& shapes, uint8_t* mask, size_t num_dims) {
  const size_t ndim = shapes.target.size();
  const size_t skipped = ndim - num_dims;
  const auto last = [&](const std::vector<int64_t>& rows) {
    std::vector<int64_t> kept;
    for (size_t at = 0; at < rows.size(); at += ndim) {
      const auto row = rows.begin() + static_cast<std::ptrdiff_t>(at);
      kept.insert(kept.end(), row + static_cast<std::ptrdiff_t>(skipped),
                  row + static_cast<std::ptrdiff_t>(ndim));
    }
    return kept;
  };
  PadShapes made{1,  last(shapes.target), last(shapes.sizes),
                 {}, last(shapes.starts), 1};
  int64_t row = 1;
  for (int64_t size : made.target) row *= size;
  for (size_t i = 0; i < shapes.sources.size(); ++i) {
    made.sources.push_back({mask + static_cast<int64_t>(i) * row, Fill{0, 0}});
  }
  return made;
}

// Cuts rows wider than `limit`, a positive multiple of 16, into pieces of `limit`
// bytes.
inline void cut_rows(Frame* frame, int64_t limit) {
  if (frame->width <= limit) return;
  frame->pieces = (frame->width - 1) / limit + 1;
  frame->piece_width = limit;
}

}  // namespace pyparallel
