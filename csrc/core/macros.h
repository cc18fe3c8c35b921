// Marks for code that both the host and the CUDA compiler build. This is the only
// file that asks which of them is running.
#pragma once

#if defined(__CUDACC__)
#define PP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PP_HOST_DEVICE inline
#endif
