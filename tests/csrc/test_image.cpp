// The bodies of an image batch, as CPU threads and as CUDA warps run them, against an
// oracle that goes from value to value.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/image_lanes.h"
#include "core/partition.h"
#include "cpu/image.h"
#include "image_batch.h"

namespace {

using namespace pyparallel;
using testing::Bytes;
using testing::ImageCase;

constexpr uint8_t kUntouched = 0xEE;
constexpr int64_t kGuard = 64;

// Memory at a chosen distance from a multiple of 64, guarded on both sides.
class Destination {
 public:
  Destination(int64_t nbytes, int64_t shift)
      : nbytes_(nbytes), room_(static_cast<size_t>(nbytes + shift + 3 * kGuard)) {
    const auto past =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(room_.data()) & (kGuard - 1));
    first_ = 2 * kGuard - past + shift;
    clear();
  }

  uint8_t* data() { return room_.data() + first_; }
  void clear() { memset(room_.data(), kUntouched, room_.size()); }

  bool holds(const Bytes& expected) {
    if (static_cast<int64_t>(expected.size()) != nbytes_) return false;
    if (nbytes_ > 0 && memcmp(data(), expected.data(), expected.size()) != 0) {
      return false;
    }
    for (int64_t b = 0; b < static_cast<int64_t>(room_.size()); ++b) {
      const bool guard = b < first_ || b >= first_ + nbytes_;
      if (guard && room_[static_cast<size_t>(b)] != kUntouched) return false;
    }
    return true;
  }

 private:
  int64_t nbytes_;
  Bytes room_;
  int64_t first_;
};

// Reads nothing but the images of one case, and by words nothing but multiples of them.
struct WatchedMath : HostMath {
  static inline const ImageCase* watched = nullptr;

  static bool may_read(const void* from, int64_t nbytes) {
    const auto begin = reinterpret_cast<uintptr_t>(from);
    const auto size = static_cast<uintptr_t>(nbytes);
    for (const Image& image : watched->images) {
      const auto data = reinterpret_cast<uintptr_t>(image.data);
      const bool bytes = watched->job.source == ImageSource::kByte;
      const uintptr_t numel = uintptr_t{image.height} * image.width *
                              static_cast<uintptr_t>(watched->job.batch.channels);
      const uintptr_t end = data + numel * (bytes ? 1 : 4);
      if (begin >= data && begin + size <= end) return begin % size == 0;
    }
    return false;
  }

  template <typename Word>
  static Word load(const Word* from) {
    CHECK(may_read(from, sizeof(Word)));
    return HostMath::load(from);
  }

  static void load_four(const float* from, float* to) {
    CHECK(may_read(from, 16));
    HostMath::load_four(from, to);
  }

  static void store(void* to, const uint32_t (&words)[4]) {
    CHECK(reinterpret_cast<uintptr_t>(to) % 16 == 0);
    HostMath::store(to, words);
  }
};

// CUDA warps: strided rows, shared by lanes.
template <typename Body>
void run_warps(const ImageBatch& batch, int64_t num_warps, int num_lanes) {
  const Body body{batch, batch.images};
  for (int64_t warp = 0; warp < num_warps; ++warp) {
    for (int lane = 0; lane < num_lanes; ++lane) {
      body(Rows{warp, num_pieces(batch), num_warps}, Lane{lane, num_lanes});
    }
  }
}

template <typename Source, typename Value, bool exact, ImageRows kind>
void check_body(const ImageJob& job, const std::vector<int>& lane_counts,
                Destination* dst, Destination* mask, const Bytes& expected,
                const Bytes& marks) {
  using Body = ImageLanes<Source, Value, exact, kind, WatchedMath>;
  for (int64_t limit : {int64_t{1} << 20, int64_t{512}, int64_t{24}, int64_t{5}}) {
    ImageBatch batch = job.batch;
    cut_rows(&batch, limit);
    for (int64_t warps : {1, 3}) {
      for (int lanes : lane_counts) {
        dst->clear();
        mask->clear();
        run_warps<Body>(batch, warps, lanes);
        CHECK(dst->holds(expected));
        CHECK(batch.mask == nullptr || mask->holds(marks));
      }
    }
  }
}

template <bool exact>
void check_lanes(const ImageJob& job, Destination* dst, Destination* mask,
                 const Bytes& expected, const Bytes& marks) {
  visit_types(job, [&](auto source, auto value) {
    using Source = decltype(source);
    using Value = decltype(value);
    const std::vector<int> lanes{1, 2, 3, 32};
    if (job.last) {
      check_body<Source, Value, exact, ImageRows::kPixels>(job, lanes, dst, mask,
                                                           expected, marks);
      return;
    }
    check_body<Source, Value, exact, ImageRows::kPlanes>(job, lanes, dst, mask,
                                                         expected, marks);
    if constexpr (sizeof(Source) == 1) {
      if (job.batch.channels != 3) return;
      check_body<Source, Value, exact, ImageRows::kPlanesOfPixels>(
          job, lanes, dst, mask, expected, marks);
    }
  });
}

