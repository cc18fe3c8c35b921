"""The sizes and the mask of a batch, used on outputs: unpad, resize_mask."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pyparallel import Padded, Padding, Ragged, pad_stack, resize_mask, unpad
from tests.support.processes.backends import both, using

devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


@both
@devices
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_unpad_is_the_inverse_of_padding(
    backend: ModuleType, device: str, num_dims: int
) -> None:
    """The cells of sample i, and the gradient of these cells alone."""
    rng = random.Random(num_dims)
    for _ in range(30):
        side = tuple(rng.choice(["left", "right", "center"]) for _ in range(num_dims))
        shapes = [
            (2, *(rng.randint(0, 5) for _ in range(num_dims)))
            for _ in range(rng.randint(1, 4))
        ]
        leaves = [
            torch.rand(each, device=device).add(1).requires_grad_() for each in shapes
        ]
        with using(backend):
            padded = pad_stack(
                leaves,
                pad_dims=num_dims,
                size_divisor=rng.randint(1, 3),
                side=side,
                sizes=True,
            )
        outputs = padded.data.detach().requires_grad_()
        found = unpad(outputs, padded.sizes, side=side)
        assert all(map(torch.equal, found, leaves))
        assert all(each._base is not None for each in found)  # views
        torch.cat([each.flatten() for each in found]).sum().backward()
        assert torch.equal(outputs.grad, (outputs.detach() != 0).float())
        # The same dimensions in front of others, as in outputs (n, time, classes).
        turned = padded.data.movedim(1, -1)
        again = unpad(turned, padded.sizes.tolist(), dim=1, side=side)
        assert all(
            torch.equal(one.movedim(-1, 0), other)
            for one, other in zip(again, leaves, strict=True)
        )


def test_unpad_of_a_padded_ragged_returns_its_samples() -> None:
    samples = [torch.rand(3, 2), torch.rand(0, 2), torch.rand(1, 2)]
    padded = Ragged.from_tensors(samples).to_padded(padding=Padding(sizes=True))
    assert isinstance(padded, Padded)
    found = unpad(padded.data, padded.sizes, dim=-2)
    assert all(map(torch.equal, found, samples))
    assert unpad(torch.rand(0, 3), torch.empty(0, 1)) == []


@pytest.mark.parametrize(
    "lengths",
    [[3, 0], torch.tensor([3, 0]), np.array([3, 0]), list(torch.tensor([3, 0]))],
    ids=["list", "tensor", "array", "tensors"],
)
def test_lengths_are_the_sizes_of_one_dimension(lengths: Any) -> None:
    """As of a Ragged, or of an audio network."""
    outputs = torch.rand(2, 5, 4)
    found = unpad(outputs, lengths, dim=1)
    assert [each.tolist() for each in found] == [outputs[0, :3].tolist(), []]


def strided(stride: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mask and the sizes of three images, and their feature maps."""
    images = [torch.rand(3, *size) for size in [(101, 75), (64, 99), (1, 120)]]
    batch = pad_stack(images, pad_dims=2, size_divisor=stride, mask=True, sizes=True)
    assert batch.sizes is not None and batch.mask is not None
    return batch.mask, -(-batch.sizes // stride), F.avg_pool2d(batch.data, stride)


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_both_functions_find_the_same_cells_of_a_feature_map(stride: int) -> None:
    mask, sizes, features = strided(stride)
    small = resize_mask(mask, features.shape[-2:])
    cells = unpad(small, sizes)
    assert all(map(torch.all, cells))
    assert sum(each.numel() for each in cells) == small.sum()


@pytest.mark.slow
def test_compiled_programs_use_both_functions_without_a_graph_break() -> None:
    def use(
        mask: torch.Tensor, sizes: list[list[int]], features: torch.Tensor
    ) -> list[torch.Tensor]:
        return [resize_mask(mask, features.shape[-2:]), *unpad(features, sizes)]

    compiled = torch.compile(use, fullgraph=True, backend="eager")
    for stride in (8, 16, 32):
        mask, sizes, features = strided(stride)
        arguments = mask, sizes.tolist(), features
        assert all(map(torch.equal, compiled(*arguments), use(*arguments)))


def test_values_of_sizes_that_the_host_cannot_read_are_explained() -> None:
    outputs = torch.rand(2, 2, 3)
    batched = torch.ones(2, 2, 1, dtype=torch.int64)
    for call in (
        lambda: torch.func.vmap(unpad)(outputs, batched[0]),
        lambda: unpad(outputs, batched[0].to("meta")),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        (note,) = caught.value.__notes__
        assert note == "unpad: the host reads sizes. Here, pass them as lists."
    found = torch.func.vmap(lambda each: unpad(each, [1, 2]))(outputs)
    assert [tuple(each.shape) for each in found] == [(2, 1), (2, 2)]


def test_an_exported_size_follows_the_features() -> None:
    class Net(torch.nn.Module):
        def forward(self, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            return resize_mask(mask, features.shape[-2:])

    auto = torch.export.Dim.AUTO
    masks = [torch.rand(2, 8 * n, 8 * n + 16) < 0.5 for n in (2, 3)]
    features = [torch.rand(2, 1, n, n + 2) for n in (2, 3)]
    dynamic = {1: auto, 2: auto}, {2: auto, 3: auto}
    program = torch.export.export(
        Net(), (masks[0], features[0]), dynamic_shapes=dynamic, strict=False
    )
    found = program.module()(masks[1], features[1])
    assert torch.equal(found, resize_mask(masks[1], (3, 5)))


ROWS = [[2, 3], [1, 4]]
WRONG: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    ([1], ROWS, {}, TypeError, "unpad: outputs must be a tensor, but is list."),
    (
        torch.rand(2, 3, 4),
        [[2, 3], [1, 5]],
        {},
        ValueError,
        "unpad: sizes[1] must be 0 to (3, 4), the padded sizes of outputs, but is (1, "
        "5). If the network changes the resolution, pass the sizes of its outputs. If "
        "the padded dimensions are not the last ones, pass dim.",
    ),
    (
        torch.rand(2, 3, 4),
        [[2, -1], [1, 4]],
        {},
        ValueError,
        "unpad: sizes[0] must be 0 to (3, 4), the padded sizes of outputs, but is (2, "
        "-1). If the network changes the resolution, pass the sizes of its outputs. If "
        "the padded dimensions are not the last ones, pass dim.",
    ),
    (
        torch.rand(3, 3, 4),
        ROWS,
        {},
        ValueError,
        "unpad: sizes must have one row for each of the 3 samples in outputs, and "
        "equal rows, but is [(2, 3), (1, 4)]. Pass the sizes of this batch.",
    ),
    (
        torch.rand(2, 3, 4),
        [[2, 3], [1]],
        {},
        ValueError,
        "unpad: sizes must have one row for each of the 2 samples in outputs, and "
        "equal rows, but is [(2, 3), (1,)]. Pass the sizes of this batch.",
    ),
    (
        torch.rand(2, 3, 4),
        torch.rand(2, 2).tolist(),
        {},
        TypeError,
        "unpad: sizes must be (n, k) integers, but is ",
    ),
    (
        torch.rand(2, 3, 4),
        "ab",
        {},
        TypeError,
        "unpad: sizes must be (n, k) integers, but is 'ab' (str). Pass the sizes "
        "of a Padded, as Pad(sizes=True) makes it. Round up: -(-sizes // stride).",
    ),
    (
        torch.rand(2, 3, 4),
        torch.tensor(ROWS) / 2,
        {},
        TypeError,
        "unpad: sizes must be (n, k) integers, but is torch.float32 of shape (2, 2). "
        "Pass the sizes "
        "of a Padded, as Pad(sizes=True) makes it. Round up: -(-sizes // stride).",
    ),
    (
        torch.rand(2, 3, 4),
        None,  # as of a Padded without sizes
        {},
        TypeError,
        "unpad: sizes must be (n, k) integers, but is None (None). Pass the sizes "
        "of a Padded, as Pad(sizes=True) makes it. Round up: -(-sizes // stride).",
    ),
    (
        Padded(torch.rand(2, 3, 4)),
        ROWS,
        {},
        TypeError,
        "unpad: outputs must be a tensor, but is pyparallel.Padded. Pass its data.",
    ),
    (
        torch.tensor(1.0),
        ROWS,
        {},
        ValueError,
        "unpad: outputs must have samples, but has shape ().",
    ),
    (
        torch.rand(2, 3, 4),
        ROWS,
        {"dim": 1.0},
        TypeError,
        "unpad: dim must be an integer of -3 or more, but is 1.0 (float).",
    ),
    (
        torch.rand(2, 3),
        ROWS,
        {},
        ValueError,
        "unpad: outputs must have the 2 dimensions of sizes after dimension 0, from "
        "dim=None on, but has shape (2, 3). Use the first dimension that was padded.",
    ),
    (
        torch.rand(2, 3, 4),
        ROWS,
        {"dim": 2},
        ValueError,
        "unpad: outputs must have the 2 dimensions of sizes after dimension 0, from "
        "dim=2 on, but has shape (2, 3, 4). Use the first dimension that was padded.",
    ),
    (
        torch.rand(2, 3, 4),
        ROWS,
        {"side": ("left",)},
        ValueError,
        "unpad: padding must give side for 2 padded dimensions, but gives ('left',). "
        "Give 2 of them.",
    ),
]


@pytest.mark.parametrize(("outputs", "sizes", "options", "cls", "text"), WRONG)
def test_wrong_sizes_are_named(
    outputs: Any, sizes: Any, options: dict[str, Any], cls: type[Exception], text: str
) -> None:
    with pytest.raises(cls) as caught:
        unpad(outputs, sizes, **options)
    assert str(caught.value).startswith(text)


@devices
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_a_resized_mask_is_that_of_detr(device: str, num_dims: int) -> None:
    rng = random.Random(num_dims)
    for i in range(40):
        shape = [rng.randint(1, 30) for _ in range(num_dims)]
        size = [rng.randint(1, 30) for _ in range(num_dims)]
        mask = torch.rand(rng.randint(0, 3), *shape, device=device) < 0.5
        expected = F.interpolate(mask[:, None].float(), size=size)[:, 0] > 0
        found = resize_mask(mask, torch.Size(size) if i % 2 else size)
        assert found.device == mask.device
        assert found.dtype == torch.bool and torch.equal(found, expected)
        assert torch.equal(resize_mask(~mask, size), ~found)
    for one in (4, np.int64(4), torch.tensor(4)):
        assert torch.equal(resize_mask(mask, one), resize_mask(mask, [4] * num_dims))


MASK = torch.ones(2, 3, 4, dtype=torch.bool)
WRONG_MASKS: list[tuple[Any, Any, type[Exception], str]] = [
    (
        MASK.float(),
        2,
        TypeError,
        "resize_mask: mask must be a torch.bool tensor, but is torch.float32. Use the "
        "mask of a Padded, as Pad(mask=True) makes it, or mask.bool() of 0 and 1.",
    ),
    (
        None,
        2,
        TypeError,
        "resize_mask: mask must be a torch.bool tensor, but is None. Use the mask of a "
        "Padded, as Pad(mask=True) makes it, or mask.bool() of 0 and 1.",
    ),
    (
        MASK[0, 0],
        2,
        ValueError,
        "resize_mask: mask must have 1 to 3 dimensions after that of the samples, all "
        "of 1 or more, but has shape (4,).",
    ),
    (
        MASK[:, :, :0],
        2,
        ValueError,
        "resize_mask: mask must have 1 to 3 dimensions after that of the samples, all "
        "of 1 or more, but has shape (2, 3, 0).",
    ),
    (
        MASK,
        (2,),
        ValueError,
        "resize_mask: size must have 2 entries for a mask of shape (2, 3, 4), but has "
        "1. Pad the last 1 dimensions only: Pad(dims=1).",
    ),
    (
        MASK[0],  # of one image
        (2, 2),
        ValueError,
        "resize_mask: size must have 1 entries for a mask of shape (3, 4), but has 2. "
        "Use the last 1 of features.shape, and mask[None] of one sample.",
    ),
    (
        MASK,
        None,
        TypeError,
        "resize_mask: size[0] must be an integer of 1 or more, but is None (None).",
    ),
    (
        MASK,
        (2, 0),
        ValueError,
        "resize_mask: size[1] must be an integer of 1 or more, but is 0.",
    ),
    (
        MASK,
        (2, 1.5),
        TypeError,
        "resize_mask: size[1] must be an integer of 1 or more, but is 1.5 (float).",
    ),
]


@pytest.mark.parametrize(("mask", "size", "cls", "text"), WRONG_MASKS)
def test_wrong_masks_are_named(
    mask: Any, size: Any, cls: type[Exception], text: str
) -> None:
    with pytest.raises(cls) as caught:
        resize_mask(mask, size)
    assert str(caught.value) == text
