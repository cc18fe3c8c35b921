// Steps of instructions with a destination and one to three sources.
#pragma once

#include "ptx_statement.h"

namespace fakecuda::ptx {

template <typename T>
struct Tag {
  using type = T;
};

template <typename T>
std::string name_of() {
  if (std::is_same_v<T, bool>) return "pred";
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(8 * sizeof(T));
}

// Calls `choose` with the tag of the type that has the name. Fails if no T has it.
template <typename... T, typename Choose>
Step visit(const Statement& statement, const std::string& name, Choose choose) {
  Step chosen = nullptr;
  ((name == name_of<T>() && (chosen = choose(Tag<T>{}))) || ...);
  if (!chosen) statement.fail("unknown type ." + name + " of " + statement.opcode());
  return chosen;
}

// Calls `choose` with the tag of an integer type of two, four or eight bytes.
template <typename Choose>
Step visit_integers(const Statement& statement, const std::string& name,
                    Choose choose) {
  return visit<uint16_t, int16_t, uint32_t, int32_t, uint64_t, int64_t>(statement, name,
                                                                        choose);
}

// The same for one byte too.
template <typename Choose>
Step visit_all_integers(const Statement& statement, const std::string& name,
                        Choose choose) {
  return visit<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, uint64_t,
               int64_t>(statement, name, choose);
}

// Applies F to the sources of type T. The destination has the type that F returns.
template <typename F, typename T>
const Instruction* unary(Thread& thread, const Instruction& i) {
  thread.set(i.operands[0], F::apply(thread.get<T>(i.operands[1])));
  return &i + 1;
}

template <typename F, typename T>
const Instruction* binary(Thread& thread, const Instruction& i) {
  const T first = thread.get<T>(i.operands[1]);
  thread.set(i.operands[0], F::apply(first, thread.get<T>(i.operands[2])));
  return &i + 1;
}

}  // namespace fakecuda::ptx
