// Random leaves in the slots of a slab, and the expected bytes of the slab.
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "core/pack.h"

namespace pyparallel::testing {

struct Packed {
  std::vector<std::vector<uint8_t>> leaves;
  std::vector<Slot> slots;
  std::vector<uint8_t> expected;

  int64_t nbytes() const { return static_cast<int64_t>(expected.size()); }
  Pack body(uint8_t* slab, int64_t piece) const {
    return {slab, nbytes(), piece, slots.data(), static_cast<int64_t>(slots.size())};
  }
};

// Leaves of up to `most` bytes behind gaps of up to `gap`. Slots start at multiples of
// `unit`; if that is not 1, the leaves themselves start anywhere.
template <typename Numbers>
Packed make_packed(Numbers* random, int64_t most, int64_t gap, int64_t unit) {
  Packed packed;
  const int64_t num = random->between(0, 6);
  const auto extend = [&](int64_t nbytes) {
    const int64_t end = static_cast<int64_t>(packed.expected.size()) + nbytes;
    packed.expected.resize(static_cast<size_t>((end + unit - 1) / unit * unit));
  };
  packed.leaves.resize(static_cast<size_t>(num));
  for (std::vector<uint8_t>& memory : packed.leaves) {
    const int64_t nbytes = random->between(0, most);
    const int64_t shift = unit == 1 ? 0 : random->between(0, 15);
    // Without spare memory, so that sanitizers report the first byte beyond.
    memory.resize(static_cast<size_t>(shift + nbytes));
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random->next());
    extend(random->between(0, gap));
    packed.slots.push_back({nbytes == 0 ? nullptr : memory.data() + shift,
                            static_cast<int64_t>(packed.expected.size()), nbytes});
    packed.expected.insert(packed.expected.end(), memory.begin() + shift, memory.end());
  }
  extend(random->between(0, gap));
  return packed;
}

}  // namespace pyparallel::testing
