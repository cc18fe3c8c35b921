// Runs the tests of one file.
#include "check.h"

int main(int, char** argv) {
  for (void (*test)() : all_tests()) test();
  std::printf("%s: %s\n", argv[0], num_failures == 0 ? "passed" : "FAILED");
  return num_failures == 0 ? 0 : 1;
}
