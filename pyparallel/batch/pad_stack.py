"""The function `pad_stack`: pad and stack tensors without containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, overload

import torch
from typing_extensions import Unpack

from ..backend.plain import PLAIN, without_subclasses
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    EmptyBatchError,
    check_int,
    type_name,
)
from . import custom_op, stack, torch_stack
from .padding import Padded, Padding, Sizes, check_num_dims
from .plan import plan_stack, sample_name

_DEFAULT = Padding()


class _Options(TypedDict, total=False):
    """The options of `pad_stack` that do not change the type of its result."""

    pad_dims: int | None
    padding_value: float
    out: torch.Tensor | None
    size_divisor: int | Sizes
    shape: Sizes | None
    buckets: tuple[Sizes, ...]
    side: str | tuple[str, ...]
    dtype: torch.dtype | None


@overload
def pad_stack(
    samples: Sequence[torch.Tensor],
    *,
    padding: None = None,
    sizes: Literal[False] = False,
    mask: Literal[False] = False,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def pad_stack(
    samples: Sequence[torch.Tensor],
    *,
    mask: Literal[True],
    sizes: bool = False,
    **options: Unpack[_Options],
) -> Padded: ...
@overload
def pad_stack(
    samples: Sequence[torch.Tensor],
    *,
    sizes: Literal[True],
    mask: bool = False,
    **options: Unpack[_Options],
) -> Padded: ...
@overload
def pad_stack(
    samples: Sequence[torch.Tensor],
    *,
    padding: Padding | None = None,
    sizes: bool = False,
    mask: bool = False,
    **options: Unpack[_Options],
) -> torch.Tensor | Padded: ...
def pad_stack(
    samples: Sequence[torch.Tensor],
    *,
    pad_dims: int | None = None,
    padding_value: float = 0,
    padding: Padding | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | Padded:
    """Return ragged tensors as one contiguous tensor, padded and stacked in one pass.

    Args:
        samples: tensors, numeric arrays or PIL images (as arrays ``(h, w, C)``) with
            the same number of dimensions, at least one.
        pad_dims: the number of trailing dimensions that may differ; None: all.
        padding_value: the number written into the padding. Samples of an integer dtype
            get exactly this number. For other dtypes it is converted as
            ``torch.nn.functional.pad`` does.
        padding: the target shape and the sides of the padding, and whether to return
            sizes and a mask.
        out: a plain contiguous tensor for the result, with its shape and dtype, on the
            device of the samples. It must not share memory with them. With
            ``Padding(shape=...)``, one ``out`` can be used for every batch.
        **options: the options of `Padding` by name, instead of ``padding``.

    Returns:
        The tensor ``(n, *target)`` (``out``, if given), or a `Padded` with it if sizes
        or a mask are requested. Gradients flow through it. It is a plain tensor, also
        if the samples are of a subclass.

    Raises:
        TypeError: ``samples`` has another type, or the padding value is not a real
            number.
        ValueError: no samples, shapes that differ outside the padded dimensions or do
            not fit the padding, a padding value that the dtype cannot hold, an ``out``
            with another shape, dtype, device or layout, or an ``out`` while autograd
            records. The message names the sample.

    Stream: on a GPU the work is queued on the current stream.

    The function is like ``torch.nn.utils.rnn.pad_sequence(batch_first=True)``, for any
    number of dimensions. In a ``DataLoader`` worker the result is written directly into
    shared memory.

    Example:
        >>> pad_stack([torch.ones(2), torch.ones(3)], side="left")
        tensor([[0., 1., 1.],
                [1., 1., 1.]])
    """
    tensors = _checked(samples)
    padding = _padding(padding, options)
    num_dims = tensors[0].dim()
    if pad_dims is not None:
        rule = "None or an integer"
        num_dims = check_int(pad_dims, 0, "pad_stack: pad_dims", rule)
    check_num_dims(padding, num_dims, "pad_stack")
    if out is not None:
        torch_stack.check_layouts(tensors, sample_name)
        shapes = [tuple(sample.shape) for sample in tensors]
        plan = plan_stack(shapes, num_dims, sample_name, padding)
        _check_out(out, tensors, plan.shape, padding.dtype)
    elif torch.compiler.is_compiling():
        tensors = list(without_subclasses(tensors))
        return custom_op.pad_stack(tensors, num_dims, padding_value, padding)
    values = [padding_value] * len(tensors)
    return stack.stack_padded(tensors, num_dims, values, sample_name, padding, out)


def _checked(samples: Any) -> list[torch.Tensor]:
    # isinstance gets tuples in this file, because torch.compile of torch 2.8 does not
    # support unions.
    if not isinstance(samples, Sequence) or isinstance(samples, (str, bytes)):
        raise BatchTypeError(
            "pad_stack: samples must be a sequence of tensors, but is "
            f"{type_name(samples)}."
        )
    if not (
        PLAIN.issuperset(map(type, samples))
        or all(isinstance(sample, torch.Tensor) for sample in samples)
    ):
        stack.check_masks(samples, lambda i: f"pad_stack: {sample_name(i)}")
        samples = stack.as_tensors(samples)
        for i, sample in enumerate(samples):
            if not isinstance(sample, torch.Tensor):
                raise BatchTypeError(
                    f"pad_stack: {sample_name(i)} must be a tensor or a numeric array, "
                    f"but is {type_name(sample)}. Convert it with torch.as_tensor."
                )
    if not samples:
        raise EmptyBatchError(
            "pad_stack: samples must have at least one tensor, but is empty."
        )
    return list(samples)


def _padding(padding: Padding | None, options: dict[str, Any]) -> Padding:
    if padding is None:
        return Padding(**options) if options else _DEFAULT
    if options:
        raise BatchTypeError(
            "pad_stack: padding must not be given together with its options, but "
            f"{', '.join(options)} is also given. Put it into the Padding."
        )
    return padding


def _check_out(
    out: Any,
    samples: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
) -> None:
    """Raise unless samples of this padded shape can be written to ``out``."""
    named = [("out", out), *((sample_name(i), each) for i, each in enumerate(samples))]
    for where, tensor in named:
        if type(tensor) not in PLAIN or tensor.is_quantized:
            raise BatchTypeError(
                f"pad_stack: {where} must be a plain tensor with out=, but is of type "
                f"{type_name(tensor)} and dtype {getattr(tensor, 'dtype', None)}."
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise BatchValueError(
                f"pad_stack: {where} must not require grad with out=, because autograd "
                "cannot record it, but it does. Detach it, or omit out=."
            )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise BatchValueError(
            "pad_stack: out must not be an inference tensor outside inference mode, "
            "because autograd could miss the change, but it is. Clone it."
        )
    _check_equal("shape", tuple(out.shape), shape)
    promoted = torch_stack.promoted_dtype(samples, dtype=dtype)
    _check_equal("dtype", out.dtype, promoted)
    _check_equal("device", out.device, samples[0].device)
    if out.layout is not torch.strided or not out.is_contiguous():
        found = f"strides {out.stride()}" if out.layout is torch.strided else out.layout
        raise BatchValueError(
            f"pad_stack: out must be contiguous, but has {found}. Call contiguous()."
        )
    for i, sample in enumerate(samples):
        if _overlap(sample, out):
            raise BatchValueError(
                f"pad_stack: out must not share memory with {sample_name(i)}, but "
                "overlaps it. Clone the sample, or pass another out."
            )


def _check_equal(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise BatchValueError(
            f"pad_stack: out must have the {what} of the result, {expected}, but has "
            f"{found}."
        )


def _overlap(sample: torch.Tensor, out: torch.Tensor) -> bool:
    """Return True if the byte range of a sample overlaps that of ``out``."""
    if sample.is_meta or not sample.numel() or not out.numel():
        return False
    reach = zip(sample.shape, sample.stride(), strict=True)
    last = sum((size - 1) * step for size, step in reach) * sample.element_size()
    distance = sample.data_ptr() - out.data_ptr()
    return -last - sample.element_size() < distance < out.nbytes
