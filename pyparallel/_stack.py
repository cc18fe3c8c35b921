"""stack: ragged tensors become one padded tensor, in one pass where possible."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from . import _backend, _slab
from ._errors import BatchTypeError, BatchValueError, kind
from ._plan import Name, StackPlan, check_padding, fills, padding_number, plan_stack

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

# Up to here F.pad and torch.stack are faster than one pass in pure Python.
_SMALL_SAMPLES = 16
_SMALL_ITEMS = 16 * 1024
_SMALL_VALUES = frozenset({0, 1})
_NUMBERS = frozenset({bool, int, float})
# It has no zero, and what stands for it depends on how it is written.
_PICKY = frozenset({getattr(torch, "float8_e8m0fnu", None)})

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_is_nested = attrgetter("is_nested")
_requires_grad = attrgetter("requires_grad")
_is_wrapped: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_functorch_wrapped_tensor
)


def stack(
    samples: Sequence[torch.Tensor],
    pad_dims: int | None,
    values: Sequence[Any],
    name: Name,
) -> torch.Tensor:
    """Return the samples as one new contiguous tensor ``(len(samples), *target)``.

    Values, dtype and conversions are those of ``torch.nn.functional.pad`` on every
    sample followed by ``torch.stack``. Plain dense tensors of one dtype that need no
    gradient are written in one pass by the backend; all others go that very way.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ, or None.
        values: padding value of every sample.
        name: names sample ``i`` in an error.
    """
    plain = _are_plain(samples)
    if not plain:
        _check_layouts(samples, name)
    plan = plan_stack(list(map(_shape_of, samples)), pad_dims, name)
    if plain:
        dtype = samples[0].dtype
        if _is_small_for_python(plan, samples, values):
            return _pad_few(samples, plan, values)
        patterns = fills(plan, dtype, values, name)
        out = _slab.empty(plan.shape, dtype, samples[0].device)
        try:
            _backend.pad_copy(out, samples, patterns)
            return out
        except (TypeError, ValueError):  # and nothing is written; see _are_plain
            _check_layouts(samples, name)
    return _by_torch(samples, plan, values, name)


def stack_equal(
    samples: Sequence[torch.Tensor], pad_dims: int | None = None
) -> torch.Tensor | None:
    """Return ``torch.stack(samples)`` if that is all there is to do, else None.

    Without padding one look at every sample is enough. In a worker the result would lie
    in the wrong memory; where the backend refuses, `stack` finds out why.
    """
    if _slab.in_worker() or forward_ad._current_level >= 0:
        return None
    first, last = samples[0], samples[-1]
    try:
        # Ragged samples nearly always differ in the first and the last.
        if pad_dims is not None and (
            first.dim() <= pad_dims or first.shape != last.shape
        ):
            return None
        return _backend.stack_equal(samples)
    except (TypeError, RuntimeError):
        return None


def is_array(value: Any, numeric: bool = True) -> bool:
    """Tell whether this is a (numeric) numpy array, without importing numpy."""
    return kind(value) in ("numpy.ndarray", "numpy.memmap") and not (
        numeric and re.search("[SaUO]", value.dtype.str)
    )


def as_tensor(value: Any) -> torch.Tensor:
    """View an array as a tensor; copy it first if torch could not, or would warn."""
    if is_array(value) and not (
        value.flags.writeable
        and value.dtype.isnative
        and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)
    ):
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value)


def _are_plain(samples: Sequence[torch.Tensor]) -> bool:
    """Tell whether the backend may be asked to copy the bytes of these samples.

    It looks at every sample itself, before it writes, and refuses what is sparse,
    conjugated, wrapped by torch.func, on another device, or freed. So only those are
    sorted out here that it would take (gradients, subclasses), that cannot be planned
    (quantized and nested ones), or that are common (mixed dtypes).
    """
    first = samples[0]
    return (
        (first.is_cpu or first.device.type in _backend.devices)
        and _PLAIN.issuperset(map(type, samples))
        and len(set(map(_dtype_of, samples))) == 1
        and not (first.is_quantized or any(map(_is_nested, samples)))
        and not (torch.is_grad_enabled() and any(map(_requires_grad, samples)))
        and forward_ad._current_level < 0
    )


def _is_small_for_python(
    plan: StackPlan, samples: Sequence[torch.Tensor], values: Sequence[Any]
) -> bool:
    """Tell whether torch's operators have done before pure Python has looked around.

    That is so of few and small samples whose memory is there and whose padding is 0 or
    1, which every dtype can hold.
    """
    return (
        _backend.name == "python"
        and samples[0].dtype not in _PICKY
        and len(samples) <= _SMALL_SAMPLES
        and math.prod(plan.shape) <= _SMALL_ITEMS
        and _NUMBERS.issuperset(map(type, values))
        and _SMALL_VALUES.issuperset(values)
        and not _slab.in_worker()
        and all(
            each.is_cpu
            and each.layout is torch.strided
            and each.is_contiguous()
            and each.untyped_storage().nbytes()
            >= each.nbytes + each.storage_offset() * each.itemsize
            and not (each.is_neg() or each.is_conj() or _is_wrapped(each))
            for each in samples
        )
    )


def _pad_few(
    samples: Sequence[torch.Tensor], plan: StackPlan, values: Sequence[Any]
) -> torch.Tensor:
    target = plan.shape[1:]
    padded = []
    for sample, is_padded, value in zip(samples, plan.padded, values, strict=True):
        if is_padded:
            margins = _margins(sample.shape, target)
            sample = torch.constant_pad_nd(sample, margins, float(value))
        padded.append(sample)
    return torch.stack(padded)


def _check_layouts(samples: Sequence[torch.Tensor], name: Name) -> None:
    for i, sample in enumerate(samples):
        if sample.is_nested or sample.layout is not torch.strided:
            layout = "nested" if sample.is_nested else str(sample.layout)
            advice = "to_padded_tensor" if sample.is_nested else "to_dense"
            raise BatchTypeError(
                f"{name(i)} must be a dense tensor, but its layout is {layout}. "
                f"Convert it with {advice}() before collating."
            )


def _check_storage(sample: torch.Tensor, name: Name, i: int) -> None:
    """Raise if the memory of a sample has been freed under it, as sharding does."""
    num_items = sample.numel()
    if num_items == 0 or type(sample) not in _PLAIN or _is_wrapped(sample):
        return
    end = sample.storage_offset() + num_items
    if not sample.is_contiguous():
        pairs = zip(sample.shape, sample.stride(), strict=True)
        end += sum((size - 1) * stride for size, stride in pairs) + 1 - num_items
    have, need = sample.untyped_storage().nbytes(), end * sample.element_size()
    if have < need:
        raise BatchValueError(
            f"{name(i)} must lie within its storage, but needs {need} bytes where "
            f"{have} are left. Collate it before its storage is resized."
        )


def _by_torch(
    samples: Sequence[torch.Tensor],
    plan: StackPlan,
    values: Sequence[Any],
    name: Name,
) -> torch.Tensor:
    """Stack by torch's own operators: they promote, differentiate and dispatch."""
    in_worker = _slab.in_worker()
    padded = []
    for i, sample in enumerate(samples):
        if in_worker and sample.requires_grad and torch.is_grad_enabled():
            raise BatchValueError(
                f"{name(i)} must not require grad in a DataLoader worker, because a "
                "graph cannot cross processes, but it does. Detach it in the dataset."
            )
        if sample.device != samples[0].device:
            raise BatchValueError(
                f"{name(i)} must be on {samples[0].device} like {name(0)}, but is on "
                f"{sample.device}."
            )
        _check_storage(sample, name, i)
        if plan.padded[i]:
            if not sample.is_quantized:
                check_padding(values[i], sample.dtype, name, i)
            value = padding_number(values[i], name, i)
            sample = F.pad(sample, _margins(sample.shape, plan.shape[1:]), value=value)
        padded.append(sample)
    if not in_worker or not all(map(_fits_out, padded)):
        # torch keeps a channels_last format; the promise here is a contiguous result.
        return torch.stack(padded).contiguous()
    dtype = reduce(torch.promote_types, (sample.dtype for sample in padded))
    out = _slab.empty(plan.shape, dtype, padded[0].device)
    torch.stack(padded, out=out)
    return out


def _fits_out(sample: torch.Tensor) -> bool:
    """Tell whether torch can stack this sample into memory that it is given."""
    cls, device = type(sample), sample.device.type
    return cls in _PLAIN and device == "cpu" and not sample.is_quantized


def _margins(shape: Sequence[int], target: Sequence[int]) -> list[int]:
    """Return the ``pad`` argument of F.pad: last dimension first, ends only."""
    margins: list[int] = []
    for have, size in zip(reversed(shape), reversed(target), strict=True):
        margins += (0, size - have)
    return margins
