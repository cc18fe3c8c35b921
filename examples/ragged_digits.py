"""Train a small detector on pictures of different sizes, on the CPU, in a minute.

    torchrun --nproc_per_node=2 examples/ragged_digits.py
    python examples/ragged_digits.py

With ``--checkpoint FILE`` a run that was stopped goes on where it was.

The pixels are real: handwritten digits that come with scikit-learn. The layout is
composed: every scene is a canvas of its own size with one to eight digits pasted on
it. No digit of a held-out scene is ever seen in training.

Scenes differ in size and in how many digits they hold. Each field of a sample says in
a `DataContainer` how it is batched; `collate` makes the batch; the wrapper
`MMDistributedDataParallel` opens it and runs the model's ``train_step``.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from pyparallel import (
    DataContainer,
    DataLoader,
    MMDistributedDataParallel,
    collate,
)

try:
    from _checkpoint import Checkpoint
    from _digits import (
        NUM_CLASSES,
        OUTSIDE,
        STRIDE,
        compose,
        count_matches,
        draw_heatmap,
        find_peaks,
        focal_loss,
        quality,
    )
    from _report import write_report
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(
        f"This example needs more packages ({error}).\n"
        "Install them with: pip install 'pyparallel-torch[demo]'"
    ) from error


class Scenes(Dataset[dict[str, DataContainer]]):
    """Ragged samples: no two fields are batched in the same way."""

    def __init__(self, num_scenes: int, held_out: bool) -> None:
        self.num_scenes, self.held_out = num_scenes, held_out

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, index: int) -> dict[str, DataContainer]:
        scene = compose(index, self.held_out)
        return {
            # Padded with 0 to the largest scene of the batch, at the end of the last
            # two dimensions, and stacked: (batch, 1, height, width).
            "img": DataContainer(scene.img, stack=True),
            # The same, but padding must not count as "no digit here": another value.
            "heatmap": DataContainer(
                draw_heatmap(scene), stack=True, padding_value=OUTSIDE
            ),
            # As many as there are digits: kept as a list of tensors.
            "gt_bboxes": DataContainer(scene.boxes),
            "gt_labels": DataContainer(scene.labels),
            # Any Python objects: kept as a list, and never sent to a device.
            "img_metas": DataContainer(
                {"index": index, "shape": tuple(scene.img.shape[1:])}, cpu_only=True
            ),
        }


class Detector(nn.Module):
    """Six convolutions to a heat map of centres, with the step API of mmcv 1.x.

    The wrapper opens the containers first: here ``img`` is a tensor, ``gt_bboxes`` a
    list of tensors and ``img_metas`` a list of dicts.
    """

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(5):
            inputs, stride = (1 if i == 0 else channels), (STRIDE if i == 1 else 1)
            layers.append(nn.Conv2d(inputs, channels, 3, stride, 1, bias=False))
            layers += [nn.GroupNorm(4, channels), nn.ReLU()]
        head = nn.Conv2d(channels, NUM_CLASSES, 3, padding=1)
        # 1 % of cells. That a bias may be None is what mypy sees of it.
        nn.init.constant_(head.bias, -4.6)  # type: ignore[arg-type]
        self.layers = nn.Sequential(*layers, head)

    def forward(self, return_loss: bool = True, **data: Any) -> Any:
        """Return the loss, or what was found in every scene."""
        scores = self.layers(data["img"]).sigmoid().clamp(1e-4, 1 - 1e-4)
        if return_loss:
            return focal_loss(scores, data["heatmap"])
        return find_peaks(scores, [meta["shape"] for meta in data["img_metas"]])

    def train_step(self, data: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return a step's loss; as in mmcv 1.x, the caller does the backward pass."""
        loss = self(**data)
        return {
            "loss": loss,
            "log_vars": {"loss": float(loss.detach())},
            "num_samples": len(data["img_metas"]),
        }


class Timed:
    """A function that adds up the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


@torch.no_grad()
def evaluate(
    model: MMDistributedDataParallel, loader: DataLoader[Any]
) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Return the quality over all ranks, and what this rank found."""
    model.eval()
    counts, found = torch.zeros(3, dtype=torch.long), []
    for data in loader:
        results = model(return_loss=False, **data)
        # The batch itself is still closed: `.data[0]` is its first (and only) chunk.
        truth = zip(data["gt_bboxes"].data[0], data["gt_labels"].data[0], strict=True)
        for result, (boxes, labels) in zip(results, truth, strict=True):
            counts += count_matches(result, boxes, labels)
        found += results
    dist.all_reduce(counts)
    return quality(counts), found


