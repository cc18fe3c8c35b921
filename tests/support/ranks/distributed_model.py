"""Models, wrappers and batches of the distributed tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from pyparallel import DataContainer, MMDistributedDataParallel, collate, scatter
from pyparallel.mmengine import BaseModel

SAMPLES = 4  # for one rank and step
METHODS = ("forward", "train_step", "val_step")


def caller(wrapper: Any, method: str) -> Any:
    """Return the wrapper itself for ``forward``, otherwise its method."""
    return wrapper if method == "forward" else getattr(wrapper, method)


class Net(nn.Module):
    """A classifier whose gradients do not depend on the padding of its images."""

    def __init__(self, norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.boxes = nn.Linear(4, 4)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 2) if unused else None
        self.norm_at_entry: list[torch.Tensor] = []

    def forward(self, data: Any) -> torch.Tensor:
        area = torch.tensor([float(h * w) for h, w in data["metas"]])
        image = self.conv(data["img"]).relu().sum((2, 3)) / area[:, None]
        boxes = torch.stack([self.boxes(b).tanh().sum(0) for b in data["boxes"]])
        return torch.cat([self.norm(image), boxes], 1)

    def train_step(self, data: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        if isinstance(self.norm, nn.BatchNorm1d):
            self.norm_at_entry.append(self.norm.running_mean.clone())
        feature = self(data)
        loss = cross_entropy(self.head(feature), data["label"])
        output = dict(loss=loss, log_vars=dict(loss=loss.item()), num_samples=4)
        if self.unused is not None:
            output["not in the loss"] = self.unused(feature)
        return output

    val_step = train_step


class StepIsForward(nn.Module):
    """The model in the form for torch's DDP: the training step is ``forward``."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: Any) -> Any:
        return self.net.train_step(data)


class Reference:
    """torch's own DDP around a module whose forward is the step."""

    def __init__(self, net: Net, **options: Any) -> None:
        self.ddp = DistributedDataParallel(StepIsForward(net), **options)
        self.no_sync, self.join = self.ddp.no_sync, self.ddp.join

    def train_step(self, data: Any, optimizer: Any = None) -> Any:
        return self.ddp(scatter(data, [-1])[0])

    val_step = train_step


class Recorder(nn.Module):
    """A model that records its arguments and returns a given value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls: list[Any] = []
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.output

    train_step = val_step = forward


class OldFix(MMDistributedDataParallel):
    """The forward that projects use to fix mmcv with recent torch."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self.to_kwargs(inputs, kwargs, -1)
        return self.module(*inputs[0], **kwargs[0])


class Marked(MMDistributedDataParallel):
    """Adds a keyword argument in ``to_kwargs`` and ``scatter``."""

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        kwargs = kwargs | {"by": "to_kwargs", "target": device_id}
        return super().to_kwargs(inputs, kwargs, device_id)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        kwargs = kwargs | {"by": "scatter", "target": device_ids}
        return super().scatter(inputs, kwargs, device_ids)


class Failing(StepIsForward):
    """A step that fails on request."""

    def train_step(self, data: Any, fail: bool) -> Any:
        if fail:
            raise ZeroDivisionError("in the step")
        return self.net.train_step(data)

    forward = train_step


class Protocol(BaseModel):
    """A model of mmengine's protocol."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "") -> Any:
        return {"loss": self.layer(inputs).square().mean()}


class Updating(Protocol):
    """A model whose step runs the backward pass, and the update if it can."""

    def train_step(self, data: Any, optimizer: Any) -> Any:
        loss = self(**data)["loss"]
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return {"log_vars": {"loss": loss.item()}, "num_samples": 1}


class Adversaries(nn.Module):
    """Two networks whose backward passes run inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(2, 2), nn.Linear(2, 1)

    def train_step(self, data: Any, optimizer: Any, ddp_reducer: Any) -> Any:
        for name, sign in (("d", 1.0), ("g", -1.0)):
            optimizer[name].zero_grad()
            fake = self.g(data) if name == "g" else self.g(data).detach()
            loss = sign * self.d(fake).tanh().mean()
            ddp_reducer.prepare_for_backward(list(_find_tensors(loss)))
            loss.backward()
            optimizer[name].step()
        return {
            "log_vars": {"loss": loss.item()},
            "num_samples": 1,
            "fake": fake.detach(),
        }


def make_samples(step: int, num_samples: int) -> list[dict[str, Any]]:
    """Ragged images and boxes: those of one step, for all ranks."""
    random = torch.Generator().manual_seed(step)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    samples = []
    for i in range(num_samples):
        h, w = size(3, 9), size(3, 9)
        image = torch.rand(3, h, w, generator=random)
        boxes = torch.rand(size(0, 5), 4, generator=random)
        samples.append(
            {
                "img": DataContainer(image, stack=True),
                "boxes": DataContainer(boxes),
                "metas": DataContainer((h, w), cpu_only=True),
                "label": i % 3,
            }
        )
    return samples


def make_batch(step: int, rank: int, world: int, num_samples: int = SAMPLES) -> Any:
    samples = make_samples(step, num_samples * world)
    return collate(samples[rank::world], num_samples)


def make_net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def values(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def gradients(module: Any) -> torch.Tensor:
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1)
         for p in module.parameters()]
    )  # fmt: skip
