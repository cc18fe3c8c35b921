// Arithmetic, bits, comparisons, conversions and selections of numbers.
#include <algorithm>
#include <cmath>

#include "ptx_step.h"

namespace fakecuda::ptx {
namespace {

template <typename T>
constexpr uint32_t kBits = 8 * sizeof(T);

// Sums and products wrap, so they are computed in unsigned integers.
uint64_t bits(uint64_t value) { return value; }

constexpr auto kAdd = [](auto a, auto b) {
  return static_cast<decltype(a)>(bits(a) + bits(b));
};
constexpr auto kSubtract = [](auto a, auto b) {
  return static_cast<decltype(a)>(bits(a) - bits(b));
};
constexpr auto kMultiplyLow = [](auto a, auto b) {
  return static_cast<decltype(a)>(bits(a) * bits(b));
};
constexpr auto kMultiplyWide = [](auto a, auto b) {
  using Wide = std::conditional_t<std::is_signed_v<decltype(a)>, int64_t, uint64_t>;
  return Wide{a} * Wide{b};
};
constexpr auto kMinimum = [](auto a, auto b) { return std::min(a, b); };
constexpr auto kMaximum = [](auto a, auto b) { return std::max(a, b); };
constexpr auto kNegate = [](auto a) { return kSubtract(decltype(a){0}, a); };
constexpr auto kAnd = [](auto a, auto b) { return static_cast<decltype(a)>(a & b); };
constexpr auto kOr = [](auto a, auto b) { return static_cast<decltype(a)>(a | b); };
constexpr auto kNot = [](auto a) {
  return static_cast<decltype(a)>(std::is_same_v<decltype(a), bool> ? !a : ~bits(a));
};
constexpr auto kEqual = [](auto a, auto b) { return a == b; };
constexpr auto kNotEqual = [](auto a, auto b) { return a != b; };
constexpr auto kLess = [](auto a, auto b) { return a < b; };
constexpr auto kGreaterEqual = [](auto a, auto b) { return a >= b; };
constexpr auto kGreater = [](auto a, auto b) { return a > b; };
constexpr auto kLessEqual = [](auto a, auto b) { return a <= b; };

template <typename To>
constexpr auto kConvert = [](auto from) { return static_cast<To>(from); };

constexpr Types<int16_t, int32_t, int64_t> kSigned;
constexpr Types<uint16_t, uint32_t, uint64_t> kUnsigned;
constexpr Types<bool, uint16_t, uint32_t, uint64_t> kLogical;

template <typename T>
const Instruction* divide(Thread& thread, const Instruction& i) {
  const T a = thread.get<T>(i.operands[1]);
  const T b = thread.get<T>(i.operands[2]);
  if (b == 0) fail(thread, i, "division by zero");
  // The quotient of the smallest integer by -1 wraps.
  const bool negates = std::is_signed_v<T> && b == static_cast<T>(-1);
  thread.set(i.operands[0], negates ? kNegate(a) : static_cast<T>(a / b));
  return &i + 1;
}

template <typename T>
const Instruction* multiply_add_low(Thread& thread, const Instruction& i) {
  const T product =
      kMultiplyLow(thread.get<T>(i.operands[1]), thread.get<T>(i.operands[2]));
  thread.set(i.operands[0], kAdd(product, thread.get<T>(i.operands[3])));
  return &i + 1;
}

template <typename T>
const Instruction* shift_left(Thread& thread, const Instruction& i) {
  const auto count = thread.get<uint32_t>(i.operands[2]);
  const auto value = thread.get<T>(i.operands[1]);
  const uint64_t shifted = count < kBits<T> ? uint64_t{value} << count : 0;
  thread.set(i.operands[0], static_cast<T>(shifted));
  return &i + 1;
}

// Signed integers are filled with their sign.
template <typename T>
const Instruction* shift_right(Thread& thread, const Instruction& i) {
  const auto count = thread.get<uint32_t>(i.operands[2]);
  const auto value = thread.get<T>(i.operands[1]);
  T shifted = value < 0 ? static_cast<T>(-1) : T{0};
  if (count < kBits<T>) shifted = static_cast<T>(value >> count);
  thread.set(i.operands[0], shifted);
  return &i + 1;
}

template <typename T>
const Instruction* insert(Thread& thread, const Instruction& i) {
  const auto field = thread.get<T>(i.operands[1]);
  const auto value = thread.get<T>(i.operands[2]);
  const uint32_t begin = thread.get<uint32_t>(i.operands[3]) & 255;
  const uint32_t count = thread.get<uint32_t>(i.operands[4]) & 255;
  T result = value;
  if (begin < kBits<T>) {
    const T low = count < kBits<T> ? (T{1} << count) - 1 : ~T{0};
    const T mask = low << begin;
    result = (value & ~mask) | (field << begin & mask);
  }
  thread.set(i.operands[0], result);
  return &i + 1;
}

template <typename T>
const Instruction* select(Thread& thread, const Instruction& i) {
  const bool first = thread.get<bool>(i.operands[3]);
  thread.set(i.operands[0], thread.get<T>(i.operands[first ? 1 : 2]));
  return &i + 1;
}

void decode_multiply(Statement& s, Instruction* i) {
  s.take("lo");
  static const Decode kDecode = binary_decoder<kMultiplyLow>(kIntegers);
  kDecode(s, i);
}

void decode_multiply_add(Statement& s, Instruction* i) {
  s.take("lo");
  static const Decode kDecode = typed(
      kIntegers, [](auto t) { return &multiply_add_low<typename decltype(t)::type>; },
      {"", "", "", ""});
  kDecode(s, i);
}

void decode_compare(Statement& s, Instruction* i) {
  static const Opcodes kComparisons{
      {"eq", binary_decoder<kEqual>(kIntegers, "pred")},
      {"ne", binary_decoder<kNotEqual>(kIntegers, "pred")},
      {"lt", binary_decoder<kLess>(kIntegers, "pred")},
      {"ge", binary_decoder<kGreaterEqual>(kIntegers, "pred")},
      {"gt", binary_decoder<kGreater>(kIntegers, "pred")},
      {"le", binary_decoder<kLessEqual>(kIntegers, "pred")}};
  for (const auto& [name, decode] : kComparisons) {
    if (s.take(name.c_str())) return decode(s, i);
  }
  s.fail("unknown comparison of setp");
}

// Floating-point numbers are selected as their bits.
void decode_select(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit(kUnsigned, s, "u" + std::to_string(8 * size_of(type)),
                 [](auto t) { return &select<typename decltype(t)::type>; });
  s.use(i, {type, type, type, "pred"});
}

void decode_convert(Statement& s, Instruction* i) {
  const std::string to = s.take_type();
  const std::string from = s.take_type();
  i->run = visit(kAllIntegers, s, to, [&](auto target) {
    using To = typename decltype(target)::type;
    return visit(kAllIntegers, s, from, [](auto source) {
      return &unary<kConvert<To>, typename decltype(source)::type>;
    });
  });
  s.finish(2);
  i->operands[0] = s.write(s.operand(0), to, true);
  i->operands[1] = s.read(s.operand(1), from, true);
}

// Returns the number, or the NaN that arithmetic returns.
float canonical(float value) {
  constexpr uint32_t kNan = 0x7FFFFFFF;
  if (std::isnan(value)) memcpy(&value, &kNan, sizeof(value));
  return value;
}

constexpr auto kNegateFloat = [](float a) { return canonical(-a); };
constexpr auto kMultiplyFloat = [](float a, float b) { return canonical(a * b); };
constexpr auto kSubtractFloat = [](float a, float b) { return canonical(a - b); };
constexpr auto kDivideFloat = [](float a, float b) { return canonical(a / b); };
constexpr auto kFromInteger = [](auto value) { return static_cast<float>(value); };

const Instruction* multiply_add(Thread& thread, const Instruction& i) {
  const auto a = thread.get<float>(i.operands[1]);
  const auto b = thread.get<float>(i.operands[2]);
  thread.set(i.operands[0],
             canonical(std::fma(a, b, thread.get<float>(i.operands[3]))));
  return &i + 1;
}

// Rounds to the nearest number of 16 bits with a precision of `digits` and a smallest
// positive number of 2^least.
template <int digits, int least>
uint16_t narrow(float value) {
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

constexpr auto kToHalf = &narrow<11, -24>;
constexpr auto kToBfloat16 = &narrow<8, -133>;

// Rounds two numbers into one register, the first into the high half.
template <const auto& f>
uint32_t narrow_two(float high, float low) {
  return uint32_t{f(high)} << 16 | f(low);
}

constexpr auto kToHalves = &narrow_two<kToHalf>;
constexpr auto kToBfloat16s = &narrow_two<kToBfloat16>;

}  // namespace

Opcodes arithmetic_opcodes() {
  return {
      {"add", binary_decoder<kAdd>(kIntegers)},
      {"sub", binary_decoder<kSubtract>(kIntegers)},
      {"mul", decode_multiply},
      {"mul.wide.s32", fixed(&binary<kMultiplyWide, int32_t>, {"s64", "s32", "s32"})},
      {"mul.wide.u32", fixed(&binary<kMultiplyWide, uint32_t>, {"u64", "u32", "u32"})},
      {"div",
       typed(kIntegers, [](auto t) { return &divide<typename decltype(t)::type>; },
             {"", "", ""})},
      {"min", binary_decoder<kMinimum>(kIntegers)},
      {"max", binary_decoder<kMaximum>(kIntegers)},
      {"mad", decode_multiply_add},
      {"neg", unary_decoder<kNegate>(kSigned)},
      {"and", binary_decoder<kAnd>(kLogical)},
      {"or", binary_decoder<kOr>(kLogical)},
      {"not", unary_decoder<kNot>(kLogical)},
      {"shl",
       typed(kUnsigned, [](auto t) { return &shift_left<typename decltype(t)::type>; },
             {"", "", "u32"})},
      {"shr",
       typed(kIntegers, [](auto t) { return &shift_right<typename decltype(t)::type>; },
             {"", "", "u32"})},
      {"bfi",
       typed(kUnsigned, [](auto t) { return &insert<typename decltype(t)::type>; },
             {"", "", "", "u32", "u32"})},
      {"setp", decode_compare},
      {"selp", decode_select},
      {"cvt", decode_convert},
      {"neg.f32", fixed(&unary<kNegateFloat, float>, {"f32", "f32"})},
      {"mul.rn.f32", fixed(&binary<kMultiplyFloat, float>, {"f32", "f32", "f32"})},
      {"sub.rn.f32", fixed(&binary<kSubtractFloat, float>, {"f32", "f32", "f32"})},
      {"div.rn.f32", fixed(&binary<kDivideFloat, float>, {"f32", "f32", "f32"})},
      {"fma.rn.f32", fixed(&multiply_add, {"f32", "f32", "f32", "f32"})},
      {"cvt.rn.f32.u16", fixed(&unary<kFromInteger, uint16_t>, {"f32", "u16"})},
      {"cvt.rn.f32.u32", fixed(&unary<kFromInteger, uint32_t>, {"f32", "u32"})},
      {"cvt.rn.f16.f32", fixed(&unary<kToHalf, float>, {"u16", "f32"})},
      {"cvt.rn.bf16.f32", fixed(&unary<kToBfloat16, float>, {"u16", "f32"})},
      {"cvt.rn.f16x2.f32", fixed(&binary<kToHalves, float>, {"u32", "f32", "f32"})},
      {"cvt.rn.bf16x2.f32",
       fixed(&binary<kToBfloat16s, float>, {"u32", "f32", "f32"})}};
}

}  // namespace fakecuda::ptx
