// Arithmetic, bits, comparisons and conversions of integers; selections.
#include <algorithm>

#include "ptx_step.h"

namespace fakecuda::ptx {
namespace {

template <typename T>
constexpr uint32_t kBits = 8 * sizeof(T);

// Sums and products wrap, so they are computed in unsigned integers.
uint64_t bits(uint64_t value) { return value; }

struct Add {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(bits(a) + bits(b));
  }
};

struct Subtract {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(bits(a) - bits(b));
  }
};

struct MultiplyLow {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(bits(a) * bits(b));
  }
};

template <typename Wide>
struct MultiplyWide {
  static Wide apply(Wide a, Wide b) { return a * b; }
};

struct Minimum {
  template <typename T>
  static T apply(T a, T b) {
    return std::min(a, b);
  }
};

struct Maximum {
  template <typename T>
  static T apply(T a, T b) {
    return std::max(a, b);
  }
};

struct Negate {
  template <typename T>
  static T apply(T a) {
    return Subtract::apply<T>(0, a);
  }
};

template <typename T>
const Instruction* divide(Thread& thread, const Instruction& i) {
  const T a = thread.get<T>(i.operands[1]);
  const T b = thread.get<T>(i.operands[2]);
  if (b == 0) fail(thread, i, "division by zero");
  // The quotient of the smallest integer by -1 wraps.
  const bool negates = std::is_signed_v<T> && b == static_cast<T>(-1);
  thread.set(i.operands[0], negates ? Negate::apply(a) : static_cast<T>(a / b));
  return &i + 1;
}

struct And {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Not {
  template <typename T>
  static T apply(T a) {
    return static_cast<T>(std::is_same_v<T, bool> ? !a : ~bits(a));
  }
};

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

struct Equal {
  template <typename T>
  static bool apply(T a, T b) {
    return a == b;
  }
};

struct Less {
  template <typename T>
  static bool apply(T a, T b) {
    return a < b;
  }
};

template <typename F>
struct Complement {
  template <typename T>
  static bool apply(T a, T b) {
    return !F::apply(a, b);
  }
};

template <typename F>
struct Swapped {
  template <typename T>
  static bool apply(T a, T b) {
    return F::apply(b, a);
  }
};

template <typename T>
const Instruction* select(Thread& thread, const Instruction& i) {
  const bool first = thread.get<bool>(i.operands[3]);
  thread.set(i.operands[0], thread.get<T>(i.operands[first ? 1 : 2]));
  return &i + 1;
}

template <typename To>
struct Convert {
  template <typename From>
  static To apply(From from) {
    return static_cast<To>(from);
  }
};

template <typename F>
void decode_binary(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit_integers(
      s, type, [](auto t) { return &binary<F, typename decltype(t)::type>; });
  s.use(i, {type, type, type});
}

void decode_multiply(Statement& s, Instruction* i) {
  s.take("lo");
  decode_binary<MultiplyLow>(s, i);
}

void decode_negate(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<int16_t, int32_t, int64_t>(
      s, type, [](auto t) { return &unary<Negate, typename decltype(t)::type>; });
  s.use(i, {type, type});
}

void decode_divide(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit_integers(s, type,
                          [](auto t) { return &divide<typename decltype(t)::type>; });
  s.use(i, {type, type, type});
}

template <typename F>
void decode_logic(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<bool, uint16_t, uint32_t, uint64_t>(
      s, type, [](auto t) { return &binary<F, typename decltype(t)::type>; });
  s.use(i, {type, type, type});
}

void decode_not(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<bool, uint16_t, uint32_t, uint64_t>(
      s, type, [](auto t) { return &unary<Not, typename decltype(t)::type>; });
  s.use(i, {type, type});
}

void decode_shift_left(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<uint16_t, uint32_t, uint64_t>(
      s, type, [](auto t) { return &shift_left<typename decltype(t)::type>; });
  s.use(i, {type, type, "u32"});
}

void decode_shift_right(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit_integers(
      s, type, [](auto t) { return &shift_right<typename decltype(t)::type>; });
  s.use(i, {type, type, "u32"});
}

void decode_insert(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<uint32_t, uint64_t>(
      s, type, [](auto t) { return &insert<typename decltype(t)::type>; });
  s.use(i, {type, type, type, "u32", "u32"});
}

template <typename F>
void compare_with(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit_integers(
      s, type, [](auto t) { return &binary<F, typename decltype(t)::type>; });
  s.use(i, {"pred", type, type});
}

void decode_compare(Statement& s, Instruction* i) {
  if (s.take("eq")) return compare_with<Equal>(s, i);
  if (s.take("ne")) return compare_with<Complement<Equal>>(s, i);
  if (s.take("lt")) return compare_with<Less>(s, i);
  if (s.take("ge")) return compare_with<Complement<Less>>(s, i);
  if (s.take("gt")) return compare_with<Swapped<Less>>(s, i);
  if (s.take("le")) return compare_with<Complement<Swapped<Less>>>(s, i);
  s.fail("unknown comparison of setp");
}

// Floating-point numbers are selected as their bits.
void decode_select(Statement& s, Instruction* i) {
  const std::string type = s.take_type();
  i->run = visit<uint16_t, uint32_t, uint64_t>(
      s, "u" + std::to_string(8 * size_of(type)),
      [](auto t) { return &select<typename decltype(t)::type>; });
  s.use(i, {type, type, type, "pred"});
}

void decode_convert(Statement& s, Instruction* i) {
  const std::string to = s.take_type();
  const std::string from = s.take_type();
  i->run = visit_all_integers(s, to, [&](auto target) {
    using To = typename decltype(target)::type;
    return visit_all_integers(s, from, [](auto source) {
      return &unary<Convert<To>, typename decltype(source)::type>;
    });
  });
  s.finish(2);
  i->operands[0] = s.write(s.operand(0), to, true);
  i->operands[1] = s.read(s.operand(1), from, true);
}

}  // namespace

Opcodes integer_opcodes() {
  return {{"add", decode_binary<Add>},
          {"sub", decode_binary<Subtract>},
          {"mul", decode_multiply},
          {"mul.wide.s32",
           fixed(&binary<MultiplyWide<int64_t>, int32_t>, {"s64", "s32", "s32"})},
          {"mul.wide.u32",
           fixed(&binary<MultiplyWide<uint64_t>, uint32_t>, {"u64", "u32", "u32"})},
          {"div", decode_divide},
          {"min", decode_binary<Minimum>},
          {"max", decode_binary<Maximum>},
          {"neg", decode_negate},
          {"and", decode_logic<And>},
          {"or", decode_logic<Or>},
          {"not", decode_not},
          {"shl", decode_shift_left},
          {"shr", decode_shift_right},
          {"bfi", decode_insert},
          {"setp", decode_compare},
          {"selp", decode_select},
          {"cvt", decode_convert}};
}

}  // namespace fakecuda::ptx