def loaders(
    args: argparse.Namespace, timed_collate: Callable[..., Any]
) -> tuple[Any, Any]:
    """Return this rank's loaders of training and of held-out scenes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    options: Any = {"batch_size": args.batch, "num_workers": args.workers}
    scenes, held_out = Scenes(args.scenes, False), Scenes(args.val_scenes, True)
    sampler: Any = DistributedSampler(scenes, seed=0, drop_last=True)
    loader: Any = DataLoader(
        scenes, sampler=sampler, collate_fn=timed_collate, **options
    )
    # DistributedSampler would repeat scenes to give every rank the same number. Counts
    # are added up over the ranks, so here each scene must belong to exactly one.
    val_loader: Any = DataLoader(
        held_out,
        sampler=range(rank, len(held_out), world),
        collate_fn=functools.partial(collate, samples_per_gpu=args.batch),
        **options,
    )
    return loader, val_loader


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train on this rank; return what the summary and the pictures need."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    timed_collate = Timed(functools.partial(collate, samples_per_gpu=args.batch))
    loader, val_loader = loaders(args, timed_collate)
    model = MMDistributedDataParallel(Detector())  # a CPU module: no device_ids
    # mypy lets nobody replace a method; here one is put into a stopwatch.
    model.scatter = timed_scatter = Timed(model.scatter)  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=args.epochs * len(loader), pct_start=0.15
    )
    checkpoint = Checkpoint(
        args.checkpoint, loader, model=model, optimizer=optimizer, schedule=schedule
    )
    progress = checkpoint.load(epoch=0, losses=[], scores=[])
    losses, scores, seconds = progress["losses"], progress["scores"], 0.0
    found: list[dict[str, Tensor]] = []
    for epoch in range(progress["epoch"], args.epochs):
        loader.sampler.set_epoch(epoch)
        model.train()  # type: ignore[no-untyped-call]  # torch's has no types
        start = time.perf_counter()
        with tqdm(loader, f"epoch {epoch + 1}/{args.epochs}", disable=rank > 0) as bar:
            for data in bar:
                outputs = model.train_step(data, optimizer)
                optimizer.zero_grad()
                outputs["loss"].backward()
                optimizer.step()
                schedule.step()
                losses.append(outputs["log_vars"]["loss"])
                bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
                last = len(losses) == (epoch + 1) * len(loader)
                if last or len(losses) % args.every == 0:
                    checkpoint.save(epoch=epoch, losses=losses, scores=scores)
        seconds += time.perf_counter() - start
        score, found = evaluate(model, val_loader)
        scores.append(score)
        if rank == 0:
            print("held-out:", *(f"{k} {v:.3f} " for k, v in score.items()))
    if rank == 0:
        print(loader.stats().verdict)
    moving = timed_collate.seconds + timed_scatter.seconds
    return {
        "losses": losses,
        "scores": scores,
        # This rank has seen every world-th held-out scene, in order.
        "shown": [
            (compose(rank + i * world, True), each) for i, each in enumerate(found[:16])
        ],
        # Workers collate in their own processes, where this clock does not see them.
        "share": None if args.workers else moving / seconds,
    }


def main() -> None:
    """Read the command line and run, under torchrun or alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scenes", type=int, default=2400, help="training scenes")
    parser.add_argument("--val-scenes", type=int, default=400, help="held-out scenes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="scenes per process")
    parser.add_argument("--workers", type=int, default=0, help="loader workers")
    parser.add_argument("--checkpoint", type=Path, help="continue from here if it is")
    parser.add_argument("--every", type=int, default=50, help="steps to a checkpoint")
    parser.add_argument("--min-f1", type=float, default=0.95, help="fail below this")
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    args = parser.parse_args()
    alone: Any = {}
    if "RANK" not in os.environ:  # not started by torchrun: a group of one
        store = dist.HashStore()  # type: ignore[attr-defined]  # not in torch's stubs
        alone = {"store": store, "rank": 0, "world_size": 1}
    start = time.perf_counter()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **alone)
    try:
        result = train(args)
        if dist.get_rank() == 0:
            write_report(args, result, time.perf_counter() - start)
            f1 = result["scores"][-1]["f1"]
            if f1 < args.min_f1:
                raise SystemExit(f"F1 is {f1:.3f}, below --min-f1 {args.min_f1}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
