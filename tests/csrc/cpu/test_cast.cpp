// The loops of casts for every instruction set, and the launchers with casts.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "core/box_plan.h"
#include "core/pack.h"
#include "cpu/cast.h"
#include "cpu/launch.h"

namespace {

using namespace pyparallel;

constexpr size_t kMost = 4 * 5003;  // numbers: not a whole number of vectors

template <typename Source>
std::vector<uint8_t> make_sources(Random* random) {
  std::vector<uint8_t> bytes(kMost * sizeof(Source));
  for (size_t i = 0; i < kMost; ++i) {
    // Numbers of every size that a float16 can hold, smaller ones and larger ones.
    const auto power = static_cast<int>(random->between(-30, 20));
    auto number = static_cast<Source>(random->between(-4095, 4095));
    for (int p = 0; p < power; ++p) number *= 2;
    for (int p = 0; p > power; --p) number /= 2;
    memcpy(bytes.data() + i * sizeof(number), &number, sizeof(number));
  }
  return bytes;
}

std::vector<uint8_t> sources_of(Cast cast, Random* random) {
  return visit_cast(
      cast, [&](auto source, auto) { return make_sources<decltype(source)>(random); });
}

// Returns the results one by one, in the arithmetic that test_half.cpp checks.
std::vector<uint8_t> cast_slowly(Cast cast, const std::vector<uint8_t>& from) {
  return visit_cast(cast, [&](auto source, auto value) {
    std::vector<uint8_t> to(kMost * sizeof(value));
    for (size_t i = 0; i < kMost; ++i) {
      memcpy(&source, from.data() + i * sizeof(source), sizeof(source));
      value = HostMath::round(static_cast<float>(source), value);
      memcpy(to.data() + i * sizeof(value), &value, sizeof(value));
    }
    return to;
  });
}

template <typename Check>
void for_each_cast(const Check& check) {
  Random random(4);
  for (size_t i = 1; i < kNumCasts; ++i) {
    const auto cast = static_cast<Cast>(i);
    const std::vector<uint8_t> from = sources_of(cast, &random);
    check(cast, from, cast_slowly(cast, from));
  }
}

TEST(test_every_variant_makes_the_same_numbers) {
  for_each_cast([](Cast cast, const auto& from, const auto& expected) {
    for (size_t variant = 0; variant < cpu::num_cast_variants(); ++variant) {
      CHECK(cpu::cast_loops(variant)[0] == nullptr);
      const CastLoop loop = cpu::cast_loops(variant)[static_cast<size_t>(cast)];
      for (size_t num : {size_t{0}, size_t{1}, size_t{7}, size_t{9}, kMost}) {
        std::vector<uint8_t> to(expected.size() / kMost * num);
        // An odd address, because numpy can make one.
        std::vector<uint8_t> shifted(from.size() + 1);
        std::copy(from.begin(), from.end(), shifted.begin() + 1);
        loop(to.data(), shifted.data() + 1, static_cast<int64_t>(num));
        CHECK(std::equal(to.begin(), to.end(), expected.begin()));
      }
    }
  });
}

TEST(test_samples_are_cast_at_their_places) {
  for_each_cast([](Cast cast, const auto& from, const auto& expected) {
    const auto itemsize = static_cast<int64_t>(expected.size() / kMost);
    // Two samples of 4 x 2000 and 3 x 1500 numbers, the second one at (1, 7).
    const char pad[8] = {1, 2, 3, 4};
    const Fill fill = repeat_fill(pad, itemsize);
    const PadShapes shapes{
        itemsize,           {5, 2100},
        {4, 2000, 3, 1500}, {{from.data(), fill}, {from.data(), fill}},
        {0, 0, 1, 7},       source_ratio(cast)};
    std::vector<uint8_t> dst(static_cast<size_t>(2 * 5 * 2100 * itemsize), 0xEE);
    const BoxPlan plan(dst.data(), shapes);
    cpu::pad_copy(plan.table(), kNoBoxes, cast);
    const auto size = static_cast<size_t>(itemsize);
    for (size_t n = 0; n < 2; ++n) {
      for (size_t y = 0; y < 5; ++y) {
        for (size_t x = 0; x < 2100; ++x) {
          const bool inside =
              n == 0 ? y < 4 && x < 2000 : y >= 1 && y < 4 && x >= 7 && x < 1507;
          const size_t at = n == 0 ? y * 2000 + x : (y - 1) * 1500 + x - 7;
          const uint8_t* const found = dst.data() + ((n * 5 + y) * 2100 + x) * size;
          const auto* const want = inside ? expected.data() + at * size
                                          : reinterpret_cast<const uint8_t*>(pad);
          CHECK(memcmp(found, want, size) == 0);
        }
      }
    }
  });
}

TEST(test_leaves_are_cast_into_their_slots_beside_others) {
  for_each_cast([](Cast cast, const auto& from, const auto& expected) {
    const auto nbytes = static_cast<int64_t>(expected.size());
    int64_t next = 0;
    CHECK(next_slot(0, nbytes, &next));
    const int64_t last = next + 64;
    const Slot slots[] = {
        {from.data(), 0, nbytes}, {from.data(), next, 24}, {from.data(), last, nbytes}};
    const Cast casts[] = {cast, Cast::kNone, cast};
    std::vector<uint8_t> slab(static_cast<size_t>(last + next), 0xEE);
    cpu::pack({slab.data(), last + next, 1, slots, 3, 0, casts});
    CHECK(std::equal(expected.begin(), expected.end(), slab.begin()));
    CHECK(std::equal(expected.begin(), expected.end(), slab.begin() + last));
    CHECK(std::equal(from.begin(), from.begin() + 24, slab.begin() + next));
    CHECK(slab[static_cast<size_t>(next) + 24] == 0);
  });
}

}  // namespace
