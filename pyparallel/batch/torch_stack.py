"""Pad, stack and concatenate by torch's operators, for all but plain tensors.

They promote dtypes, record gradients and call classes with ``__torch_dispatch__``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ..backend.plain import PLAIN, missing_bytes, without_subclasses
from ..core.errors import BatchTypeError, BatchValueError, type_name, with_advice
from ..core.torch_private import is_wrapped, outside_autocast
from . import allocation
from .padding_values import padding_number, padding_value_as_double
from .plan import Name, StackPlan, sample_name


def pad_and_stack(
    samples: Sequence[torch.Tensor],
    plan: StackPlan,
    values: Sequence[Any],
    name: Name,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``F.pad`` on every sample followed by ``torch.stack``, contiguous.

    Args:
        samples: dense tensors of the planned shapes.
        plan: the plan of the stack.
        values: padding value of every sample.
        name: returns the name of sample ``i`` for an error.
        out: a tensor for the result, or None.
    """
    padded = []
    # torch's operators import its compiler for meta tensors, which takes seconds.
    shapes_only = out is None and all(
        each.is_meta and type(each) in PLAIN and not each.requires_grad
        for each in samples
    )
    for i, sample in enumerate(samples):
        check_sample(samples, name, i)
        if plan.padded[i]:
            value: float
            if sample.is_quantized:
                value = padding_value_as_double(values[i], name, i)
            else:
                value = padding_number(values[i], sample.dtype, name, i)
            if not shapes_only:
                sides = pad_argument(plan, sample.shape, i)
                with _naming(sample, name, i):
                    sample = pad(sample, sides, value)
        padded.append(sample)
    dtype = promoted_dtype(samples, name)
    if shapes_only:
        return torch.empty(plan.shape, dtype=dtype, device="meta")
    if out is None:
        out = _allocate_out(padded, plan.shape)
    with outside_autocast(), _naming(samples[0], name, 0):
        if out is None:
            # torch keeps the channels_last format, but the result must be contiguous.
            return torch.stack(padded).contiguous()
        torch.stack(padded, out=out)
    return out


def cast(
    samples: Sequence[torch.Tensor], dtype: torch.dtype, name: Name
) -> list[torch.Tensor]:
    """Return ``to(dtype)`` of every sample of floating-point numbers."""
    cast = []
    for i, sample in enumerate(samples):
        if sample.is_floating_point():
            with _naming(sample, name, i, f"convert to {dtype}"):
                sample = sample.to(dtype)
        cast.append(sample)
    return cast


def cat(samples: Sequence[torch.Tensor], name: Name, dim: int = 0) -> torch.Tensor:
    """Concatenate samples that are equal in all other dimensions, contiguous."""
    samples = without_subclasses(samples)
    check_grad = torch.is_grad_enabled() and allocation.in_worker()
    device, itemsize = samples[0].device, samples[0].element_size()
    for i, each in enumerate(samples):
        # This expression is cheap for the most common samples; check all others.
        if (
            check_grad
            or type(each) not in PLAIN
            or each.device != device
            or each.element_size() != itemsize
            or not each.is_contiguous()
            or is_wrapped(each)
            or each.is_quantized
            or each.untyped_storage().nbytes()
            < each.nbytes + each.storage_offset() * itemsize
        ):
            check_sample(samples, name, i)
    promoted_dtype(samples, name)  # raises if torch cannot promote them
    shape = list(samples[0].shape)
    shape[dim] = sum(sample.shape[dim] for sample in samples)
    out = _allocate_out(samples, shape)
    with outside_autocast(), _naming(samples[0], name, 0):
        if out is None:
            return torch.cat(list(samples), dim).contiguous()
        torch.cat(list(samples), dim, out=out)
    return out


@contextmanager
def _naming(
    sample: torch.Tensor, name: Name, i: int, task: str = "pad and join"
) -> Iterator[None]:
    """Name a sample whose class refuses an operator of torch."""
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        raise with_advice(
            BatchTypeError,
            f"{name(i)} must be a tensor that torch can {task}, but is "
            f"{type_name(sample)}: {str(error).strip().splitlines()[0]}",
        ) from error


