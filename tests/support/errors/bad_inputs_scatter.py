"""Batches to scatter, and targets to scatter them to."""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from pyparallel import DataContainer, collate, scatter, scatter_kwargs
from pyparallel.mmcv import _functions
from tests.support.errors.bad_inputs import Case, Refused, refused
from tests.support.errors.bad_inputs_nests import DEEP, Pair
from tests.support.errors.bad_inputs_stack import ONES, held, quantized, ragged_nest
from tests.support.errors.collate_errors import cyclic, freed, nested, quiet_csr

DC = DataContainer
CPU2 = ["cpu", "cpu"]
HOST = "Use -1 or 'cpu' to stay on the host."
APART = "Give it to one target, or put it into DataContainer(..., cpu_only=True)."


def six() -> torch.Tensor:
    return torch.arange(6.0)


def to(targets: Any, **options: Any) -> Any:
    return partial(scatter, target_gpus=targets, **options)


def target(value: Any, message: str, *classes: type) -> Case:
    return Case(six, to(value), refused(f"scatter: {message}", *classes))


def no_device(given: Any, name: str) -> Case:
    count = torch.cuda.device_count()
    message = (
        f"target {name} must be a device of this machine, but torch "
        f"{torch.__version__} sees {count} of type cuda. {HOST}"
    )
    return target(given, message, RuntimeError)


def option(message: str, *classes: type, **options: Any) -> Case:
    return Case(six, to(CPU2, **options), refused(message, *classes))


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def unsplit(make: Any, layout: str, targets: Any = CPU2) -> Case:
    message = (
        f"inputs['x'] must be a dense tensor to be split, but its layout is {layout}."
    )
    expected = refused(f"{message} {APART}", TypeError, RuntimeError)
    return Case(lambda: {"x": make()}, to(targets), expected)


def whole(make: Any, targets: Any = -1) -> Case:
    """Expect that a single target gets the value unchanged."""

    def is_same(x: Any) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of new layouts
            return scatter({"x": x}, targets)[0]["x"] is x

    return Case(make, is_same, lambda: True)


def lacks(place: str, need: int) -> Refused:
    message = (
        f"{place} must lie within its storage, but needs {need} bytes where 0 are left."
        " Use it before its storage is resized."
    )
    return refused(message, ValueError, RuntimeError)


def turned() -> torch.Tensor:
    """Return six floats without memory, not contiguous."""
    return freed(ONES(2, 3).t())


def two_chunks() -> DataContainer:
    return collate(held(ONES(1, 1, 1), ONES(1, 1, 1)), 1)


def chunked(*sizes: int) -> DataContainer:
    return DC([[ONES(2)] * size for size in sizes])


TARGETS = {
    "none-at-all": target(
        [], "target_gpus must name at least one target, but is empty.", ValueError
    ),
    "none": target(
        None,
        "target_gpus must be a device, an index or a list of them, but is None.",
        TypeError,
    ),
    "bytes": target(
        b"cpu",
        "target_gpus must be a device, an index or a list of them, but is bytes.",
        TypeError,
    ),
    "minus-2": target(
        [-2], "a target must be -1 or name a device, but is -2.", ValueError
    ),
    "minus-2**70": target(
        -(2**70),
        f"a target must be -1 or name a device, but is {-(2**70)}.",
        ValueError,
    ),
    "a-list-in-a-list": target(
        [[0]],
        "a target must be an index, a string or a torch.device, but is [0] (list).",
        TypeError,
    ),
    "no-name": target(
        "sofa", "a target must be -1 or name a device, but is 'sofa'.", ValueError
    ),
    "cuda-99": no_device([99], "cuda:99"),
    "cuda-128": no_device([128], "cuda:128"),
    "cuda-256-by-name": no_device("cuda:256", "cuda:256"),
    "cuda-2**70": no_device([2**70], f"cuda:{2**70}"),
    "the-host-twice": Case(
        six, to([-1, -1]), lambda: (torch.arange(3.0), torch.arange(3.0, 6))
    ),
    "the-host-by-two-names": Case(
        six, to([-1, "cpu"]), lambda: (torch.arange(3.0), torch.arange(3.0, 6))
    ),
    "a-stream-of-no-target": Case(
        six,
        to(CPU2, stream=SimpleNamespace(device=torch.device("cuda", 1))),
        refused(
            "scatter: stream must be of a target (cpu, cpu), but is of cuda:1.",
            ValueError,
        ),
    ),
}
if not torch.cuda.is_available():
    TARGETS |= {
        "cuda-0": no_device([0], "cuda:0"),
        "the-host-and-cuda": no_device([-1, 0], "cuda:0"),
        "cuda-of-any-index": no_device("cuda", "cuda"),
    }

