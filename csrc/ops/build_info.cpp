#include "ops/build_info.h"

// The build defines these as quoted strings.
#ifndef PP_VERSION
#define PP_VERSION "unknown"
#endif
#ifndef PP_TORCH_VERSION
#define PP_TORCH_VERSION "unknown"
#endif
#ifndef PP_CUDA_VERSION
#define PP_CUDA_VERSION ""
#endif
#ifndef PP_ARCHS
#define PP_ARCHS ""
#endif

#if defined(__clang__)
#define PP_COMPILER __VERSION__
#else
#define PP_COMPILER "GCC " __VERSION__
#endif

namespace pyparallel::ops {

std::vector<std::pair<std::string, std::string>> build_info() {
  return {{"version", PP_VERSION},
          {"torch", PP_TORCH_VERSION},
          {"cuda", PP_CUDA_VERSION},
          {"compiler", PP_COMPILER},
          {"cxx_standard", std::to_string(__cplusplus / 100 % 100)},
          {"archs", PP_ARCHS}};
}

}  // namespace pyparallel::ops
