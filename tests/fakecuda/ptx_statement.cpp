#include "ptx_statement.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>

namespace fakecuda::ptx {
namespace {

// "add.rn.f32" is the opcode "add" and the modifiers "rn" and "f32".
std::vector<std::string> split(const std::string& word) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= word.size()) {
    const size_t end = std::min(word.find('.', begin), word.size());
    parts.push_back(word.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

void fail_at(int line, const std::string& problem, const std::string& text) {
  throw std::runtime_error("PTX line " + std::to_string(line) + ": " + problem +
                           (text.empty() ? "" : ": " + text));
}

std::optional<uint64_t> parse_integer(const std::string& text) {
  const bool negative = text[0] == '-';
  char* end = nullptr;
  errno = 0;
  const uint64_t value =
      negative ? static_cast<uint64_t>(std::strtoll(text.c_str(), &end, 0))
               : std::strtoull(text.c_str(), &end, 0);
  if (text.empty() || *end != 0 || errno != 0) return {};
  return value;
}

int size_of(const std::string& type) {
  static const std::unordered_map<std::string, int> kSizes{
      {"pred", 1}, {"u8", 1},  {"s8", 1},  {"b8", 1},  {"u16", 2},
      {"s16", 2},  {"b16", 2}, {"u32", 4}, {"s32", 4}, {"b32", 4},
      {"f32", 4},  {"u64", 8}, {"s64", 8}, {"b64", 8}};
  const auto found = kSizes.find(type);
  return found == kSizes.end() ? 0 : found->second;
}

Statement::Statement(const std::string& opcode, std::vector<Operand> operands,
                     Symbols* symbols, std::string text, int line)
    : modifiers_(split(opcode)),
      operands_(std::move(operands)),
      symbols_(symbols),
      text_(std::move(text)),
      line_(line) {
  opcode_ = modifiers_[0];
  next_ = 1;
}

void Statement::fail(const std::string& problem) const {
  fail_at(line_, problem, text_);
}

bool Statement::take(const char* modifier) {
  if (next_ == modifiers_.size() || modifiers_[next_] != modifier) return false;
  ++next_;
  return true;
}

std::string Statement::take_type() {
  if (next_ == modifiers_.size()) fail(opcode_ + " has no type");
  const std::string type = modifiers_[next_];
  if (size_of(type) == 0) fail("unknown modifier ." + type + " of " + opcode_);
  ++next_;
  return type[0] == 'b' ? "u" + type.substr(1) : type;
}

void Statement::finish(size_t count) {
  if (next_ < modifiers_.size()) {
    fail("unknown modifier ." + modifiers_[next_] + " of " + opcode_);
  }
  if (operands_.size() != count) {
    fail(opcode_ + " must have " + std::to_string(count) + " operands here, but has " +
         std::to_string(operands_.size()));
  }
}

Slot Statement::read(const Operand& operand, const std::string& type, bool wider) {
  if (operand.is_address || !operand.items.empty()) {
    fail("an operand of " + opcode_ + " must be a register or a value");
  }
  const int nbytes = size_of(type);
  const Name name = symbols_->find(operand.text);
  if (name.nbytes == 0) {
    const auto value = type == "f32" ? std::nullopt : parse_integer(operand.text);
    if (!value) fail(operand.text + " is no known name and no value of ." + type);
    return symbols_->constant(type == "pred" ? *value != 0 : *value);
  }
  const bool may_be_wider = wider || !name.is_register;
  if (name.nbytes != nbytes && !(may_be_wider && name.nbytes > nbytes)) {
    fail(operand.text + " must have " + std::to_string(nbytes) + " bytes, but has " +
         std::to_string(name.nbytes));
  }
  return name.slot;
}

Slot Statement::write(const Operand& operand, const std::string& type, bool wider) {
  const Name name = symbols_->find(operand.text);
  if (!name.is_register || name.slot < kNumFixedSlots) {
    fail("the destination of " + opcode_ + " must be a register");
  }
  return read(operand, type, wider);
}

void Statement::use(Instruction* instruction, const std::vector<std::string>& types) {
  finish(types.size());
  for (size_t index = 0; index < types.size(); ++index) {
    instruction->operands[index] = index == 0 ? write(operands_[0], types[0])
                                              : read(operands_[index], types[index]);
  }
}

void Statement::use_address(Instruction* instruction, const Operand& operand) {
  if (!operand.is_address) fail("expected an address in brackets");
  instruction->offset = operand.offset;
  Operand base = operand;
  base.is_address = false;
  instruction->operands[0] = read(base, "u64");
}

Decode fixed(Step step, const std::vector<std::string>& types) {
  return [=](Statement& statement, Instruction* instruction) {
    statement.take_all();
    instruction->run = step;
    statement.use(instruction, types);
  };
}

}  // namespace fakecuda::ptx