// What the CPU writes; not exact, its sum may be rounded twice.
void check_threads(const ImageCase& made, const ImageJob& job, size_t kind,
                   Destination* dst, Destination* mask, const Bytes& expected,
                   const Bytes& marks) {
  dst->clear();
  mask->clear();
  cpu::image_batch(job, kind);
  CHECK(job.batch.mask == nullptr || mask->holds(marks));
  if (job.exact) {
    CHECK(dst->holds(expected));
    return;
  }
  if (job.value != ImageValue::kFloat) return;  // a rounding may tip another one
  made.each([&](int64_t i, int64_t c, int64_t y, int64_t x) {
    float value = 0;
    if (!made.pixel(i, c, y, x, &value)) return;
    float found;
    memcpy(&found, dst->data() + 4 * made.offset(i, c, y, x), sizeof(found));
    const double mean = static_cast<double>(made.mean[c]);
    const double std = static_cast<double>(made.std[c]);
    const double real = (static_cast<double>(value) - mean) / std;
    const double size = (std::fabs(static_cast<double>(value)) + std::fabs(mean)) / std;
    CHECK(std::fabs(static_cast<double>(found) - real) <= std::ldexp(size, -22));
  });
}

void check_case(ImageCase* made, Random* random) {
  const bool masked = random->between(0, 1) == 0;
  const int64_t shift = random->between(0, 20) * made->value_nbytes;
  const Bytes expected = made->values();
  const Bytes marks = made->marks();
  Destination dst(static_cast<int64_t>(expected.size()), shift);
  Destination mask(static_cast<int64_t>(marks.size()), random->between(0, 20));
  WatchedMath::watched = made;
  ImageJob job = made->job;
  job.batch.dst = dst.data();
  job.batch.mask = masked ? mask.data() : nullptr;
  if (job.exact) {
    check_lanes<true>(job, &dst, &mask, expected, marks);
  } else {
    check_lanes<false>(job, &dst, &mask, expected, marks);
  }
  for (size_t kind = 0; kind < cpu::num_image_kinds(); ++kind) {
    check_threads(*made, job, kind, &dst, &mask, expected, marks);
  }
}

void test_random_batches() {
  Random random(11);
  for (int trial = 0; trial < 400; ++trial) {
    ImageCase made;
    const bool wide = random.between(0, 5) == 0;
    testing::make_case(&made, &random, random.between(0, 3), wide ? 3 : 9,
                       wide ? 700 : 70);
    check_case(&made, &random);
  }
}

// By several threads.
void test_large_batches_are_whole() {
  Random random(12);
  for (int trial = 0; trial < 24; ++trial) {
    ImageCase made;
    testing::make_case(&made, &random, 2, 9, 9);
    made.images.clear();
    made.job.exact = true;
    testing::set_levels(&made, &random);
    ImageBatch& batch = made.job.batch;
    batch.width = trial % 4 == 0 ? 100 : 1333;
    batch.height = (int64_t{1} << 21) / (batch.width * batch.channels) + 7;
    made.numel = 2 * batch.channels * batch.height * batch.width;
    testing::add_images(&made, &random);
    batch.images = made.images.data();
    Bytes dst(static_cast<size_t>(made.numel * made.value_nbytes), kUntouched);
    batch.dst = dst.data();
    cpu::image_batch(made.job);
    bool same = true;
    for (int n = 0; n < 20000; ++n) {
      const int64_t i = random.between(0, 1);
      const int64_t c = random.between(0, batch.channels - 1);
      const int64_t y = random.between(0, batch.height - 1);
      const int64_t x = random.between(0, batch.width - 1);
      const uint32_t bits = made.expected(i, c, y, x);
      const uint8_t* at = dst.data() + made.offset(i, c, y, x) * made.value_nbytes;
      same = same && memcmp(at, &bits, static_cast<size_t>(made.value_nbytes)) == 0;
    }
    CHECK(same);
  }
}

void test_slices_of_images_make_the_whole() {
  Random random(13);
  for (int trial = 0; trial < 30; ++trial) {
    ImageCase made;
    testing::make_case(&made, &random, 5, 6, 40);
    made.job.exact = true;
    testing::set_levels(&made, &random);
    const Bytes expected = made.values();
    const Bytes marks = made.marks();
    Destination dst(static_cast<int64_t>(expected.size()), 0);
    Destination mask(static_cast<int64_t>(marks.size()), 0);
    made.job.batch.dst = dst.data();
    made.job.batch.mask = mask.data();
    for (int64_t first = 0; first < 5; first += 2) {
      ImageJob part = made.job;
      part.batch =
          slice_images(made.job.batch, first, lesser(2, 5 - first), made.value_nbytes);
      cpu::image_batch(part);
    }
    CHECK(dst.holds(expected) && mask.holds(marks));
  }
}

void test_sizes_beyond_32_bits_are_found_exactly() {
  // Addresses without memory: nothing is read.
  constexpr size_t kNumBytes = size_t{70000} * 80000 * 3;
  void* const data = mmap(nullptr, kNumBytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(data != MAP_FAILED);
  ImageBatch batch{};
  const Image image{data, 70000, 80000, 1};
  batch.images = &image;
  batch.num_images = 1;
  batch.channels = 3;
  batch.height = 70001;
  batch.width = 80001;
  cut_rows(&batch, 512);
  CHECK(num_pieces(batch) == int64_t{70001} * 157);
  const ImageSpan last = image_span(batch, batch.images, 70000 * 157 - 1);
  CHECK(last.y == 69999 && last.first == 156 * 512);
  CHECK(last.count == 129 && last.data == 128);
  const auto pixels = pixels_at<uint8_t>(batch, image, last.y, last.first);
  const int64_t distance = pixels.first - static_cast<const uint8_t*>(data);
  CHECK(distance == (int64_t{69999} * 80000 + 156 * 512) * 3);
  munmap(data, kNumBytes);
}

}  // namespace

int main() {
  test_random_batches();
  test_large_batches_are_whole();
  test_slices_of_images_make_the_whole();
  test_sizes_beyond_32_bits_are_found_exactly();
  return finish("image");
}
