"""Train a small detector on pictures of different sizes, on the CPU, in a minute.

    torchrun --nproc_per_node=2 examples/ragged_digits.py
    python examples/ragged_digits.py

Real handwritten digits of scikit-learn are composed into scenes of different sizes,
with one to eight digits each. Digits of validation scenes are not used for training.

A `DataContainer` defines how each field is batched. `collate` makes the batch. The
wrapper passes tensors to ``train_step``. The rest is in `_demo.py`, `_digits.py`.
"""

from functools import partial
from typing import Any

import _demo  # first: it prints how to install missing packages
import _digits as digits
from torch import nn
from torch.utils.data import Dataset

from pyparallel import (
    DataContainer,
    DataLoader,
    MMDistributedDataParallel,
    SizeBatchSampler,
    collate,
)


class Scenes(Dataset[dict[str, DataContainer]]):
    """Ragged samples: each field is batched in its own way."""

    def __init__(self, num_scenes: int, held_out: bool) -> None:
        self.num_scenes, self.held_out = num_scenes, held_out

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, index: int) -> dict[str, DataContainer]:
        scene = digits.compose(index, self.held_out)
        heatmap = digits.draw_heatmap(scene)
        meta = dict(index=index, shape=tuple(scene.img.shape[1:]))
        return {
            # Padded with 0 to the largest scene, stacked: (batch, 1, height, width).
            "img": DataContainer(scene.img, stack=True),
            # The same, but padding must not count as "no digit here".
            "heatmap": DataContainer(heatmap, stack=True, padding_value=digits.OUTSIDE),
            # One box for each digit: kept as a list of tensors.
            "gt_bboxes": DataContainer(scene.boxes),
            "gt_labels": DataContainer(scene.labels),
            # Python objects: kept as a list, and never sent to a device.
            "img_metas": DataContainer(meta, cpu_only=True),
        }


class Detector(nn.Module):
    """Convolutions to a heat map of centres. It gets tensors, not containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = digits.network()

    def forward(self, return_loss: bool = True, **data: Any) -> Any:
        """Return the loss, or the detections in every scene."""
        scores = self.layers(data["img"]).sigmoid().clamp(1e-4, 1 - 1e-4)
        if return_loss:
            return digits.focal_loss(scores, data["heatmap"])
        return digits.find_peaks(scores, [meta["shape"] for meta in data["img_metas"]])

    def train_step(self, data: dict[str, Any], optimizer: Any) -> dict[str, Any]:
        """Return a step's loss; as in mmcv 1.x, the caller does the backward pass."""
        loss = self(**data)
        log_vars = {"loss": float(loss.detach())}
        return dict(loss=loss, log_vars=log_vars, num_samples=len(data["img_metas"]))


def train(demo: _demo.Demo) -> None:
    """Train on this rank, starting from the checkpoint."""
    scenes = Scenes(demo.args.scenes, held_out=False)
    sizes = [digits.draw_size(index, held_out=False)[1] for index in range(len(scenes))]
    sampler: Any = SizeBatchSampler(sizes, demo.args.batch, **demo.sampling())
    merge = demo.timed(partial(collate, samples_per_gpu=demo.args.batch))
    loader: Any = DataLoader(scenes, batch_sampler=sampler, **demo.loading(merge))
    val_loader = demo.each_once(Scenes(demo.args.val_scenes, held_out=True), merge)
    model = MMDistributedDataParallel(Detector())  # a CPU module: no device_ids
    optimizer, schedule = demo.optimizer(model, len(loader))
    parts = dict(model=model, optimizer=optimizer, schedule=schedule)
    checkpoint = _demo.Checkpoint(demo.args.checkpoint, loader, **parts)
    for data in demo.epochs(model, loader, val_loader, checkpoint):
        outputs = model.train_step(data, optimizer)
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        schedule.step()
        demo.log(outputs["log_vars"]["loss"])


if __name__ == "__main__":
    _demo.main(train, __doc__)
