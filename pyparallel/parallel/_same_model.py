"""The ranks' models are compared before the first of their tensors is sent.

Note: [models that differ]
DDP compares shapes of parameters, with those of rank 0, and only the rank that differs
is told; the others find a lost connection, or nothing. Other dtypes and buffers are not
compared: gloo aborts the process that receives more than it expects, and equal numbers
of bytes are taken for what they are not. Here one small reduction says on every rank
whether all are equal. Only if not, two more find and describe the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.errors import ModelsDifferError
from ..core.torch_private import ignored_by_ddp

_TEXT = 256  # bytes of a description that travel


class Described(NamedTuple):
    """A tensor of a model: what must be equal on every rank, and what it is called."""

    form: str
    name: str


def check_same_model(
    wrapper: str, module: nn.Module, group: Any, buffers: bool
) -> None:
    """Compare what DDP will send: the tensors' shapes and dtypes, in their order.

    Args:
        wrapper: the name of the class, for the message.
        module: its tensors in ``_ddp_params_and_buffers_to_ignore`` are left out.
        group: a process group; None for all ranks. All of its ranks must call this.
        buffers: whether buffers are compared too.

    Names may differ, as torch allows. Models without parameters or with uninitialized
    ones are left to torch, which refuses them.

    Raises:
        ModelsDifferError: on every rank, which can go on and use the group.
    """
    ignored = ignored_by_ddp(module)
    tensors = [each for each in module.named_parameters() if each[0] not in ignored]
    if not tensors or any(map(is_lazy, module.parameters())):
        return
    own = [_described(*each) for each in tensors]
    if buffers:
        found = module.named_buffers()
        own += [_described(*each) for each in found if each[0] not in ignored]
    # Where torch's own comparison would be: nccl reduces nothing on the host.
    trained = [tensor for _, tensor in tensors if tensor.requires_grad]
    device = trained[0].device if trained else tensors[0][1].device
    place = _first_difference(own, group, device)
    if place is None:
        return
    texts = _at_all_ranks(_text(own, place), group, device)
    ranks: dict[str, list[str]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        ranks.setdefault(text, []).append(str(rank))
    parts = [
        f"{text} on rank{'s' * (len(of) > 1)} {', '.join(of)}"
        for text, of in ranks.items()
    ]
    raise ModelsDifferError(
        f"{wrapper} must be given models of equal tensors on all ranks, but tensor "
        f"{place} is {', but '.join(parts)}. Build the same model on every rank."
    )


def _described(name: str, tensor: torch.Tensor) -> Described:
    kind = "a buffer"
    if isinstance(tensor, nn.Parameter):
        kind = "a parameter" if tensor.requires_grad else "a frozen parameter"
    return Described(f"{kind} of shape {tuple(tensor.shape)}, {tensor.dtype}", name)


def _text(own: Sequence[Described], place: int) -> str:
    if place >= len(own):
        return "missing"
    # The form first: whatever the length of the name, it is not cut.
    return f"{own[place].form}, named {own[place].name!r}"


def _first_difference(
    own: Sequence[Described], group: Any, device: torch.device
) -> int | None:
    """Return the first place where not all ranks have tensors of one form."""
    forms = [_digest(each.form) for each in own]
    whole = _digest(repr(forms))
    high, low, longest = _largest([whole, -whole, len(forms)], group, device)
    if high == -low:
        return None
    forms += [0] * (longest - len(forms))
    highs = _largest(forms, group, device)
    lows = _largest([-form for form in forms], group, device)
    pairs = zip(highs, lows, strict=True)
    return next(i for i, (high, low) in enumerate(pairs) if high != -low)


def _digest(text: str) -> int:
    """Return a number that fits into int64, as does its negative; never 0."""
    content = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(content[:8], "little") >> 1) | 1


def _largest(numbers: list[int], group: Any, device: torch.device) -> list[int]:
    """Return the largest number of all ranks at each place."""
    there = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    found: list[int] = there.tolist()
    return found


def _at_all_ranks(text: str, group: Any, device: torch.device) -> list[str]:
    """Return what each rank calls this with, cut where it is very long."""
    content = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    own = torch.tensor(list(content), dtype=torch.uint8, device=device)
    there = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(there, own, group=group)
    received = [bytes(each.tolist()).rstrip(b"\0") for each in there]
    return [each.decode(errors="replace") for each in received]