OPTIONS = {
    "sizes-short": option(
        "inputs must have size 5 along dimension 0, that of sum(chunk_sizes) (2, 3), "
        "but has shape (6,).",
        ValueError,
        RuntimeError,
        chunk_sizes=[2, 3],
    ),
    "sizes-vast": option(
        f"inputs must have size {2**63 + 1} along dimension 0, that of "
        f"sum(chunk_sizes) ({2**63}, 1), but has shape (6,).",
        ValueError,
        chunk_sizes=[2**63, 1],
    ),
    "sizes-0": option(
        "scatter: chunk_sizes must be 1 or more, but has 0.",
        ValueError,
        chunk_sizes=[0, 6],
    ),
    "sizes-minus-1": option(
        "scatter: chunk_sizes must be 1 or more, but has -1.",
        ValueError,
        chunk_sizes=[7, -1],
    ),
    "sizes-too-few": option(
        "scatter: chunk_sizes must have one size for each of 2 targets, but is (6,).",
        ValueError,
        chunk_sizes=[6],
    ),
    "sizes-int": option(
        "scatter: chunk_sizes must be a sequence of integers, but is 6 (int).",
        TypeError,
        chunk_sizes=6,
    ),
    "sizes-str": option(
        "scatter: chunk_sizes must be made of integers, but has 'a'.",
        TypeError,
        chunk_sizes="ab",
    ),
    "dim-1": option(
        "inputs must have a dimension 1 to be split along, but has shape (6,). Put "
        "metadata into DataContainer(..., cpu_only=True).",
        ValueError,
        IndexError,
        dim=1,
    ),
    "dim-2**64": option(
        f"inputs must have a dimension {2**64} to be split along, but has shape (6,). "
        "Put metadata into DataContainer(..., cpu_only=True).",
        ValueError,
        IndexError,
        dim=2**64,
    ),
    "dim-float": option(
        "scatter: dim must be an integer, but is 1.5 (float).", TypeError, dim=1.5
    ),
    "dim-none": option(
        "scatter: dim must be an integer, but is None (None).", TypeError, dim=None
    ),
    "more-targets-than-rows": Case(
        lambda: ONES(2), to([-1] * 4), lambda: (ONES(1), ONES(1))
    ),
    "one-chunk-for-two": Case(lambda: chunked(1), to(CPU2), lambda: ([ONES(2)],)),
    "old-streams": Case(
        lambda: [ONES(1)] * 2,
        lambda x: _functions.scatter(x, [-1, -1], [None]),
        refused(
            "scatter: devices and streams must have the same length, at least 1, but "
            "have 2 and 1.",
            ValueError,
        ),
    ),
    "old-no-devices": Case(
        lambda: [ONES(1)],
        lambda x: _functions.scatter(x, []),
        refused(
            "scatter: devices and streams must have the same length, at least 1, but "
            "have 0 and 0.",
            ValueError,
        ),
    ),
    "old-waits": Case(
        lambda: [ONES(1)] * 2,
        lambda x: _functions.synchronize_stream(x, [-1, -1], [None]),
        refused(
            "synchronize_stream: devices and streams must have the same length, at "
            "least 1, but have 2 and 1.",
            ValueError,
        ),
    ),
}

