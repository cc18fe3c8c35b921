"""gather: what several replicas returned becomes what one would have returned."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..core.devices import Target, resolve_target
from ..core.errors import BatchTypeError, EmptyBatchError, type_name
from ..core.tracing import span
from ._gathering import Gathering

_HOST = torch.device("cpu")


def gather(outputs: Sequence[Any], target_device: Target | None, dim: int = 0) -> Any:
    """Return the outputs of several replicas as those of one on the whole batch.

    Args:
        outputs: one for each replica, in the order of the chunks of the batch: tensors,
            or nests of containers of one structure.
        target_device: where tensors are to be: what `scatter` takes as a target; -1 is
            the host; None is the device of the first tensor.
        dim: the dimension along which tensors are joined.

    Returns:
        One nest of the same containers, with the types of ``outputs[0]``:

        * tensors ``(n_i, *rest)`` and arrays joined along ``dim``, ``(sum(n_i),
          *rest)``; those without dimensions (losses) become a vector ``(replicas,)``;
        * of a DataContainer one that holds all samples: lists joined, tensors and
          `Padded` along dimension 0, and `Ragged` behind each other, as they are
          without a container too. What is ``cpu_only`` stays where it is;
        * lists in which there are only other values than tensors, arrays, containers
          of data and None, such as names, joined. All other lists and tuples are
          gathered item by item;
        * every other value must be the same on all replicas, and is that of the first.

    Raises:
        TypeError: no list or tuple of outputs; another kind of value at the same place.
        ValueError: no outputs; other keys or lengths, shapes that differ outside
            ``dim``, dtypes or values that differ. The message names the place and the
            replica; nothing has been moved.
        RuntimeError: a device that this machine does not have.

    Stream: the tensors of each device come in packed copies, queued on, or waited for
    by, the current streams. Where gradients are wanted they flow back to every output,
    in packed copies too.

    From ``torch.nn.parallel.gather``, which has no host as a source, takes scalars with
    a warning, and casts to the dtype of the first output.

    Example:
        >>> gather([{"x": torch.ones(2), "ids": ["a", "b"]},
        ...         {"x": torch.zeros(1), "ids": ["c"]}], "cpu")
        {'x': tensor([1., 1., 0.]), 'ids': ['a', 'b', 'c']}
    """
    if not isinstance(outputs, list | tuple):
        raise BatchTypeError(
            "gather: outputs must be a list with one output for each replica, but is "
            f"{type_name(outputs)}."
        )
    if not outputs:
        raise EmptyBatchError(
            "gather: outputs must have at least one output, but is empty."
        )
    target = None
    if target_device is not None:
        target = resolve_target(target_device, "gather", "target_device") or _HOST
    with span("pyparallel.gather"):
        gathering = Gathering()
        make = gathering.value(list(outputs), (), operator.index(dim))
        return make(gathering.joined(target))
