// One instruction of a kernel while it is decoded.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx_program.h"

namespace fakecuda::ptx {

struct Operand {
  std::string text;  // register, symbol, literal or label
  bool is_address = false;
  int64_t offset = 0;            // of an address
  std::vector<Operand> items{};  // of {%r1, %r2}
};

// A register, or the address of a parameter.
struct Name {
  Slot slot = 0;
  int nbytes = 0;  // 0 if the name is unknown
  bool is_register = false;
};

// The names that the operands of a kernel can use.
struct Symbols {
  virtual ~Symbols() = default;
  virtual Name find(const std::string& name) const = 0;
  virtual Slot constant(uint64_t value) = 0;
};

class Statement {
 public:
  Statement(const std::string& opcode, std::vector<Operand> operands, Symbols* symbols,
            std::string text, int line);

  const std::string& opcode() const { return opcode_; }

  // Takes the next modifier if it is this one.
  bool take(const char* modifier);
  std::string take_type();  // .b32 and such are returned as u32
  void take_all() { next_ = modifiers_.size(); }

  const Operand& operand(size_t index) const { return operands_[index]; }
  // Fails unless the number of operands is `count` and each modifier was taken.
  void finish(size_t count);

  // Return the slot of an operand of a type. With `wider`, a register may be wider.
  Slot read(const Operand& operand, const std::string& type, bool wider = false);
  Slot write(const Operand& operand, const std::string& type, bool wider = false);
  // Sets the operands by their types and finishes. The first is the destination.
  void use(Instruction* instruction, const std::vector<std::string>& types);
  // Sets operands[0] and the offset.
  void use_address(Instruction* instruction, const Operand& operand);

  [[noreturn]] void fail(const std::string& problem) const;

 private:
  std::string opcode_;
  std::vector<std::string> modifiers_;
  size_t next_ = 0;
  std::vector<Operand> operands_;
  Symbols* symbols_;
  std::string text_;
  int line_;
};

// Throws std::runtime_error, with the line and the text of a statement.
[[noreturn]] void fail_at(int line, const std::string& problem,
                          const std::string& text);

// Returns nothing if the text is no integer of 64 bits, with or without a sign.
std::optional<uint64_t> parse_integer(const std::string& text);

// Returns the bytes of a type such as "u32", or 0 if it is unknown.
int size_of(const std::string& type);

using Decode = std::function<void(Statement&, Instruction*)>;
// By opcodes such as "add", or by whole words such as "sub.rn.f32".
using Opcodes = std::unordered_map<std::string, Decode>;

// Returns the decoder of a word whose operands have these types.
Decode fixed(Step step, const std::vector<std::string>& types);

// The instructions of one family each.
Opcodes arithmetic_opcodes();
Opcodes memory_opcodes();

}  // namespace fakecuda::ptx
