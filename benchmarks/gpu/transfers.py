"""Cases of transfers: many small tensors and large tensors, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import scatter as torch_scatter

from pyparallel import scatter

from .. import data, peers
from .._harness import Contender, Goal
from ..cases_leaves import NUM_LEAVES
from .case import GpuCase, Made, Rotation
from .target import DryRun

MIB = 1 << 20
#: The least total size of the inputs of a rotation, in bytes.
_TURNING = 512 * MIB
#: The most inputs of a rotation; only the small inputs of a quick run reach it.
_MOST_TURNS = 512

LEAVES = ".to(device) of each"
PINNED = ".pin_memory().to(non_blocking) of each"
RAW = "cudaMemcpyAsync"
TORCH, TORCH_PINNED = ".to(device)", ".to(device, non_blocking)"
PIN_FIRST = ".pin_memory().to(non_blocking)"
ONE = "ours, [0]"
#: The name begins with a key of `peers.ABSENT`.
COPIER = f"{peers.COPIER} start_copy().get()"


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    unit = MIB >> 8 if quick else MIB
    nest = f"synthetic: {NUM_LEAVES} tensors of some 280 bytes in dicts, lists, tuples"
    small = GpuCase(
        f"{NUM_LEAVES} small tensors",
        nest,
        partial(_small, 3 if quick else 32),
        [
            Goal(LEAVES, 20),
            Goal(COPIER, 3),
            Goal(COPIER, 4, of="host"),
            Goal("tensordict consolidate().to", 20),
            Goal("tensordict .to(non_blocking_pin)", 20),
            Goal(plus=120e-6, of="host"),
            Goal(count="copies", most=1),
            Goal(count="waits"),
            Goal(count="pin_calls"),
        ],
    )
    found = [small]
    for size in (64, 8, 16, 32, 4, 256):
        goals = [
            Goal(RAW, 0.97 if size >= 16 else 0.9, of="queued"),
            Goal(TORCH_PINNED, 0.97, of="queued"),
        ]
        make = partial(_large, size * unit, True)
        note = "synthetic: random bytes in pinned memory"
        case = GpuCase(f"pinned {size} MB", note, make, goals, in_a_row=True)
        found.append(case)
        if size == 4:
            continue
        goals = [Goal(TORCH, 2), Goal(PIN_FIRST, 1.3), Goal(RAW, 0.75)]
        if size < 64:  # staging takes a larger share here
            goals = [Goal(TORCH, 1.5), Goal(PIN_FIRST, 1.3)]
        make = partial(_large, size * unit, False)
        note = f"synthetic: random bytes; {RAW} reads pinned ones"
        found.append(GpuCase(f"pageable {size} MB", note, make, goals))
    for size, kind in ((64, "pinned"), (64, "pageable"), (1, "pageable")):
        note = f"synthetic: random bytes, {kind}; four parts on one device"
        make = partial(_parts, size * unit, kind == "pinned")
        goals = [Goal(ONE, 1 / 1.05, 40e-6)]
        found.append(GpuCase(f"[0] * 4, {kind} {size} MB", note, make, goals))
    return found


def each(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to all tensors of nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: each(function, value) for key, value in tree.items()}
    return type(tree)(each(function, value) for value in tree)


def _small(num: int, where: DryRun) -> Made:
    """Compare ways to send many small tensors."""
    first, device = data.nested_batch(NUM_LEAVES), where.device
    turns = []
    for i in range(num):
        batch = each(lambda leaf, i=i: leaf + i, first)
        turns.append((batch, None))
        if peers.TensorDict is not None:
            # Created beforehand and not timed: its users already have a TensorDict.
            wrapped = peers.TensorDict(peers.in_mappings(batch), batch_size=[])
            turns[-1] = batch, wrapped
    batches = Rotation(turns)

    def by_hand(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return batches.of(lambda batch: [each(function, batch)], 0)

    def tensordict(name: str, call: Callable[[Any], Any]) -> Contender:
        call = batches.of(call, 1) if peers.TensorDict is not None else None

        def view(result: Any) -> list[Any]:
            return [peers.out_of_mappings(result.to_dict(), first)]

        return Contender(f"tensordict {name}", call, view=view)

    to = [where.index]
    mmcv = peers.mmcv_scatter and (lambda batch: peers.mmcv_scatter(batch, to))
    start_copy, copier = peers.multi_tensor_copier(), None
    if start_copy is not None:
        copier = batches.of(lambda batch: [start_copy(batch, str(device)).get()], 0)
    pin = {} if where.dry else {"non_blocking_pin": True}
    queued = {"non_blocking": True}
    contenders = [
        Contender("ours", batches.of(lambda batch: scatter(batch, to), 0), "ours"),
        Contender(LEAVES, by_hand(lambda leaf: leaf.to(device))),
        Contender(
            ".to(device, non_blocking) of each",
            by_hand(lambda leaf: leaf.to(device, **queued)),
        ),
        Contender(PINNED, by_hand(lambda leaf: where.pin(leaf).to(device, **queued))),
        Contender("mmcv 1.x scatter", batches.of(mmcv, 0)),
        Contender(COPIER, copier),
        tensordict("consolidate().to", lambda td: td.consolidate().to(device)),
        tensordict(".to(non_blocking_pin)", lambda td: td.to(device, **pin)),
    ]
    return Made(contenders, batches)


def _turns(nbytes: int, pinned: bool, where: DryRun) -> list[Tensor]:
    """Return blocks of random bytes, larger than a cache in total."""
    num = 2 if where.dry else min(max(2, -(-_TURNING // nbytes)), _MOST_TURNS)
    block = torch.randint(256, (nbytes,), dtype=torch.uint8)
    copy = where.pin if pinned else Tensor.clone
    turns = []
    for i in range(num):
        turns.append(copy(block))
        turns[-1][:16] = i % 251  # each target gets its own tensors
    return turns


def _large(nbytes: int, pinned: bool, where: DryRun) -> Made:
    """Compare ways to send one large tensor."""
    blocks = Rotation(_turns(nbytes, pinned, where))
    device, target = where.device, torch.empty(nbytes, dtype=torch.uint8)
    target, source = target.to(device), where.pin(blocks.now)
    queued = {"non_blocking": True}
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        TORCH: lambda block: block.to(device, copy=True),
        PIN_FIRST: lambda block: where.pin(block).to(device, **queued),
    }
    if pinned:
        ways = {TORCH_PINNED: lambda block: block.to(device, copy=True, **queued)}

    def raw(block: Tensor) -> None:
        where.raw_copy(target, block if pinned else source)

    ours = blocks.of(lambda block: scatter(block, [where.index])[0])
    return Made(
        [
            Contender("ours", ours, "ours"),
            *(Contender(name, blocks.of(way)) for name, way in ways.items()),
            Contender(RAW, blocks.of(raw), "limit"),
        ],
        blocks,
    )


def _parts(nbytes: int, pinned: bool, where: DryRun) -> Made:
    """Compare four targets with one, all the same device."""
    turns = _turns(nbytes, pinned, where)
    blocks = Rotation([block.view(64, -1) for block in turns])
    four = [where.index] * 4
    mmcv, torchs = None, None
    if not where.dry:
        torchs = blocks.of(lambda block: torch_scatter(block, four))
        if peers.mmcv_scatter is not None:
            mmcv = blocks.of(lambda block: peers.mmcv_scatter(block, four))

    def whole(parts: Any) -> Tensor:
        return torch.cat(list(parts))

    ours = blocks.of(lambda block: scatter(block, four))
    one = blocks.of(lambda block: scatter(block, [where.index]))
    contenders = [
        Contender("ours", ours, "ours", whole),
        Contender("torch.nn.parallel.scatter", torchs, view=whole),
        Contender("mmcv 1.x scatter", mmcv, view=whole),
        Contender(ONE, one, "limit"),
    ]
    return Made(contenders, blocks)
