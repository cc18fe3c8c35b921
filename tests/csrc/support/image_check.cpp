#include "image_check.h"

#include <cmath>
#include <cstring>

#include "check.h"
#include "core/image/lanes.h"
#include "cpu/image.h"
#include "destination.h"
#include "watched.h"
#include "workers.h"

namespace pyparallel::testing {
namespace {

// Allows only reads of watched memory, and only aligned reads of words.
struct WatchedMath : HostMath {
  template <typename Word>
  static Word load(const Word* from) {
    Watched::check(from, sizeof(Word));
    return HostMath::load(from);
  }

  static void load_four(const float* from, float* to) {
    Watched::check(from, 16);
    HostMath::load_four(from, to);
  }

  static void store(void* to, const uint32_t (&words)[4]) {
    CHECK(reinterpret_cast<uintptr_t>(to) % 16 == 0);
    HostMath::store(to, words);
  }
};

template <typename Source, typename Value, bool exact, RowLayout kind>
void check_body(const ImageJob& job, const ImageRuns& runs, Destination* dst,
                Destination* mask, const Bytes& expected, const Bytes& mask_bytes) {
  using Body = ImageLanes<Source, Value, exact, kind, WatchedMath>;
  for (int64_t limit : runs.limits) {
    ImageBatch batch = job.batch;
    cut_rows(&batch, limit);
    for (int64_t warps : runs.warps) {
      for (int lanes : runs.lanes) {
        dst->clear();
        mask->clear();
        run_warps(Body{batch, batch.images}, num_pieces(batch), warps, lanes);
        CHECK(dst->holds(expected));
        CHECK(batch.mask == nullptr || mask->holds(mask_bytes));
      }
    }
  }
}

template <bool exact>
void check_lanes(const ImageJob& job, const ImageRuns& runs, Destination* dst,
                 Destination* mask, const Bytes& expected, const Bytes& mask_bytes) {
  visit_types(job, [&](auto source, auto value) {
    using Source = decltype(source);
    using Value = decltype(value);
    if (job.last) {
      check_body<Source, Value, exact, RowLayout::kPixels>(job, runs, dst, mask,
                                                           expected, mask_bytes);
      return;
    }
    check_body<Source, Value, exact, RowLayout::kPlanes>(job, runs, dst, mask, expected,
                                                         mask_bytes);
    if constexpr (sizeof(Source) == 1) {
      if (job.batch.channels != 3) return;
      check_body<Source, Value, exact, RowLayout::kPlanesOfPixels>(
          job, runs, dst, mask, expected, mask_bytes);
    }
  });
}

// Checks the results of the CPU. If they are not exact, sums may be rounded twice.
void check_threads(const ImageCase& made, const ImageJob& job, size_t kind,
                   Destination* dst, Destination* mask, const Bytes& expected,
                   const Bytes& mask_bytes) {
  dst->clear();
  mask->clear();
  cpu::image_batch(job, kind);
  CHECK(job.batch.mask == nullptr || mask->holds(mask_bytes));
  if (job.exact) {
    CHECK(dst->holds(expected));
    return;
  }
  if (job.value != ImageValue::kFloat) return;  // one rounding may change the next one
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

}  // namespace

void check_images(const ImageCase& made, ImagePlaces places, const ImageRuns& runs) {
  const bool masked = places.mask >= 0;
  const Bytes expected = made.values();
  const Bytes mask_bytes = made.mask_bytes();
  Destination dst(static_cast<int64_t>(expected.size()), places.dst);
  Destination mask(static_cast<int64_t>(mask_bytes.size()), masked ? places.mask : 0);
  Watched::forget();
  for (const Image& image : made.images) {
    const int64_t itemsize = made.job.source == ImageSource::kByte ? 1 : 4;
    const int64_t area = int64_t{image.height} * image.width;
    Watched::allow(image.data, area * made.job.batch.channels * itemsize);
  }
  ImageJob job = made.job;
  job.batch.dst = dst.data();
  job.batch.mask = masked ? mask.data() : nullptr;
  if (job.exact) {
    check_lanes<true>(job, runs, &dst, &mask, expected, mask_bytes);
  } else {
    check_lanes<false>(job, runs, &dst, &mask, expected, mask_bytes);
  }
  for (size_t kind = 0; kind < cpu::num_image_variants(); ++kind) {
    check_threads(made, job, kind, &dst, &mask, expected, mask_bytes);
  }
}

}  // namespace pyparallel::testing
