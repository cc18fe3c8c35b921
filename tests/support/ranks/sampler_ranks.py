"""Cases of `distributed_ranks`: a `SizeBatchSampler` takes its ranks from the group."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyparallel import SizeBatchSampler
from tests.support.ranks.distributed_ranks import case

SIZES = [(17 * i % 50, 29 * i % 40) for i in range(101)]


@case
def caches(rank: int, world: int) -> Any:
    """Let all ranks write a cache at once, then let each rank use it.

    Return the sizes, the calls, and the files in the folder for both.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        cache = Path(shared[0], "sizes.npz")
        found = []
        for _ in range(2):
            calls: list[int] = []

            def size_of(index: int, calls: list[int] = calls) -> Any:
                calls.append(index)
                if not cache.exists():
                    dist.barrier()  # no rank has written the file
                return SIZES[index]

            sampler = SizeBatchSampler(
                size_of, 4, num_samples=len(SIZES), progress=False, cache=cache
            )
            assert (sampler.rank, sampler.num_replicas) == (rank, world)
            dist.barrier()
            files = sorted(path.name for path in cache.parent.iterdir())
            found.append((sampler.sizes.tolist(), calls, files))
            dist.barrier()
    return found
