#include "cpu/nontemporal.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace pyparallel::cpu {

// Each function names its instruction set. A build flag would not do, because the
// module must load on CPUs without it.
#define PP_AVX2 __attribute__((target("avx2")))
#define PP_AVX512 __attribute__((target("avx512f")))

bool Avx2Lines::supported() { return __builtin_cpu_supports("avx2") != 0; }
bool Avx512Lines::supported() { return __builtin_cpu_supports("avx512f") != 0; }

void Sse2Lines::fence() { _mm_sfence(); }

void Sse2Lines::copy(uint8_t* to, const uint8_t* from, int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const auto* in = reinterpret_cast<const __m128i*>(from + line * kLineBytes);
    auto* out = reinterpret_cast<__m128i*>(to + line * kLineBytes);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}

void Sse2Lines::fill(uint8_t* to, const uint8_t* pattern, int64_t num_lines) {
  const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern));
  auto* out = reinterpret_cast<__m128i*>(to);
  for (int64_t quarter = 0; quarter < 4 * num_lines; ++quarter) {
    _mm_stream_si128(out + quarter, value);
  }
}

PP_AVX2 void Avx2Lines::copy(uint8_t* to, const uint8_t* from, int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const auto* in = reinterpret_cast<const __m256i*>(from + line * kLineBytes);
    auto* out = reinterpret_cast<__m256i*>(to + line * kLineBytes);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
  }
}

PP_AVX2 void Avx2Lines::fill(uint8_t* to, const uint8_t* pattern, int64_t num_lines) {
  const __m256i value = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern)));
  auto* out = reinterpret_cast<__m256i*>(to);
  for (int64_t half = 0; half < 2 * num_lines; ++half) {
    _mm256_stream_si256(out + half, value);
  }
}

PP_AVX512 void Avx512Lines::copy(uint8_t* to, const uint8_t* from, int64_t num_lines) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const __m512i value = _mm512_loadu_si512(from + line * kLineBytes);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + line * kLineBytes), value);
  }
}

PP_AVX512 void Avx512Lines::fill(uint8_t* to, const uint8_t* pattern,
                                 int64_t num_lines) {
  uint8_t repeated[kLineBytes];
  for (int64_t b = 0; b < kLineBytes; b += 16) memcpy(repeated + b, pattern, 16);
  const __m512i value = _mm512_loadu_si512(repeated);
  for (int64_t line = 0; line < num_lines; ++line) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + line * kLineBytes), value);
  }
}

}  // namespace pyparallel::cpu

#endif
