// An interpreter of the PTX of our kernels on host memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fakecuda::ptx {

struct Program;

struct Parameter {
  uint64_t offset;
  uint64_t nbytes;
};

// An .entry of a PTX module.
struct Kernel {
  std::string name;  // mangled
  std::vector<Parameter> parameters;
  uint64_t parameter_bytes = 0;
  uint64_t max_threads = 0;  // of a block; 0 without a limit
  std::shared_ptr<const Program> program;
};

// Returns the kernels of a module by name. Throws std::runtime_error, with the line and
// its text, where the module needs a feature that the interpreter lacks.
std::map<std::string, std::shared_ptr<const Kernel>> parse(const std::string& text);

// Checks the accesses of a kernel to global memory.
struct Memory {
  virtual ~Memory() = default;
  // Called before each access. Throws to end the kernel.
  virtual void access(uint64_t address, int nbytes, bool write,
                      const std::string& instruction) = 0;
};

struct Grid {
  unsigned grid[3];
  unsigned block[3];
};

// Runs all threads of the grid, one after the other. Throws std::runtime_error, with
// the kernel, the thread and the instruction, after an error of the kernel: a
// misaligned address, an access outside of parameter memory, a division by zero.
void run(const Kernel& kernel, const Grid& grid, void** arguments, Memory& memory);

}  // namespace fakecuda::ptx
