// Attributes of functions that both the host and the CUDA compiler build. No other file
// asks which compiler runs.
#pragma once

#if defined(__CUDACC__)
#define PP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PP_HOST_DEVICE inline
#endif

// Precedes a loop that is rarely long: unrolling it would cost code and registers.
// The host compiler does not know this pragma.
#if defined(__CUDA_ARCH__)
#define PP_ROLLED _Pragma("unroll 1")
#else
#define PP_ROLLED
#endif

// For the bodies of vector loops: the compiler must inline them to vectorise the loop.
#define PP_INLINED __attribute__((always_inline))
#define PP_HOST_INLINE inline PP_INLINED
