// The interpreter for tests in Python, by ctypes.
#include <cstring>
#include <exception>
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

// Runs the kernel `k` of a module with an address in one thread. `error` gets the
// message of an exception, or nothing.
void ptx_run(const char* text, void* address, Access observer, char* error,
             size_t room) {
  error[0] = 0;
  try {
    Observed memory(observer);
    void* arguments[] = {&address};
    run(*parse(text).at("k"), {{1, 1, 1}, {1, 1, 1}}, arguments, memory);
  } catch (const std::exception& exception) {
    std::strncpy(error, exception.what(), room - 1);
  }
}

}  // extern "C"
