// The interpreter for tests in Python, by ctypes.
#include <cstring>
#include <exception>
#include <set>
#include <string>

#include "ptx.h"

namespace {

using namespace fakecuda::ptx;

using Access = void (*)(uint64_t address, int nbytes, bool write,
                        const char* instruction);

// Calls a function, if there is one, for each access.
struct Observed : Memory {
  explicit Observed(Access observer) : call(observer) {}
  void access(uint64_t address, int nbytes, bool write,
              const std::string& instruction) override {
    if (call != nullptr) call(address, nbytes, write, instruction.c_str());
  }
  Access call;
};

}  // namespace

extern "C" {

// Runs a kernel of a module. Returns the instructions executed; `error` gets the
// message of an exception, or nothing.
uint64_t ptx_run(const char* text, const char* name, const unsigned* grid,
                 void** arguments, Access observer, char* error, size_t room) {
  error[0] = 0;
  try {
    const auto kernels = parse(text);
    Observed memory(observer);
    Grid size;
    std::memcpy(&size, grid, sizeof(size));
    return run(*kernels.at(name), size, arguments, memory);
  } catch (const std::exception& exception) {
    std::strncpy(error, exception.what(), room - 1);
    return 0;
  }
}

}  // extern "C"
