"""Cases of the pinned ring: the device reads the memory that a worker wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from pyparallel import DataLoader, scatter

from .._harness import Contender, Goal
from ..loader.epochs import Items, Ways, loader, per_batch
from .case import GpuCase, Made, Rotation
from .target import DryRun, on_node
from .transfers import MIB, RAW, TORCH_PINNED

_BATCH = 16
_THREAD = "torch's DataLoader, pin_memory=True + .to(non_blocking)"
_PAGEABLE = "torch's DataLoader, pin_memory=False + .to"
_BUSY, _IDLE, _BESIDE = "beside a kernel", "on an idle device", 0.02
_NEAR, _FAR = f"{RAW} from the GPU's node", f"{RAW} from another node"


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    unit = MIB >> 8 if quick else MIB
    samples = f"synthetic: {_BATCH} uint8 samples, stacked by workers"
    found = [
        GpuCase(
            "from a worker's slab to the device",
            f"{samples}; 4 MB each; 4 workers; times are of a batch, in an epoch of 12",
            partial(_epochs, 4 * unit, 3 if quick else 12),
            [Goal(_THREAD, 2)],
        )
    ]
    for size in (64, 1, 16, 256):
        case = GpuCase(
            f"a slab of a pinned ring, {size} MB",
            f"{samples}; torch and {RAW} read memory that torch pinned",
            partial(_slabs, size * unit // _BATCH, 3 if quick else _turns(size)),
            [
                Goal(RAW, 0.97 if size >= 16 else 0.5, of="queued"),
                Goal(TORCH_PINNED, 0.97, of="queued"),
                Goal(count="copies", most=1),
                Goal(count="waits"),
                Goal(count="pin_calls"),
            ],
            in_a_row=True,
        )
        found.append(case)
    found.append(
        GpuCase(
            "the registration of a slab",
            "synthetic: 64 MB, registered on an idle device and beside a kernel of "
            f"{_BESIDE * 1e3:g} ms",
            partial(_registered, 64 * unit, 4),
            [Goal(_IDLE, 0.5, of="host")],
        )
    )
    found.append(
        GpuCase(
            "NUMA nodes",
            f"{samples}; 4 MB each; {RAW} reads memory that torch pinned on each node",
            partial(_nodes, 4 * unit),
            [Goal(name, 0.95, of="queued") for name in (_NEAR, _FAR)],
            in_a_row=True,
        )
    )
    return found


def _turns(size: int) -> int:
    """Return the number of slabs that together exceed a cache."""
    return max(4, min(512 // size, 64))


class Sent:
    """A loader whose batches are on the device."""

    def __init__(self, loader: Any, send: Callable[[Tensor], Tensor]) -> None:
        self._loader, self._send = loader, send

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._send, self._loader)


def _loader(kind: Any, nbytes: int, num: int, workers: int, **options: Any) -> Any:
    """Return a loader of ``num`` batches with forked, persistent workers."""
    samples = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(_BATCH + 3)]
    return loader(kind, Items(samples, num * _BATCH), _BATCH, workers, **options)()


def _slabs(nbytes: int, num: int, where: DryRun) -> Made:
    """Compare a slab of the ring with memory that torch pinned."""
    pinned = not where.dry
    ours = _loader(DataLoader, nbytes, num, 1, ring_slabs=num, pin_memory=pinned)
    slabs = list(ours)
    if ours.stats().ring_hits < num or (pinned and not slabs[0].is_pinned()):
        raise RuntimeError(
            "all batches must be in pinned slabs, but are not. Raise the limit of "
            "locked memory (ulimit -l)."
        )
    turns = Rotation([(slab, where.pin(slab)) for slab in slabs])
    target = torch.empty_like(slabs[0], device=where.device)

    def to(pinned: Tensor) -> Tensor:
        return pinned.to(where.device, non_blocking=True, copy=True)

    def raw(pinned: Tensor) -> None:
        where.raw_copy(target, pinned)

    sent = turns.of(lambda slab: scatter(slab, [where.index])[0], 0)
    contenders = [
        Contender("ours", sent, "ours"),
        Contender(TORCH_PINNED, turns.of(to, 1)),
        Contender(RAW, turns.of(raw, 1), "limit"),
    ]
    return Made(contenders, turns)


def _registered(nbytes: int, num: int, where: DryRun) -> Made:
    """Compare the times until memory is registered."""
    blocks = Rotation([torch.ones(nbytes, dtype=torch.uint8) for _ in range(num)])

    def beside(block: Tensor) -> Any:
        where.sleep(0 if where.dry else _BESIDE)
        return where.register(block)

    contenders = [
        Contender(_BUSY, blocks.of(beside), "ours"),
        Contender(_IDLE, blocks.of(where.register), "limit"),
    ]
    return Made(contenders, blocks)


def _nodes(nbytes: int, where: DryRun) -> Made:
    """Compare a slab of the ring with pinned memory of each NUMA node."""
    made = _slabs(nbytes, 4, where)
    source = made.inputs.now[1]
    target = torch.empty_like(source, device=where.device)
    near, others = where.numa()
    found = [made.contenders[0], made.contenders[-1]]
    for name, node in ((_NEAR, near), (_FAR, next(iter(others), None))):
        call = None  # the machine shows no such node
        if node is not None:
            with on_node(node):
                call = partial(where.raw_copy, target, where.pin(source))
        found.append(Contender(name, call, "limit"))
    return Made(found, made.inputs)


def _epochs(nbytes: int, num: int, where: DryRun) -> list[Contender]:
    """Compare loaders with workers, up to the last batch's arrival on the device."""
    torchs: Any = torch.utils.data.DataLoader
    make = partial(_loader, nbytes=nbytes, num=num, workers=1 if where.dry else 4)
    ways, pin = (
        Ways(partial(_until_done, where, per_batch()), costs=False),
        not where.dry,
    )

    def ours(batch: Tensor) -> Tensor:
        return scatter(batch, [where.index])[0]

    def to(batch: Tensor) -> Tensor:
        return batch.to(where.device, non_blocking=True)

    def sent(kind: Any, pin_memory: bool, send: Any) -> Any:
        return lambda: Sent(make(kind, pin_memory=pin_memory), send)

    return [
        ways.peer("ours, pin_memory=True", sent(DataLoader, pin, ours), "ours"),
        ways.peer("ours, pin_memory=False", sent(DataLoader, False, ours), "ours"),
        ways.peer(_THREAD, sent(torchs, pin, to)),
        ways.peer(_PAGEABLE, sent(torchs, False, to)),
    ]


def _until_done(where: DryRun, run: Callable[[Any], float], loader: Any) -> float:
    """Return the seconds of an epoch per batch, including the device's last copy."""
    seconds = run(loader)
    start = time.perf_counter()
    where.sync()
    return seconds + (time.perf_counter() - start) / len(loader)
