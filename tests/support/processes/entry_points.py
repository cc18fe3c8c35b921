"""The public functions that make one batch of several tensors, as one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyparallel import (
    Collate,
    Concat,
    DataContainer,
    ImagePreprocessor,
    Pad,
    Padding,
    Ragged,
    Stack,
    collate,
    gather,
    pad_stack,
    scatter,
)
from pyparallel.batch.tensor_fields import TensorFields
from pyparallel.mmengine import default_collate, stack_batch

Samples = Sequence[Any]


def by_rule(**options: Any) -> Callable[[Samples], Any]:
    rules = Collate(**options)
    return lambda samples: rules([{"x": each} for each in samples])["x"]


def contained(**flags: Any) -> Callable[[Samples], Any]:
    def make(samples: Samples) -> Any:
        return collate([DataContainer(x, **flags) for x in samples], len(samples)).data

    return make


def split_again(samples: Samples) -> Any:
    chunks = DataContainer([each.unsqueeze(0) for each in samples], stack=True)
    return scatter(chunks, ["cpu", "cpu"], chunk_sizes=[len(samples) - 1, 1])


def gathered_ragged(samples: Samples) -> Any:
    ragged = [Ragged(x, torch.tensor([0, len(x)], device=x.device)) for x in samples]
    return gather(ragged, None)


def to_padded(samples: Samples) -> Any:
    rows = samples[0][0]
    offsets = torch.tensor([0, 1, len(rows)], device=rows.device)
    padding = Padding(size_divisor=4, mask=True, sizes=True)
    return Ragged(rows, offsets).to_padded(0.5, padding)


IMAGES = ImagePreprocessor(mean=[1.0], std=[2.0], size_divisor=4, return_mask=True)
PADDED: dict[str, Any] = {"size_divisor": 4, "mask": True, "sizes": True}

#: Each takes two or more tensors (1, h, w) of equal shapes.
ENTRY_POINTS: dict[str, Callable[[Samples], Any]] = {
    "collate": lambda samples: collate([{"x": each} for each in samples])["x"],
    "no rule": by_rule(),
    "Stack": by_rule(x=Stack()),
    "default Stack": by_rule(default=Stack()),
    "Pad": by_rule(x=Pad(size_divisor=4, mask=True)),
    "Concat": by_rule(x=Concat()),
    "stack": contained(stack=True),
    "padding": contained(stack=True, padding=Padding(**PADDED)),
    "ragged": contained(ragged=True),
    "pad_stack": lambda samples: pad_stack(samples, **PADDED, side="left"),
    "from_tensors": Ragged.from_tensors,
    "to_padded": to_padded,
    "gather": lambda samples: gather([{"x": each} for each in samples], None)["x"],
    "gather sums": lambda samples: gather([each.sum() for each in samples], None),
    "gather Ragged": gathered_ragged,
    "scatter": split_again,
    "images": IMAGES,
    "default_collate": default_collate,
    "stack_batch": lambda samples: stack_batch(list(samples), 4),
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    if isinstance(result, TensorFields):
        result = [each for each in result.fields() if each is not None]
    if isinstance(result, list | tuple):
        return [tensor for each in result for tensor in tensors_of(each)]
    assert isinstance(result, torch.Tensor)
    return [result]
