/* A copy that goes past the caches: the yardstick for outputs larger than them. */

#if !defined(__x86_64__)
#error "limits.c must be compiled for x86-64: its stores are those of SSE2 and AVX."
#endif

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

__attribute__((target("avx"))) static void stream_avx(char* dst, const char* src,
                                                      size_t n) {
  for (size_t i = 0; i < n; i += 128) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)(src + i));
    const __m256i b = _mm256_loadu_si256((const __m256i*)(src + i + 32));
    const __m256i c = _mm256_loadu_si256((const __m256i*)(src + i + 64));
    const __m256i d = _mm256_loadu_si256((const __m256i*)(src + i + 96));
    _mm256_stream_si256((__m256i*)(dst + i), a);
    _mm256_stream_si256((__m256i*)(dst + i + 32), b);
    _mm256_stream_si256((__m256i*)(dst + i + 64), c);
    _mm256_stream_si256((__m256i*)(dst + i + 96), d);
  }
}

static void stream_sse2(char* dst, const char* src, size_t n) {
  for (size_t i = 0; i < n; i += 64) {
    const __m128i a = _mm_loadu_si128((const __m128i*)(src + i));
    const __m128i b = _mm_loadu_si128((const __m128i*)(src + i + 16));
    const __m128i c = _mm_loadu_si128((const __m128i*)(src + i + 32));
    const __m128i d = _mm_loadu_si128((const __m128i*)(src + i + 48));
    _mm_stream_si128((__m128i*)(dst + i), a);
    _mm_stream_si128((__m128i*)(dst + i + 16), b);
    _mm_stream_si128((__m128i*)(dst + i + 32), c);
    _mm_stream_si128((__m128i*)(dst + i + 48), d);
  }
}

/* Copy n bytes with non-temporal stores; what is not a whole block goes by memcpy. */
void nontemporal_memcpy(char* dst, const char* src, size_t n) {
  size_t head = (64 - ((uintptr_t)dst & 63)) & 63;
  if (head > n) head = n;
  const size_t blocks = (n - head) / 128 * 128;
  memcpy(dst, src, head);
  if (__builtin_cpu_supports("avx")) {
    stream_avx(dst + head, src + head, blocks);
  } else {
    stream_sse2(dst + head, src + head, blocks);
  }
  _mm_sfence();
  memcpy(dst + head + blocks, src + head + blocks, n - head - blocks);
}