BATCHES = {
    "cyclic": Case(lambda: cyclic([ONES(1)]), to([-1]), DEEP),
    "cyclic-dict": Case(lambda: cyclic({"a": 1}), to(CPU2), DEEP),
    "depth-10000": Case(lambda: nested(10_000), to([-1]), DEEP),
    "namedtuple": Case(lambda: Pair(ONES(2), 3), to([-1]), lambda: [Pair(ONES(2), 3)]),
    "defaultdict": Case(
        lambda: defaultdict(list, a=ONES(2)),
        to([-1]),
        lambda: [defaultdict(list, a=ONES(2))],
    ),
    "unequal-chunks": Case(
        lambda: (chunked(1, 1), chunked(1)),
        to(CPU2),
        refused(
            "inputs[1] must have the same number of chunks as inputs[0], but has 1 "
            "where 2 was expected.",
            ValueError,
        ),
    ),
    "more-chunks-than-targets": Case(
        lambda: {"img": two_chunks()},
        to([-1]),
        refused(
            "inputs['img'] must have at most one chunk for each target (1), but has 2. "
            "Collate with a larger samples_per_gpu, or name more targets.",
            ValueError,
            AssertionError,
        ),
    ),
    "container-of-text": Case(
        lambda: {"x": DC("text")},
        to([-1]),
        refused(
            "inputs['x'] must hold a list with one chunk for each target, as collate "
            "makes it, but holds str.",
            TypeError,
        ),
    ),
    "container-of-a-dict": Case(
        lambda: {"x": DC([{"a": ONES(1)}])},
        to([-1]),
        refused(
            "inputs['x'].data[0] must be a tensor or a list of tensors, but is dict. "
            "Use DataContainer(..., cpu_only=True) for data that stay on the host.",
            TypeError,
        ),
    ),
    "empty-list": Case(list, to([-1]), lambda: [[]]),
    "empty-tensor": Case(lambda: ONES(0, 3), to([-1]), lambda: (ONES(0, 3),)),
    "keywords-only": Case(
        lambda: {"a": ONES(2)},
        lambda x: scatter_kwargs((), x, [-1]),
        lambda: (((),), ({"a": ONES(2)},)),
    ),
    "sparse-whole": whole(sparse),
    "sparse-rows-whole": whole(quiet_csr),
    "sparse-to-two": unsplit(sparse, "torch.sparse_coo"),
    "sparse-rows-to-two": unsplit(quiet_csr, "torch.sparse_csr"),
    "nested-whole": whole(ragged_nest),
    "nested-to-two": unsplit(ragged_nest, "nested", [-1, -1]),
    "quantized-to-two": Case(
        lambda: quantized((2, 1)),
        to(CPU2),
        lambda: (quantized((1, 1)), quantized((1, 1))),
    ),
    "freed-whole": whole(lambda: freed(ONES(3))),
    "freed-turned": Case(lambda: {"x": turned()}, to(-1), lacks("inputs['x']", 24)),
    "freed-to-the-cpu": Case(
        lambda: {"x": turned()}, to("cpu"), lacks("inputs['x']", 24)
    ),
    "freed-on-the-cpu": Case(
        lambda: {"x": freed(ONES(3))}, to("cpu"), lacks("inputs['x']", 12)
    ),
    "freed-cast": Case(
        lambda: {"x": freed(ONES(3))},
        to(-1, dtype=torch.float16),
        lacks("inputs['x']", 12),
    ),
    "freed-to-two": Case(lambda: [freed(ONES(3))], to(CPU2), lacks("inputs[0]", 12)),
    "freed-in-a-chunk": Case(
        lambda: {"x": DC([[ONES(1), turned()]])}, to(-1), lacks("inputs['x']", 24)
    ),
    "freed-cut-anew": Case(
        lambda: DC([freed(ONES(2, 1)), ONES(1, 1)], stack=True),
        to(CPU2, chunk_sizes=[1, 2]),
        lacks("inputs", 8),
    ),
    "freed-the-old-way": Case(
        turned,
        lambda x: _functions.scatter(x, [-1]),
        lacks("scatter: input", 24),
    ),
}

#: Slow to create, because of torch's imports: slower than all other cases together.
SLOW = {
    "jagged-whole": whole(lambda: ragged_nest(torch.jagged)),
    "jagged-to-two": unsplit(lambda: ragged_nest(torch.jagged), "nested"),
}
