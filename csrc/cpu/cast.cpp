#include "cpu/cast.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <array>
#include <type_traits>
#include <vector>

#include "cpu/instruction_sets.h"

namespace pyparallel::cpu {
namespace {

using CastLoops = std::array<CastLoop, kNumCasts>;

template <typename Cpu, typename Source, typename Value>
void cast_numbers(uint8_t* to, const uint8_t* from, int64_t num) {
  Cpu::run([&]() PP_INLINED { cast_loop<Source, Value>(to, from, num); });
}

#if defined(__x86_64__)

// Not every compiler knows the name of F16C in __builtin_cpu_supports.
bool has_f16c() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

__attribute__((target("avx"))) inline __m256 load_eight(const float* from) {
  return _mm256_loadu_ps(from);
}

__attribute__((target("avx"))) inline __m256 load_eight(const double* from) {
  return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(from + 4)),
                         _mm256_cvtpd_ps(_mm256_loadu_pd(from)));
}

// Rounds eight numbers by one instruction. A loop over to_half needs about twenty.
template <typename Source>
__attribute__((target("avx,f16c"))) void cast_to_halves(uint8_t* to,
                                                        const uint8_t* from,
                                                        int64_t num) {
  const auto* const source = reinterpret_cast<const Source*>(from);
  int64_t i = 0;
  for (; i + 8 <= num; i += 8) {
    const __m128i halves =
        _mm256_cvtps_ph(load_eight(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), halves);
  }
  const auto size = static_cast<int64_t>(sizeof(Source));
  cast_loop<Source, Half>(to + 2 * i, from + size * i, num - i);
}

#endif

std::vector<CastLoops> find_cast_loops() {
  std::vector<CastLoops> variants;
  visit_cpus([&](auto cpu) {
    CastLoops loops{};
    for (size_t i = 1; i < kNumCasts; ++i) {
      loops[i] = visit_cast(static_cast<Cast>(i), [](auto source, auto value) {
        return CastLoop{
            &cast_numbers<decltype(cpu), decltype(source), decltype(value)>};
      });
    }
#if defined(__x86_64__)
    if (!std::is_same_v<decltype(cpu), AnyCpu> && has_f16c()) {
      loops[static_cast<size_t>(Cast::kFloatToHalf)] = &cast_to_halves<float>;
      loops[static_cast<size_t>(Cast::kDoubleToHalf)] = &cast_to_halves<double>;
    }
#endif
    variants.push_back(loops);
  });
  return variants;
}

const std::vector<CastLoops>& cast_variants() {
  static const std::vector<CastLoops> found = find_cast_loops();
  return found;
}

}  // namespace

size_t num_cast_variants() { return cast_variants().size(); }

const CastLoop* cast_loops(size_t variant) { return cast_variants()[variant].data(); }

}  // namespace pyparallel::cpu
