// The instruction sets for which loops are compiled. run(work) compiles the inlined
// `work` for one of them. A build flag would not do, because the module must load on
// CPUs without these instructions.
#pragma once

#include "core/image/math.h"

namespace pyparallel::cpu {

struct AnyCpu {
#if defined(__FP_FAST_FMAF)
  using Math = HostMath;
#else
  using Math = RoundingTwiceMath;
#endif
  static bool supported() { return true; }
  template <typename Work>
  static void run(const Work& work) {
    work();
  }
};

#if defined(__x86_64__)

struct Avx2Cpu {
  using Math = HostMath;
  static bool supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  template <typename Work>
  __attribute__((target("avx2,fma"))) static void run(const Work& work) {
    work();
  }
};

struct Avx512Cpu {
  using Math = HostMath;
  static bool supported() {
    return Avx2Cpu::supported() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  }
  template <typename Work>
  __attribute__((
      target("avx512f,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512"))) static void
  run(const Work& work) {
    work();
  }
};

#endif

// Calls visit(Cpu{}) with each instruction set that this CPU supports, the fastest
// first.
template <typename Visit>
void visit_cpus(const Visit& visit) {
#if defined(__x86_64__)
  if (Avx512Cpu::supported()) visit(Avx512Cpu{});
  if (Avx2Cpu::supported()) visit(Avx2Cpu{});
#endif
  visit(AnyCpu{});
}

}  // namespace pyparallel::cpu
