"""torch.compile: no graph breaks, the same values, the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel import ImagePreprocessor, Padded, Padding, pad_stack

pytestmark = [pytest.mark.cuda_torch, pytest.mark.slow]

PAD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_value": None},
    {"size_divisor": 4, "sizes": True, "mask": True, "side": "center"},
    {"shape": (9, 40), "side": ("left", "right"), "padding_value": 2.5},
    {"buckets": [(8, 8), (16, 40)], "mask": True, "padding_value": -1},
    {"padding": Padding(size_divisor=(3, 1), sizes=True)},
    {"dtype": torch.bfloat16, "mask": True, "padding_value": 0.1},
]
IMAGE_OPTIONS: list[dict[str, Any]] = [
    {"mean": (1, 2, 3), "std": (2, 3, 4)},
    {"mean": 7, "std": 3, "size_divisor": (4, 8), "return_mask": True, "exact": False},
    {"mean": (1, 2, 3), "std": (2, 3, 4), "swap_channels": True, "pad_value": (1, 2, 3),
     "pad_before_normalize": True, "dtype": torch.bfloat16,
     "memory_format": torch.channels_last},
]  # fmt: skip
modes = pytest.mark.parametrize(
    "mode",
    [
        # Tracing does not depend on the backend. Dynamic graphs run both backends.
        pytest.param(("eager", False), id="static", marks=pytest.mark.one_backend),
        pytest.param(("aot_eager", True), id="dynamic"),
    ],
)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ragged(k: int, **options: Any) -> list[torch.Tensor]:
    return [torch.rand(3, 5 + k, 7, **options), torch.rand(3, 6, 4 + 2 * k, **options)]


def compiled(function: Any, mode: tuple[str, bool]) -> Any:
    backend, dynamic = mode
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def assert_same(found: Any, expected: Any) -> torch.Tensor:
    assert type(found) is type(expected)
    pairs = [(found, expected)]
    if isinstance(found, Padded):
        pairs = list(zip(found.fields(), expected.fields(), strict=True))
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is other.dtype and one.stride() == other.stride()
            assert torch.equal(one, other)
    data: torch.Tensor = pairs[0][0]
    return data


@modes
@pytest.mark.parametrize("options", PAD_OPTIONS, ids=str)
def test_pad_stack_is_one_node(mode: tuple[str, bool], options: dict[str, Any]) -> None:
    def pad(samples: list[torch.Tensor]) -> Any:
        return pad_stack(samples, pad_dims=2, **options)

    function = compiled(pad, mode)
    for k in range(3):
        leaves = ragged(k, requires_grad=True)
        data = assert_same(function(leaves), pad(leaves))
        weights = torch.rand_like(data)
        found = torch.autograd.grad((data * weights).sum(), leaves)
        eager = pad(leaves)
        eager = eager.data if isinstance(eager, Padded) else eager
        expected = torch.autograd.grad((eager * weights).sum(), leaves)
        assert all(map(torch.equal, found, expected))


@modes
def test_integers_are_padded_with_exactly_the_value(mode: tuple[str, bool]) -> None:
    def pad(samples: list[torch.Tensor], value: Any) -> Any:
        return pad_stack(samples, padding_value=value)

    function = compiled(pad, mode)
    wide = [2**53 + 1, 2**53 + 3, 2**63 - 1, 5, -(2**63), 2**63 + 1, 2**64 - 1]
    for value in (*wide, np.int64(2**53 + 1), torch.tensor(2**53 + 1)):
        if not mode[1]:  # a graph for each value
            torch._dynamo.reset()
        dtype = torch.int64 if value < 2**63 else torch.uint64
        samples = [torch.ones(each, dtype=dtype) for each in (2, 3)]
        assert_same(function(samples, value), pad(samples, value))
        assert function(samples, value)[0, 2].item() == value
    samples = [torch.ones(each, dtype=torch.int64) for each in (2, 3)]
    with pytest.raises(ValueError, match=f"torch.int64 can hold, but has {2**70 + 1}"):
        function(samples, 2**70 + 1)
    assert function(samples[:1] * 2, 2**70 + 1).shape == (2, 2)
    program = torch.export.export(Padder(), (samples,))
    assert program.module()(samples)[0, 2].item() == 2**53 + 1


class Padder(torch.nn.Module):
    def forward(self, samples: list[torch.Tensor]) -> Any:
        return pad_stack(samples, padding_value=2**53 + 1)


def test_gradients_of_complex_samples_are_those_of_eager_code() -> None:
    def pad(samples: list[torch.Tensor]) -> Any:
        return pad_stack(samples).abs().sum()

    for dtype in (torch.complex64, torch.float32):
        leaves = [torch.rand(2, dtype=dtype, requires_grad=True),
                  torch.rand(3, dtype=torch.complex64, requires_grad=True)]  # fmt: skip
        found = torch.autograd.grad(compiled(pad, ("aot_eager", False))(leaves), leaves)
        expected = torch.autograd.grad(pad(leaves), leaves)
        assert all(map(torch.equal, found, expected))


def test_sizes_that_differ_outside_the_padding_are_named() -> None:
    leaves = [torch.ones(each, requires_grad=True) for each in ((2, 3), (3, 2))]
    pad = compiled(lambda x: pad_stack(x, pad_dims=1), ("aot_eager", False))
    with pytest.raises(RuntimeError) as caught:
        pad(leaves)
    assert (
        "samples[1] must match samples[0] outside its last dimension, but has shape "
        "(3, 2) where (2, 3) was expected."
    ) in str(caught.value)


@modes
@pytest.mark.parametrize("options", IMAGE_OPTIONS, ids=str)
def test_the_preprocessor_is_one_node(
    mode: tuple[str, bool], options: dict[str, Any]
) -> None:
    pre = ImagePreprocessor(**options)
    function = compiled(pre, mode)
    for k in range(3):
        images = [(each * 255).to(torch.uint8) for each in ragged(k)]
        assert_same(function(images), pre(images))
    turned = images[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert_same(function([turned, images[1]]), pre([turned, images[1]]))
    stacked = torch.stack([images[0]] * 2)
    assert_same(function(stacked), pre(stacked))


def test_dynamic_graphs_serve_other_sizes_without_another_compilation() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    pre = ImagePreprocessor(1, 2, size_divisor=4)

    def both(images: list[torch.Tensor]) -> Any:
        return pre(images), pad_stack(images, size_divisor=4, mask=True)

    function = torch.compile(both, fullgraph=True, backend=counter, dynamic=True)
    for sides in ((5, 7, 6, 4), (9, 3, 12, 20), (30, 31, 3, 2)):
        images = [torch.rand(3, *sides[:2]), torch.rand(3, *sides[2:])]
        for found, expected in zip(function(images), both(images), strict=True):
            assert_same(found, expected)
    assert counter.frame_count == 1
    names = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert "pyparallel.image_batch.default" in names
    assert "pyparallel.pad_stack.default" in names


def test_eager_code_does_not_go_through_the_dispatcher() -> None:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as run:
        pad_stack(ragged(0), pad_dims=2, mask=True)
        ImagePreprocessor(1, 2)(ragged(0))
    assert not [each.key for each in run.key_averages() if "pyparallel::" in each.key]


# opcheck of torch 2.15 reads the gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("dtype", "grad"),
    [(torch.uint8, False), (torch.float32, False), (torch.float32, True)],
)
def test_torch_finds_nothing_wrong_with_the_operators(
    dtype: torch.dtype, grad: bool
) -> None:
    def make(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.ones(each, dtype=dtype, requires_grad=grad) for each in shapes]

    operators: Any = torch.ops.pyparallel
    images, check = make((3, 4, 5), (3, 6, 2)), torch.library.opcheck
    for more in (False, True):
        padding = ([4, 1], None, None, ["left", "center"], more, more, torch.bfloat16)
        check(operators.pad_stack.default, (images, 2, 1.0, 0, *padding))
        plain = ([4, 1], None, None, ["right"], more, more, None)
        equal = make((2, 3), (2, 3))
        check(operators.pad_stack.default, (equal, 0, 2**53 + 1, 1, *plain))
        options = ([1.0], [2.0], [0.5], False, True, True, [4, 4], torch.float16)
        for channels_last in (False, True):
            arguments = (images, *options, channels_last, more)
            check(operators.image_batch.default, arguments)
