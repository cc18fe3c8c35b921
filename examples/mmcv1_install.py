"""Code for mmcv 1.x as found in many repositories; only the first two lines are new.

    python examples/mmcv1_install.py

The model counts the digits in pictures of different sizes. The runner of mmcv 1.x
trains it. Without mmcv, or with mmcv 2.x, which has no runner, a loop does the same.
"""

import pyparallel.mmcv

pyparallel.mmcv.install()  # before anything imports mmcv.runner

import logging
from functools import partial

import torch
from _digits import compose
from mmcv.parallel import DataContainer as DC
from mmcv.parallel import MMDataParallel, collate, scatter
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from mmcv.runner import EpochBasedRunner
except (ImportError, AttributeError):  # mmcv 2.x, or the replacement for a missing mmcv
    EpochBasedRunner = None


class Pictures(Dataset):
    """Scenes with one to eight digits, each of its own size."""

    def __init__(self, num_scenes, held_out=False):
        self.scenes = [compose(i, held_out) for i in range(num_scenes)]

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        scene, results = self.scenes[index], {}
        results["img"] = DC(scene.img, stack=True)
        results["gt_num"] = DC(torch.tensor([float(len(scene.labels))]))
        results["img_metas"] = DC(dict(shape=scene.img.shape), cpu_only=True)
        return results


class Counter(nn.Module):
    """Sums over a picture: its padding adds nothing, with zeros and no bias."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, padding=2, bias=False)
        self.conv2 = nn.Conv2d(8, 8, 5, padding=2, bias=False)

    def forward(self, img, img_metas, return_loss=True, gt_num=None):
        """Return the error of the counts, or the counts."""
        found = self.conv2(self.conv1(img).relu()).relu().sum((1, 2, 3)) / 100
        return (found - torch.cat(gt_num)).abs().mean() if return_loss else found

    def train_step(self, data, optimizer):
        """Return the values that mmcv's runner and its hooks expect."""
        loss = self(**data)
        log_vars, num_samples = dict(loss=loss.item()), len(data["img_metas"])
        return dict(loss=loss, log_vars=log_vars, num_samples=num_samples)


def train(model, data_loader, max_epochs):
    """Train like mmcv 1.x."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    if EpochBasedRunner is not None:
        log = logging.getLogger("mmcv1")
        options = dict(optimizer=optimizer, logger=log, max_epochs=max_epochs)
        runner = EpochBasedRunner(model, **options)
        runner.register_optimizer_hook(dict(grad_clip=None))
        return runner.run([data_loader], [("train", 1)])
    for data_batch in (batch for _ in range(max_epochs) for batch in data_loader):
        outputs = model.train_step(data_batch, optimizer)
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()


def main():
    """Train, then count in held-out pictures, one by one."""
    torch.manual_seed(0)
    loader = DataLoader(
        Pictures(400), 8, shuffle=True, collate_fn=partial(collate, samples_per_gpu=8)
    )
    model = MMDataParallel(Counter(), device_ids=[0])
    train(model, loader, max_epochs=3)
    off = 0.0
    for sample in Pictures(50, held_out=True):
        data = scatter(collate([sample], samples_per_gpu=1), [-1])[0]
        off += abs(model.module(return_loss=False, **data) - data["gt_num"][0]).item()
    by = "mmcv.runner" if EpochBasedRunner else "a loop"
    print(f"trained by {by}: {off / 50:.2f} digits off, on average")


if __name__ == "__main__":
    main()
