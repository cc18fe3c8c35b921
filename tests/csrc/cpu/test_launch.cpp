// The CPU launchers with real threads, also in a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "batch.h"
#include "check.h"
#include "core/box_plan.h"
#include "cpu/launch.h"
#include "cpu/parallel_for.h"

namespace {

using namespace pyparallel;
using testing::Batch;
using testing::Bytes;

void check_pad_copy(const std::vector<int64_t>& target, int64_t num) {
  Random random(3);
  for (bool placed : {false, true}) {
    const Batch batch = testing::make_batch(&random, target, num, 4, false, placed);
    Bytes dst(static_cast<size_t>(batch.nbytes()), 0xEE);
    const BoxPlan plan(dst.data(), batch.shapes);
    cpu::pad_copy(plan.table(), kNoBoxes);
    CHECK(dst == padded_slowly(batch));
    const Bytes expected = testing::marked_slowly(batch, 1);
    Bytes mask(expected.size(), 0xEE);
    const PadShapes masked = mask_shapes(batch.shapes, mask.data(), 1);
    const BoxPlan mask_plan(mask.data(), masked);
    dst.assign(dst.size(), 0xEE);
    cpu::pad_copy(plan.table(), mask_plan.table());
    CHECK(dst == padded_slowly(batch));
    CHECK(mask == expected);
  }
}

TEST(test_large_copies_use_threads) {
  CHECK(cpu::num_workers(1) == 1);
  CHECK(cpu::num_workers(int64_t{1} << 40) > 1);
  check_pad_copy({3, 200, 301}, 3);
  check_pad_copy({400001}, 2);
  check_pad_copy({7, 3}, 5);
}

TEST(test_pack_with_threads) {
  const std::vector<uint8_t> leaf(1 << 20, 7);
  const auto nbytes = static_cast<int64_t>(leaf.size());
  std::vector<uint8_t> slab(leaf.size() * 2 + 192, 0xEE);
  const Slot slots[] = {{leaf.data(), 64, nbytes}, {leaf.data(), 128 + nbytes, nbytes}};
  cpu::pack({slab.data(), static_cast<int64_t>(slab.size()), 1, slots, 2});
  int64_t sum = 0;
  for (uint8_t byte : slab) sum += byte;
  CHECK(sum == 2 * 7 * nbytes);
}

TEST(test_a_forked_child_uses_one_thread) {
  CHECK(!cpu::forked());
  const pid_t child = fork();
  if (child == 0) {
    CHECK(cpu::forked());
    CHECK(cpu::num_workers(int64_t{1} << 40) == 1);
    check_pad_copy({3, 200, 301}, 3);
    _exit(num_failures == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
