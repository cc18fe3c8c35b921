// Blocks and threads of a launch.
#include <stdexcept>

#include "ptx_program.h"

namespace fakecuda::ptx {
namespace {

std::string triple(const uint64_t* values) {
  return "(" + std::to_string(values[0]) + ", " + std::to_string(values[1]) + ", " +
         std::to_string(values[2]) + ")";
}

// Aligned for every type.
struct alignas(128) Word {
  uint8_t bytes[128];
};

// Calls `f` for each index, x first.
template <typename F>
void for_each_index(const unsigned (&size)[3], uint64_t* index, F f) {
  for (index[2] = 0; index[2] < size[2]; ++index[2]) {
    for (index[1] = 0; index[1] < size[1]; ++index[1]) {
      for (index[0] = 0; index[0] < size[0]; ++index[0]) f();
    }
  }
}

}  // namespace

const std::string& text_of(const Thread& thread, const Instruction& instruction) {
  const Program& program = *thread.kernel.program;
  return program.texts[static_cast<size_t>(&instruction - program.code.data())];
}

void fail(const Thread& thread, const Instruction& instruction,
          const std::string& problem) {
  throw std::runtime_error(thread.kernel.name + ", block " +
                           triple(thread.slots + kBlockIndex) + ", thread " +
                           triple(thread.slots + kThreadIndex) + ": " + problem + ": " +
                           text_of(thread, instruction));
}

void run(const Kernel& kernel, const Grid& grid, void** arguments, Memory& memory) {
  std::vector<Word> parameters(kernel.parameter_bytes / sizeof(Word) + 1);
  for (size_t index = 0; index < kernel.parameters.size(); ++index) {
    const Parameter& parameter = kernel.parameters[index];
    memcpy(parameters[0].bytes + parameter.offset, arguments[index], parameter.nbytes);
  }
  const Program& program = *kernel.program;
  std::vector<uint64_t> slots(program.num_slots);
  for (int axis = 0; axis < 3; ++axis) slots[kGridSize + axis] = grid.grid[axis];
  for (const auto& [slot, value] : program.constants) slots[slot] = value;
  Thread thread{kernel, memory, parameters[0].bytes, slots.data()};
  for_each_index(grid.grid, &slots[kBlockIndex], [&] {
    for_each_index(grid.block, &slots[kThreadIndex], [&] {
      const Instruction* i = program.code.data();
      while (i != nullptr) i = i->run(thread, *i);
    });
  });
}

}  // namespace fakecuda::ptx
