// Decoded kernels and the state of a thread.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ptx.h"

namespace fakecuda::ptx {

struct Instruction;
struct Thread;

// An index into the slots of a thread: registers, special registers and constants.
using Slot = uint32_t;

// The slots of special registers, three each: x, y, z.
enum FixedSlot : Slot {
  kThreadIndex,
  kBlockIndex = kThreadIndex + 3,
  kGridSize = kBlockIndex + 3,
  kNumFixedSlots = kGridSize + 3,
};

enum class Space : uint8_t { kGeneric, kGlobal, kParameter };

// Executes one instruction. Returns the next, or nullptr if the thread ends.
using Step = const Instruction* (*)(Thread&, const Instruction&);

constexpr int kMaxOperands = 5;

struct Instruction {
  Step run = nullptr;
  Step guarded = nullptr;  // executes the instruction if its guard allows
  Slot operands[kMaxOperands] = {};
  Slot guard = 0;
  bool guard_negated = false;
  Space space = Space::kGeneric;
  int64_t offset = 0;  // of an address in bytes, or of a branch in instructions
};

struct Program {
  std::vector<Instruction> code;
  std::vector<std::string> texts;  // of each instruction
  std::vector<std::pair<Slot, uint64_t>> constants;
  Slot num_slots = kNumFixedSlots;
};

// A thread of a launch. The threads of a launch use the same slots, one after the
// other.
struct Thread {
  const Kernel& kernel;
  Memory& memory;
  uint8_t* parameters;
  uint64_t* slots;

  template <typename T>
  T get(Slot slot) const {
    T value;
    memcpy(&value, &slots[slot], sizeof(T));
    return value;
  }

  // Extends integers to the whole slot, by their sign.
  template <typename T>
  void set(Slot slot, T value) {
    if constexpr (std::is_integral_v<T>) {
      slots[slot] = static_cast<uint64_t>(value);
    } else {
      slots[slot] = 0;
      memcpy(&slots[slot], &value, sizeof(T));
    }
  }
};

// Returns the text of an instruction of the thread's kernel.
const std::string& text_of(const Thread& thread, const Instruction& instruction);

// Ends the kernel with an error that names the kernel, the thread and the instruction.
[[noreturn]] void fail(const Thread& thread, const Instruction& instruction,
                       const std::string& problem);

}  // namespace fakecuda::ptx
