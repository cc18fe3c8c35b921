"""Static batches: what `torch.compile` compiles again in each pass over a data set.

    python -m benchmarks static_batches

With ``dynamic=False`` each new length is compiled. With buckets, nothing is compiled
after the first pass, also without static slabs. These add fixed addresses: two for each
plan here, where batches in new memory have any number.

The result with torch 2.13 on the CPU, 800 samples in batches of 4: compiled graphs, and
addresses, in passes 1, 2 and 3::

    dynamic=False
      longest sample     61   49   15   44    5   39
      buckets             4   45    0   45    0   25
      buckets, static     4    7    0    7    0    6
    dynamic=None
      longest sample      2   37    0   38    0   39
      buckets             2   44    0   42    0   42
      buckets, static     2    7    0    7    0    6
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyparallel import Collate, DataLoader, Pad, PreDataLoader, StaticBatches

BUCKETS = [(32,), (64,), (96,), (128,)]
PASSES = 3


def measure(num_samples: int, dynamic: bool | None) -> dict[str, list[tuple[int, int]]]:
    """Return compiled graphs and addresses of the tokens, for each way and pass."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 129, (num_samples,), generator=generator)
    dataset = [{"tokens": torch.arange(int(n))} for n in lengths]
    ways: dict[str, tuple[Pad, StaticBatches | None]] = {
        "longest sample": (Pad(), None),
        "buckets": (Pad(buckets=BUCKETS), None),
        "buckets, static": (Pad(buckets=BUCKETS), StaticBatches(2, len(BUCKETS))),
    }
    return {name: _passes(dataset, *way, dynamic) for name, way in ways.items()}


def _passes(
    dataset: Any, rule: Pad, static: StaticBatches | None, dynamic: bool | None
) -> list[tuple[int, int]]:
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    embed = torch.nn.Embedding(128, 16)
    step = torch.compile(lambda x: embed(x).mean(1), backend=backend, dynamic=dynamic)
    loader = DataLoader(dataset, 4, shuffle=True, collate_fn=Collate(tokens=rule))
    torch.manual_seed(0)
    found = []
    for _ in range(PASSES):
        before, addresses = len(compiled), set()
        # A consumer may hold some batches, so memory is not free at once.
        held: list[Any] = [None] * 4
        for batch in PreDataLoader(loader, static=static):
            held = [*held[1:], batch]
            addresses.add(batch["tokens"].data_ptr())
            with torch._dynamo.config.patch(recompile_limit=10_000):
                step(batch["tokens"])
        found.append((len(compiled) - before, len(addresses)))
    return found


def main() -> None:
    """Print one line for each way and pass."""
    for dynamic in (False, None):
        print(f"dynamic={dynamic}: compiled graphs, addresses in each pass")
        for name, found in measure(800, dynamic).items():
            print(f"  {name:16}", *(f"{n:4} {m:4}" for n, m in found))
