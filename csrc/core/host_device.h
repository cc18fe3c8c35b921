// Marks for code that both the host and the CUDA compiler build. This is the only
// file that asks which of them is running.
#pragma once

#if defined(__CUDACC__)
#define PP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PP_HOST_DEVICE inline
#endif

// Before a loop that is rarely long: unrolling it would cost code and registers. The
// host's compiler, which builds the same source, knows no such pragma.
#if defined(__CUDA_ARCH__)
#define PP_ROLLED _Pragma("unroll 1")
#else
#define PP_ROLLED
#endif

// For what vector loops consist of: it must become part of the function around them.
#define PP_INLINED __attribute__((always_inline))
#define PP_HOST_INLINE inline PP_INLINED
