"""The report of the digit example: a summary and two pictures."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from _digits import SIDE, Scene, count_matches

import pyparallel
from pyparallel import backend

matplotlib.use("Agg")  # draw into files: no window is needed

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

Shown = list[tuple[Scene, dict[str, torch.Tensor]]]


def write_report(
    args: argparse.Namespace, result: dict[str, Any], seconds: float
) -> None:
    """Write ``summary.json`` and the pictures to ``args.out``, and print the path."""
    score, share = result["scores"][-1], result["share"]
    summary = {
        **{name: round(value, 4) for name, value in score.items()},
        "seconds": round(seconds, 1),
        "epochs": args.epochs,
        "epoch_seconds": [round(each, 3) for each in result["epoch_seconds"]],
        "padding": round(result["padding"], 4),
        "collate_and_scatter_share": None if share is None else round(share, 4),
        "processes": dist.get_world_size(),
        "data": "real digits (scikit-learn load_digits), composed layout",
        "backend": backend.name,
        "versions": {
            "pyparallel": pyparallel.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "options": {name: str(value) for name, value in vars(args).items()},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    plot_training(result["losses"], result["scores"], args.out / "training.png")
    plot_predictions(result["shown"], args.out / "predictions.png")
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"F1 {score['f1']:.3f} on {args.val_scenes} held-out scenes after "
        f"{seconds:.0f} s ({dist.get_world_size()} processes, {backend.name} backend)"
    )
    if times := result["epoch_seconds"]:
        print(
            f"{sum(times) / len(times):.1f} s for an epoch, "
            f"{100 * result['padding']:.0f} % of the stacked bytes are padding "
            f"(--window {args.window})"
        )
    if share is not None:
        print(f"collate and scatter: {100 * share:.1f} % of the training time")
    print("Digits are real, their layout is composed. Written to", args.out.resolve())
    print("  training.png, predictions.png, summary.json")


def plot_training(
    losses: list[float], scores: list[dict[str, float]], path: Path
) -> None:
    """Draw the loss of every step and the scores after every epoch."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    smooth, value = [], losses[0]
    for loss in losses:
        value += 0.2 * (loss - value)
        smooth.append(value)
    left.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="each step")
    left.plot(smooth, color="tab:blue", label="smoothed")
    left.set(title="Training loss of rank 0", xlabel="step", yscale="log")
    left.legend(frameon=False)
    epochs = range(1, len(scores) + 1)
    for name, style in (("f1", "o-"), ("precision", "^--"), ("recall", "v--")):
        values = [score[name] for score in scores]
        label = f"{name.replace('f1', 'F1')} {values[-1]:.3f}"
        right.plot(epochs, values, style, label=label)
    right.set(title="Held-out scenes, IoU 0.5", xlabel="epoch", xticks=list(epochs))
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_predictions(shown: Shown, path: Path, width: int = 280) -> None:
    """Draw scenes in rows, all at one scale, with their detections."""
    places, x, y, tallest = [], 0, 0, 0
    for scene, _ in shown:
        height, needed = scene.img.shape[1:]
        if x and x + needed > width:
            x, y, tallest = 0, y + tallest + 10, 0
        places.append((x, y))
        x, tallest = x + needed + 8, max(tallest, height)
    size = (12, 12 * (y + tallest + 16) / (width + 4))
    figure = plt.figure(figsize=size, facecolor="#e8e8e8")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-2, width + 2), ylim=(y + tallest + 2, -14), aspect="equal")
    axes.axis("off")
    for (scene, found), corner in zip(shown, places, strict=True):
        draw_scene(axes, scene, found, *corner)
    counts = [count_matches(found, scene.boxes, scene.labels) for scene, found in shown]
    hits, extra, missed = torch.stack(counts).sum(0).tolist()
    axes.text(
        0,
        -8,
        f"{hits} of {hits + missed} held-out digits found (green), {missed} missed "
        f"(yellow), {extra} wrong (red). Real pixels, composed layout.",
        fontsize=12,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_scene(
    axes: Any, scene: Scene, found: dict[str, torch.Tensor], x: int, y: int
) -> None:
    """Draw one scene with its top left corner at ``(x, y)``."""
    height, width = scene.img.shape[1:]
    extent = (x, x + width, y + height, y)
    axes.imshow(scene.img[0], cmap="gray", vmin=0, vmax=1, extent=extent)
    axes.text(x, y - 0.7, f"{height} x {width}", fontsize=7.5, color="#555555")
    missed = torch.ones(len(scene.boxes), dtype=torch.bool)
    for box, label in zip(found["boxes"], found["labels"], strict=True):
        one = {"boxes": box[None], "labels": label[None], "scores": torch.ones(1)}
        right = count_matches(one, scene.boxes, scene.labels)[0] > 0
        color = "limegreen" if right else "red"
        if right:
            missed[(scene.boxes - box).abs().sum(1).argmin()] = False
        draw_box(axes, box, x, y, color)
        axes.text(
            x + float(box[0]),
            y + float(box[1]),
            str(int(label)),
            fontsize=7,
            fontweight="bold",
            va="center",
            ha="center",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": color, "linewidth": 0},
        )
    for box in scene.boxes[missed]:
        draw_box(axes, box, x, y, "gold")


def draw_box(axes: Any, box: torch.Tensor, x: int, y: int, color: str) -> None:
    """Outline one box."""
    corner = (x + float(box[0]), y + float(box[1]))
    axes.add_patch(Rectangle(corner, SIDE, SIDE, fill=False, edgecolor=color))