def fill_mask(
    mask: torch.Tensor, plan: StackPlan, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Write True into ``mask``, ``(n, *target[-k:])``, where the samples have data."""
    if not any(plan.padded):
        mask.fill_(1)
        return
    mask.zero_()
    num_dims = mask.dim() - 1
    for i, shape in enumerate(shapes):
        box = mask[i]
        starts = plan.starts[i] if plan.starts else (0,) * len(shape)
        for dim in range(num_dims):
            source_dim = dim - num_dims + len(shape)
            box = box.narrow(dim, starts[source_dim], shape[source_dim])
        box.fill_(1)


def pad_argument(plan: StackPlan, shape: Sequence[int], i: int) -> list[int]:
    """Return the argument ``pad`` of F.pad for sample ``i``: last dimension first."""
    result: list[int] = []
    starts = plan.starts[i] if plan.starts else (0,) * len(shape)
    for have, size, start in zip(
        reversed(shape), reversed(plan.shape), reversed(starts), strict=False
    ):
        result += (start, size - have - start)
    return result


def pad(tensor: torch.Tensor, sides: Sequence[int], value: float = 0) -> torch.Tensor:
    """Return ``F.pad(tensor, sides, value=value)``.

    Unlike F.pad, it does not round an integer to a double. Unlike F.pad of torch 2.8,
    it can pad to an empty shape.
    """
    shape = list(tensor.shape)
    for i in range(len(sides) // 2):
        shape[-1 - i] += sides[2 * i] + sides[2 * i + 1]
    if not all(shape):
        return tensor.reshape(shape)
    if isinstance(value, int) and float(value) != value:
        return _pad_with_bits(tensor, sides, value)
    return F.pad(tensor, sides, value=float(value))


def _pad_with_bits(
    tensor: torch.Tensor, sides: Sequence[int], value: int
) -> torch.Tensor:
    """Pad ``torch.int64`` or ``torch.uint64`` with zeros that become the value."""
    if tensor.dtype == torch.int64:
        # The second operation restores the data.
        return F.pad(tensor ^ value, sides) ^ value
    bits = value if value < 2**63 else value - 2**64
    # Both conversions keep the bits. In torch 2.11, vmap has no view of a dtype.
    return _pad_with_bits(tensor.to(torch.int64), sides, bits).to(tensor.dtype)


def check_layouts(samples: Sequence[torch.Tensor], name: Name) -> None:
    """Raise if a sample is sparse or nested."""
    for i, sample in enumerate(samples):
        if not isinstance(sample, torch.Tensor):
            continue
        if sample.is_nested or sample.layout is not torch.strided:
            layout = "nested" if sample.is_nested else str(sample.layout)
            advice = "to_padded_tensor" if sample.is_nested else "to_dense"
            raise BatchTypeError(
                f"{name(i)} must be a dense tensor, but its layout is {layout}. "
                f"Convert it with {advice}() before collating."
            )


def check_sample(samples: Sequence[torch.Tensor], name: Name, i: int) -> None:
    """Raise if sample ``i`` cannot be read, or cannot be joined with the first one."""
    sample = samples[i]
    if sample.requires_grad and torch.is_grad_enabled() and allocation.in_worker():
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
    check_quantization(samples, name, i)


def check_quantization(samples: Sequence[torch.Tensor], name: Name, i: int) -> None:
    """Raise if torch cannot stack quantized samples, or would round them again."""
    if not (samples[i].is_quantized or samples[0].is_quantized):
        return
    if not samples[i].is_quantized:
        rule, found = f"be quantized like {name(0)}", "is not"
    elif not samples[0].is_quantized:
        rule, found = f"not be quantized, like {name(0)}", f"has {samples[i].dtype}"
    elif samples[i].qscheme() is not torch.per_tensor_affine:
        rule, found = "be quantized per tensor", f"is {samples[i].qscheme()}"
    else:
        first, other = map(_quantization, (samples[0], samples[i]))
        rule, found = f"have the {first} of {name(0)}", f"has {other}"
        if first == other:
            return
    raise BatchTypeError(
        f"{name(i)} must {rule}, but {found}. Call dequantize() before collating."
    )


def _quantization(sample: torch.Tensor) -> str:
    scale, zero_point = sample.q_scale(), sample.q_zero_point()
    return f"{sample.dtype}, scale {scale} and zero point {zero_point}"


def _check_storage(sample: torch.Tensor, name: Name, i: int) -> None:
    """Raise if the storage of a sample has been freed, as sharding does."""
    if type(sample) not in PLAIN or is_wrapped(sample):
        return
    found = missing_bytes(sample)
    if found:
        raise BatchValueError(
            f"{name(i)} must lie within its storage, but {found}. Collate it before "
            "its storage is resized."
        )


def _allocate_out(
    samples: Sequence[torch.Tensor], shape: Sequence[int]
) -> torch.Tensor | None:
    """Return memory for the result in a worker, if torch can write into it."""
    has_slab = allocation.in_worker() or allocation.is_packed_later()
    if not has_slab or not all(map(_supports_out, samples)):
        return None
    return allocation.empty(shape, promoted_dtype(samples), samples[0].device)


def promoted_dtype(
    samples: Sequence[torch.Tensor],
    name: Name = sample_name,
    dtype: torch.dtype | None = None,
) -> torch.dtype:
    """Return the dtype that torch promotes the dtypes of all samples to.

    Args:
        samples: at least one tensor.
        name: returns the name of sample ``i`` for an error.
        dtype: floating-point samples are cast to it before; None: they are not.

    Raises:
        TypeError: torch cannot promote them; the message names the first wrong sample.
    """
    result = cast_dtype(samples[0].dtype, dtype)
    for i, sample in enumerate(samples):
        own = cast_dtype(sample.dtype, dtype)
        if own != result:
            try:
                result = torch.promote_types(result, own)
            except RuntimeError as error:
                raise with_advice(
                    BatchTypeError,
                    f"{name(i)} must have a dtype that torch promotes together with "
                    f"{result}, but has {own}.",
                    "Convert the samples to one dtype.",
                ) from error
    return result


def cast_dtype(source: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of samples after their cast by the option ``dtype``."""
    return source if dtype is None or not source.is_floating_point else dtype


def _supports_out(sample: torch.Tensor) -> bool:
    """Return True if torch can stack this sample into an ``out`` tensor."""
    cls, device = type(sample), sample.device.type
    has_graph = sample.requires_grad and torch.is_grad_enabled()
    return cls in PLAIN and device == "cpu" and not (sample.is_quantized or has_graph)
