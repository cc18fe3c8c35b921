// Image batches of several threads, in slices, and beyond 32 bits, against an oracle
// that computes one value at a time. fuzz_image.cpp has small batches.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/image/lanes.h"
#include "cpu/image.h"
#include "destination.h"
#include "image_batch.h"
#include "image_check.h"

namespace {

using namespace pyparallel;
using testing::Bytes;
using testing::Destination;
using testing::ImageCase;

// By several threads.
TEST(test_large_batches_are_whole) {
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
    Bytes dst(static_cast<size_t>(made.numel * made.value_nbytes), 0xEE);
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

// One channel at a time has a std that three operations cannot divide by.
TEST(test_channels_without_an_inverse_are_divided) {
  Random random(14);
  testing::ImageRuns runs;
  runs.limits = {512};
  runs.warps = {2};
  runs.lanes = {3, 32};
  for (int trial = 0; trial < 60; ++trial) {
    ImageCase made;
    testing::make_case(&made, &random, 2, 3, 70);
    made.images.clear();
    made.job.exact = true;
    made.job.source = ImageSource::kByte;
    testing::set_levels(&made, &random);
    const int channel = trial % made.job.batch.channels;
    made.mean[channel] = 0.5f;
    made.std[channel] = trial % 2 == 0 ? 1e-42f : 1e30f;
    const Level level = make_level(made.mean[channel], made.std[channel], 1, true);
    made.job.batch.levels.set(channel, level);
    testing::add_images(&made, &random);
    made.job.batch.images = made.images.data();
    testing::check_images(made, {0, -1}, runs);
  }
}

TEST(test_slices_of_images_make_the_whole) {
  Random random(13);
  for (int trial = 0; trial < 30; ++trial) {
    ImageCase made;
    testing::make_case(&made, &random, 5, 6, 40);
    made.job.exact = true;
    testing::set_levels(&made, &random);
    const Bytes expected = made.values();
    const Bytes mask_bytes = made.mask_bytes();
    Destination dst(static_cast<int64_t>(expected.size()), 0);
    Destination mask(static_cast<int64_t>(mask_bytes.size()), 0);
    made.job.batch.dst = dst.data();
    made.job.batch.mask = mask.data();
    for (int64_t first = 0; first < 5; first += 2) {
      ImageJob part = made.job;
      part.batch =
          slice_images(made.job.batch, first, lesser(2, 5 - first), made.value_nbytes);
      cpu::image_batch(part);
    }
    CHECK(dst.holds(expected) && mask.holds(mask_bytes));
  }
}

TEST(test_sizes_beyond_32_bits_are_found_exactly) {
  // Addresses without memory: no body reads them.
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
