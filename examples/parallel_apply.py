"""Run eight images through a small network, on all available devices.

    python examples/parallel_apply.py
    python examples/parallel_apply.py --devices cpu cpu cpu

Each device has a thread and a replica of the network. Results come back in the order of
the images, and a backward pass leaves gradients in the network itself.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from pyparallel import parallel_apply


def network() -> nn.Module:
    """Return a network from images ``(n, 3, 32, 32)`` to ten classes, ``(n, 10)``."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


def classify(model: nn.Module, images: Tensor, devices: list[str] | None) -> Tensor:
    """Return ``(n, 10)`` for images ``(n, 3, 32, 32)``."""
    # One image is an item of shape (1, 3, 32, 32), and its result one of (1, 10).
    return torch.cat(parallel_apply(model, images, devices))


def main() -> None:
    """Compare calls on several devices with a single call; print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", help="default: all devices")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, images = network(), torch.randn(8, 3, 32, 32)
    scores = classify(model, images, args.devices)
    print(f"{tuple(images.shape)} -> {tuple(scores.shape)} on {scores.device}")

    scores.logsumexp(1).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    in_one_call = model(images)
    torch.testing.assert_close(scores.cpu(), in_one_call, rtol=1e-4, atol=1e-5)
    found = sum(gradient is not None for gradient in gradients)
    print(
        f"equal to one call on the whole batch; {found} of {len(gradients)} gradients"
    )


if __name__ == "__main__":
    main()
