// One loop for a profiler that counts instructions: count_instructions CASE SCALE.
// Without arguments it names its compiler.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "core/box_plan.h"
#include "core/pack.h"
#include "core/pad_copy.h"
#include "cpu/nontemporal.h"

namespace {

using namespace pyparallel;
using Bytes = std::vector<uint8_t>;
using Loop = std::function<void()>;

constexpr Lane kAlone{0, 1};

Bytes source;
Bytes dst;
PadShapes shapes;
std::vector<Slot> slots;

// Four images of three planes, smaller than their frame of 64 * scale rows of `width`
// bytes.
void make_images(int64_t scale, int64_t width, bool placed) {
  const int64_t height = 64 * scale;
  source.assign(static_cast<size_t>(3 * height * width), 1);
  dst.assign(4 * source.size(), 0);
  shapes.target = {3, height, width};
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t missing = i * width / 16;
    shapes.sizes.insert(shapes.sizes.end(), {3, height - i, width - missing});
    if (placed) shapes.starts.insert(shapes.starts.end(), {0, i, missing});
    shapes.sources.push_back({source.data(), Fill{0, 0}});
  }
}

// Many small samples: the cost of each one.
void make_small(int64_t scale) {
  source.assign(64, 1);
  shapes.itemsize = 4;
  shapes.target = {4, 4};
  for (int64_t i = 0; i < 500 * scale; ++i) {
    shapes.sizes.insert(shapes.sizes.end(), {4 - i % 2, 4});
    shapes.sources.push_back({source.data(), Fill{0, 0}});
  }
  dst.assign(shapes.sources.size() * 64, 0);
}

void make_leaves(int64_t scale) {
  source.assign(24, 1);
  for (int64_t i = 0; i < 500 * scale; ++i) {
    slots.push_back({source.data(), 64 * i, 24});
  }
  dst.assign(slots.size() * 64, 0);
}

template <typename RowWriter>
void pad_copy() {
  const BoxPlan plan(dst.data(), shapes);
  const BoxTable table = plan.table();
  PadCopy<RowWriter>{table}({0, num_pieces(table), 1}, kAlone);
}

void pack() {
  const auto num_slots = static_cast<int64_t>(slots.size());
  const auto nbytes = static_cast<int64_t>(dst.size());
  const Pack body{dst.data(), nbytes, 4096, slots.data(), num_slots};
  body({0, body.num_pieces(), 1}, kAlone);
}

// Makes the data of a case and returns its loop; none for an unknown name.
Loop prepare(const char* name, int64_t scale) {
  const auto is = [&](const char* wanted) { return strcmp(name, wanted) == 0; };
  if (is("pad_copy_small")) {
    make_small(scale);
    return pad_copy<CachedWriter>;
  }
  if (is("pack")) {
    make_leaves(scale);
    return pack;
  }
  make_images(scale, 1024, !is("pad_copy") && !is("pad_copy_streamed"));
  if (is("pad_copy") || is("pad_copy_placed")) return pad_copy<CachedWriter>;
  if (is("mask")) return pad_copy<MaskWriter>;
#if defined(__x86_64__)
  if (is("pad_copy_streamed")) return pad_copy<cpu::NontemporalWriter<cpu::Sse2Lines>>;
#endif
  return nullptr;
}

}  // namespace

// The function in which the profiler counts.
extern "C" __attribute__((noinline)) void counted(const Loop& loop) { loop(); }

int main(int argc, char** argv) {
  if (argc != 3) {
#if defined(__clang__)
    std::printf("clang-%d\n", __clang_major__);
#else
    std::printf("gcc-%d\n", __GNUC__);
#endif
    return 0;
  }
  const Loop loop = prepare(argv[1], strtol(argv[2], nullptr, 10));
  if (!loop) return 1;
  counted(loop);
  return 0;
}
