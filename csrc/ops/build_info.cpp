#include "ops/build_info.h"

// The build defines these as quoted strings.
#ifndef PP_BUILD_VERSION
#define PP_BUILD_VERSION "unknown"
#endif
#ifndef PP_BUILD_TORCH
#define PP_BUILD_TORCH "unknown"
#endif
#ifndef PP_BUILD_CUDA
#define PP_BUILD_CUDA ""
#endif
#ifndef PP_BUILD_ARCHS
#define PP_BUILD_ARCHS ""
#endif
#ifndef PP_BUILD_SANITIZE
#define PP_BUILD_SANITIZE ""
#endif

#if defined(__clang__)
#define PP_COMPILER __VERSION__
#else
#define PP_COMPILER "GCC " __VERSION__
#endif

namespace pyparallel::ops {

std::vector<std::pair<std::string, std::string>> build_info() {
  return {{"version", PP_BUILD_VERSION},
          {"torch", PP_BUILD_TORCH},
          {"cuda", PP_BUILD_CUDA},
          {"compiler", PP_COMPILER},
          {"cxx_standard", std::to_string(__cplusplus / 100 % 100)},
          {"archs", PP_BUILD_ARCHS},
          {"sanitize", PP_BUILD_SANITIZE}};
}

}  // namespace pyparallel::ops
