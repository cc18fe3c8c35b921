// Runs the kernel bodies on CPU threads. Uses no torch.
#pragma once

#include "core/boxes.h"
#include "core/cast.h"
#include "core/pack.h"

namespace pyparallel::cpu {

// Fills a mask of the data too if `mask` has boxes. The sources are cast by `cast`.
void pad_copy(BoxTable table, BoxTable mask, Cast cast = Cast::kNone);

// Sets body.piece.
void pack(Pack body);

// Returns true if pad_copy or pack writes past the caches: the destination is larger
// than half of the last cache, because the sources need room too, and the rows, or the
// leaves on average, are long.
bool is_nontemporal(const BoxTable& table);
bool is_nontemporal(const Pack& body);

}  // namespace pyparallel::cpu
