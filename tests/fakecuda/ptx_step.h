// Steps of instructions with a destination and one to three sources.
#pragma once

#include "ptx_statement.h"

namespace fakecuda::ptx {

template <typename T>
struct Tag {
  using type = T;
};

template <typename... T>
struct Types {};

constexpr Types<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t> kIntegers;
constexpr Types<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t,
                int64_t>
    kAllIntegers;

template <typename T>
std::string name_of() {
  if (std::is_same_v<T, bool>) return "pred";
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(8 * sizeof(T));
}

// Calls `choose` with the tag of the type that has the name. Fails if no T has it.
template <typename... T, typename Choose>
Step visit(Types<T...>, const Statement& statement, const std::string& name,
           Choose choose) {
  Step chosen = nullptr;
  ((name == name_of<T>() && (chosen = choose(Tag<T>{}))) || ...);
  if (!chosen) statement.fail("unknown type ." + name + " of " + statement.opcode());
  return chosen;
}

// Returns the decoder of a word with one type, and of operands with these types; "" is
// the type of the word.
template <typename T, typename Choose>
Decode typed(T types, Choose choose, const std::vector<std::string>& operands) {
  return [=](Statement& statement, Instruction* instruction) {
    const std::string type = statement.take_type();
    instruction->run = visit(types, statement, type, choose);
    std::vector<std::string> all = operands;
    for (std::string& each : all) {
      if (each.empty()) each = type;
    }
    statement.use(instruction, all);
  };
}

// Applies f to the sources of type T. The destination has the type that f returns.
template <const auto& f, typename T>
const Instruction* unary(Thread& thread, const Instruction& i) {
  thread.set(i.operands[0], f(thread.get<T>(i.operands[1])));
  return &i + 1;
}

template <const auto& f, typename T>
const Instruction* binary(Thread& thread, const Instruction& i) {
  const T first = thread.get<T>(i.operands[1]);
  thread.set(i.operands[0], f(first, thread.get<T>(i.operands[2])));
  return &i + 1;
}

// Return the decoder of a word whose operands all have its type.
template <const auto& f, typename T>
Decode unary_decoder(T types) {
  return typed(types, [](auto t) { return &unary<f, typename decltype(t)::type>; },
               {"", ""});
}

template <const auto& f, typename T>
Decode binary_decoder(T types, const std::string& result = "") {
  return typed(types, [](auto t) { return &binary<f, typename decltype(t)::type>; },
               {result, "", ""});
}

}  // namespace fakecuda::ptx
