// Arithmetic and conversions of floating-point numbers.
#include <algorithm>
#include <cmath>

#include "ptx_step.h"

namespace fakecuda::ptx {
namespace {

// Returns the number, or the NaN that arithmetic returns.
float canonical(float value) {
  constexpr uint32_t kNan = 0x7FFFFFFF;
  if (std::isnan(value)) memcpy(&value, &kNan, sizeof(value));
  return value;
}

struct Subtract {
  static float apply(float a, float b) { return canonical(a - b); }
};

struct Divide {
  static float apply(float a, float b) { return canonical(a / b); }
};

const Instruction* multiply_add(Thread& thread, const Instruction& i) {
  const auto a = thread.get<float>(i.operands[1]);
  const auto b = thread.get<float>(i.operands[2]);
  thread.set(i.operands[0],
             canonical(std::fma(a, b, thread.get<float>(i.operands[3]))));
  return &i + 1;
}

struct FromInteger {
  template <typename T>
  static float apply(T value) {
    return static_cast<float>(value);
  }
};

// Rounds to the nearest number of 16 bits with a precision of `digits` and a smallest
// positive number of 2^least.
template <int digits, int least>
struct Narrow {
  static uint16_t apply(float value) {
    if (std::isnan(value)) return 0x7FFF;
    constexpr uint32_t kUnit = 1 << (digits - 1);
    constexpr uint32_t kInfinity = 0x8000 - kUnit;
    uint32_t magnitude = value == 0 ? 0 : kInfinity;
    if (value != 0 && std::isfinite(value)) {
      int exponent;
      std::frexp(value, &exponent);
      const int last = std::max(exponent - digits, least);
      const auto rounded = std::nearbyint(std::ldexp(std::fabs(value), -last));
      // Beyond the largest number the exponent is infinity's, or greater.
      const uint32_t shifted = static_cast<uint32_t>(last - least) * kUnit;
      magnitude = std::min(shifted + static_cast<uint32_t>(rounded), kInfinity);
    }
    return static_cast<uint16_t>(magnitude | (std::signbit(value) ? 0x8000 : 0));
  }
};

using ToHalf = Narrow<11, -24>;
using ToBfloat16 = Narrow<8, -133>;

// Rounds two numbers into one register, the first into the high half.
template <typename F>
struct Pair {
  static uint32_t apply(float high, float low) {
    return uint32_t{F::apply(high)} << 16 | F::apply(low);
  }
};

}  // namespace

Opcodes float_opcodes() {
  return {
      {"sub.rn.f32", fixed(&binary<Subtract, float>, {"f32", "f32", "f32"})},
      {"div.rn.f32", fixed(&binary<Divide, float>, {"f32", "f32", "f32"})},
      {"fma.rn.f32", fixed(&multiply_add, {"f32", "f32", "f32", "f32"})},
      {"cvt.rn.f32.u16", fixed(&unary<FromInteger, uint16_t>, {"f32", "u16"})},
      {"cvt.rn.f32.u32", fixed(&unary<FromInteger, uint32_t>, {"f32", "u32"})},
      {"cvt.rn.f16.f32", fixed(&unary<ToHalf, float>, {"u16", "f32"})},
      {"cvt.rn.bf16.f32", fixed(&unary<ToBfloat16, float>, {"u16", "f32"})},
      {"cvt.rn.f16x2.f32", fixed(&binary<Pair<ToHalf>, float>, {"u32", "f32", "f32"})},
      {"cvt.rn.bf16x2.f32",
       fixed(&binary<Pair<ToBfloat16>, float>, {"u32", "f32", "f32"})}};
}

}  // namespace fakecuda::ptx
