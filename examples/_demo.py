"""Options, stopwatch, scores and report of the digit example."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Subset

from pyparallel import DataLoader, MMDistributedDataParallel, SizeBatchSampler

try:
    from _checkpoint import Checkpoint
    from _digits import compose, count_matches, draw_size, quality
    from _report import write_report
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"This example needs more packages ({error}).\n"
        "Install them with: pip install 'pyparallel-torch[demo]'"
    ) from error


class Timed:
    """A function that adds up the time of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


class Demo:
    """A training run on this rank: its options, and what its report needs.

    Args:
        args: the command line; see `options`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.losses: list[float] = []
        self.scores: list[dict[str, float]] = []
        self.found: dict[int, dict[str, Tensor]] = {}
        self.epoch_seconds: list[float] = []
        self.padding = 0.0
        self.watches: list[Timed] = []

    def loading(self, merge: Callable[..., Any]) -> dict[str, Any]:
        """Return options for the loaders of this run."""
        return {"num_workers": self.args.workers, "collate_fn": merge}

    def sampling(self) -> dict[str, Any]:
        """Return options for the sampler of this run."""
        options = {"window": self.args.window, "seed": self.args.seed}
        return {**options, "drop_last": True}

    def timed(self, function: Callable[..., Any]) -> Timed:
        """Return the function with a stopwatch; the report has its total time."""
        self.watches.append(Timed(function))
        return self.watches[-1]

    def optimizer(
        self, model: MMDistributedDataParallel, num_steps: int
    ) -> tuple[torch.optim.Optimizer, OneCycleLR]:
        """Return the optimizer and its schedule for steps of all epochs."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        total = self.args.epochs * num_steps
        return optimizer, OneCycleLR(optimizer, 4e-3, total, pct_start=0.15)

    def each_once(self, scenes: Any, merge: Timed) -> DataLoader[Any]:
        """Return a loader of this rank's held-out scenes, without repetitions.

        ``DistributedSampler`` would repeat scenes to give every rank the same number.
        Counts are summed over the ranks, so each scene must belong to exactly one.
        Batches of similar sizes have as little padding as in training.
        """
        share = range(dist.get_rank(), len(scenes), dist.get_world_size())
        sampler = SizeBatchSampler(
            [draw_size(index, held_out=True)[1] for index in share],
            self.args.batch,
            shuffle=False,
            window=self.args.window,
            num_replicas=1,
            rank=0,
        )
        options = self.loading(merge.function)
        return DataLoader(Subset(scenes, share), batch_sampler=sampler, **options)

    def log(self, loss: float) -> None:
        """Record the loss of a step."""
        self.losses.append(loss)

    def epochs(
        self,
        model: MMDistributedDataParallel,
        loader: Any,
        val_loader: DataLoader[Any],
        checkpoint: Checkpoint,
    ) -> Iterator[Any]:
        """Yield the batches of all remaining epochs; score after each epoch."""
        progress = checkpoint.load(epoch=0, losses=[], scores=[])
        self.losses, self.scores = progress["losses"], progress["scores"]
        quiet = dist.get_rank() > 0
        model.scatter = self.timed(model.scatter)  # type: ignore[method-assign]  # timed
        for epoch in range(progress["epoch"], self.args.epochs):
            loader.batch_sampler.set_epoch(epoch)
            model.train()
            start = time.perf_counter()
            title = f"epoch {epoch + 1}/{self.args.epochs}"
            with tqdm(loader, title, disable=quiet) as bar:
                for data in bar:
                    yield data
                    bar.set_postfix(loss=f"{self.losses[-1]:.2f}", refresh=False)
                    steps, last = len(self.losses), (epoch + 1) * len(loader)
                    if steps == last or steps % self.args.every == 0:
                        self._save(checkpoint, epoch)
            self.epoch_seconds.append(time.perf_counter() - start)
            self._score(model, val_loader)
        self.padding = loader.stats().padding_fraction
        if not quiet:
            print(loader.stats().verdict)

    def _save(self, checkpoint: Checkpoint, epoch: int) -> None:
        checkpoint.save(epoch=epoch, losses=self.losses, scores=self.scores)

    @torch.no_grad()
    def _score(self, model: MMDistributedDataParallel, loader: DataLoader[Any]) -> None:
        """Score the detections of all ranks; keep those of this rank."""
        model.eval()
        counts = torch.zeros(3, dtype=torch.long)
        for data in loader:
            results = model(return_loss=False, **data)
            # The batch itself still has DataContainers, with one chunk each.
            (boxes,), (labels,) = data["gt_bboxes"].data, data["gt_labels"].data
            (metas,) = data["img_metas"].data
            for meta, result, *there in zip(metas, results, boxes, labels, strict=True):
                counts += count_matches(result, *there)
                self.found[meta["index"]] = result
        dist.all_reduce(counts)
        self.scores.append(quality(counts))
        if dist.get_rank() == 0:
            print("held-out:", *(f"{k} {v:.3f} " for k, v in self.scores[-1].items()))

    def result(self) -> dict[str, Any]:
        """Return the data for the summary and the pictures."""
        shown = sorted(self.found)[:16]
        total = sum(self.epoch_seconds)
        share = sum(watch.seconds for watch in self.watches) / (total or 1)
        return {
            "losses": self.losses,
            "scores": self.scores,
            "epoch_seconds": self.epoch_seconds,
            "padding": self.padding,
            "shown": [(compose(index, True), self.found[index]) for index in shown],
            # Workers collate in their own processes, which the stopwatch does not see.
            "share": None if self.args.workers else share,
        }


def options(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scenes", type=int, default=2400, help="training scenes")
    parser.add_argument("--val-scenes", type=int, default=400, help="held-out scenes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="scenes per process")
    parser.add_argument(
        "--window", type=int, default=50, help="of SizeBatchSampler; 1: random batches"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--workers", type=int, default=0, help="loader workers")
    parser.add_argument("--checkpoint", type=Path, help="continue from this file")
    parser.add_argument("--every", type=int, default=50, help="steps to a checkpoint")
    parser.add_argument("--min-f1", type=float, default=0.95, help="fail below this")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    return parser.parse_args()


def main(train: Callable[[Demo], None], about: str | None) -> None:
    """Train and report, under torchrun or alone."""
    args = options((about or "").split("\n")[0])
    alone: Any = {}
    if "RANK" not in os.environ:  # not started by torchrun: a group of one
        store = dist.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs
        alone = {"store": store, "rank": 0, "world_size": 1}
    start, demo = time.perf_counter(), Demo(args)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **alone)
    try:
        train(demo)
        if dist.get_rank() == 0:
            write_report(args, demo.result(), time.perf_counter() - start)
            f1 = demo.scores[-1]["f1"]
            if f1 < args.min_f1:
                raise SystemExit(f"F1 is {f1:.3f}, below --min-f1 {args.min_f1}")
    finally:
        dist.destroy_process_group()
