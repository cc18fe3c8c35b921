"""One case of any kind."""

from __future__ import annotations

from fuzz_batches import batches, device_copies, pad_stacks
from fuzz_operators import headers, pad_copies, plans, slabs
from fuzzed import Numbers

#: A kind that is listed twice is drawn twice as often.
KINDS = [batches, batches, batches, pad_stacks, pad_stacks, pad_copies, pad_copies]
KINDS += [slabs, plans, device_copies, headers]


def any_case(numbers: Numbers) -> str:
    """Run one case; return its kind."""
    kind = numbers.choose(KINDS)
    kind(numbers)
    return kind.__name__
