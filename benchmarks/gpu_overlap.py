"""The case of PreDataLoader: how much of the data's time passes while the GPU works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils.data

from pyparallel import DataLoader, PreDataLoader

from ._harness import Record, compare
from .case import Effort
from .gpu_case import Goal, GpuCase
from .gpu_target import DryRun
from .loader_epochs import Counted, Epochs, peer
from .loader_overlap import (
    COMPUTE,
    DATA,
    FETCH,
    HIDDEN,
    Inflated,
    add_hidden,
    fetch_alone,
    step_alone,
    with_step,
)

_BATCH = 4
_TORCHS = "DataLoader(pin_memory) + .to(non_blocking)"


def cases(quick: bool) -> list[GpuCase]:
    """Return the cases; ``quick`` shrinks them."""
    num, nbytes = (3, 1 << 12) if quick else (12, 1 << 20)
    note = (
        "synthetic: 4 images of 1 MB, inflated by zlib, which lets go of the GIL; a "
        f"step is a kernel that sleeps, calibrated so that data take {DATA} of it, and "
        "a wait for it, as for a loss that is printed; times are of a step"
    )
    make = partial(_contenders, num, nbytes)
    return [
        GpuCase(
            "a step of the device and its data",
            note,
            make,
            [
                Goal(COMPUTE, 1 / 1.02),
                Goal(f"{_TORCHS}, no workers", 1.2),
                Goal(f"{_TORCHS}, 4 workers", 1 / 1.01),
            ],
            measure=_measure,
        )
    ]


class Sent:
    """A loader whose batches are sent by ``.to(non_blocking)``."""

    def __init__(self, loader: Any, where: DryRun) -> None:
        self._loader, self._device = loader, where.device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch.to(self._device, non_blocking=True)


def _measure(case: GpuCase, where: DryRun, effort: Effort) -> Record:
    clock = Counted()
    found = case.make(where)(clock)
    contenders = [contender for contender, _ in found]
    options: dict[str, Any] = {**effort._asdict(), "min_seconds": 0.0}
    options["max_seconds"] *= 4  # epochs take long
    options |= {"clock": clock, "watch": time.perf_counter}
    try:
        record = compare(case.title, contenders, note=case.note, **options)
    finally:
        for _, epochs in found:
            epochs.close()
    add_hidden(record)
    return {**record, "must_hide": HIDDEN}


def _contenders(num: int, nbytes: int, where: DryRun) -> Callable[[Counted], list[Any]]:
    items = Inflated(num * _BATCH, nbytes)
    workers = 1 if where.dry else 4

    def loader(kind: Any, workers: int, pin: bool) -> Any:
        more: dict[str, Any] = {}
        if workers:
            more = {"persistent_workers": True, "multiprocessing_context": "fork"}
        pin = pin and not where.dry
        return kind(items, _BATCH, num_workers=workers, pin_memory=pin, **more)

    torchs: Any = torch.utils.data.DataLoader
    plain = partial(loader, torchs, 0, False)
    ahead = partial(PreDataLoader, device=None if where.dry else where.index)

    def make(clock: Counted) -> list[Any]:
        seconds = min(fetch_alone(Sent(plain(), where)) for _ in range(3))
        seconds *= num / (num - 1) / DATA  # fetch_alone leaves a batch out

        def step(batch: Any = None) -> None:
            where.sleep(seconds)
            where.sync()

        run = partial(with_step, step)
        many = f"{workers} worker{'s' * (workers > 1)}"
        in_ours = partial(loader, DataLoader, workers, False)
        in_main = partial(loader, torchs, 0, True)
        pinned = partial(loader, torchs, workers, True)
        alone = partial(step_alone, step)
        ways = {
            "ours": (lambda: ahead(plain()), run, "ours"),
            f"ours around our DataLoader, {many}": (
                lambda: ahead(in_ours()),
                run,
                "ours",
            ),
            f"{_TORCHS}, no workers": (lambda: Sent(in_main(), where), run, "peer"),
            f"{_TORCHS}, {many}": (lambda: Sent(pinned(), where), run, "peer"),
            COMPUTE: (lambda: Sent(plain(), where), alone, "limit"),
            FETCH: (lambda: Sent(plain(), where), fetch_alone, "limit"),
        }
        return [
            peer(name, Epochs(make, run, clock), kind)
            for name, (make, run, kind) in ways.items()
        ]

    return make
