// Leaves in a slab from any bytes, packed by one of the variants, whole or in slices.
#include "destination.h"
#include "fuzz.h"
#include "packed.h"
#include "workers.h"

namespace pyparallel::testing {

void fuzz(FuzzedNumbers* numbers) {
  const bool alone = numbers->between(0, 1) == 0;
  const int64_t unit = alone ? numbers->one_of({1, 64}) : numbers->one_of({16, 64});
  const int64_t piece = alone ? numbers->between(1, 300) : 16 * numbers->between(1, 8);
  const int64_t workers = numbers->between(1, 5);
  const int lanes = static_cast<int>(numbers->one_of({2, 3, 32}));
  // Slices begin at slots, and lanes need slots at multiples of a word.
  const int64_t most = numbers->one_of({100, 1, 2, 3});
  const int64_t shift = alone ? numbers->between(0, 63) : 16 * numbers->between(0, 3);
  const Packed packed = make_packed(numbers, numbers->one_of({40, 300}), 100, unit);
  Destination slab(packed.nbytes(), shift);
  const Pack whole = packed.body(slab.data(), piece);
  const auto num_slots = static_cast<int64_t>(packed.slots.size());
  int64_t end = 0;
  for (int64_t first = 0; first == 0 || first < num_slots; first += most) {
    const Pack part = slice(whole, first, most);
    CHECK(part.begin == end && part.num_slots <= most);
    if (alone) {
      run_threads(part, part.num_pieces(), workers);
    } else {
      run_warps(part, part.num_pieces(), workers, lanes);
    }
    end = part.end;
  }
  CHECK(end == whole.end && slab.holds(packed.expected));
}

}  // namespace pyparallel::testing
