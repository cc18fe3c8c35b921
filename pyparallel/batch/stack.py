"""Pad and stack tensors into one tensor, in one pass where possible."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from .. import backend
from ..backend.plain import CASTS, PLAIN, without_subclasses
from ..core.errors import BatchMemoryError, BatchTypeError, type_name, with_advice
from ..core.torch_private import in_forward_ad, is_recorded
from ..transfer import to_device
from . import allocation, torch_stack
from .padding import Padded, Padding
from .padding_values import padding_patterns
from .plan import Name, StackPlan, plan_stack

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_is_nested = attrgetter("is_nested")
_requires_grad = attrgetter("requires_grad")


def stack(
    samples: Sequence[torch.Tensor],
    pad_dims: int | None,
    values: Sequence[Any],
    name: Name,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the samples as one new contiguous tensor ``(len(samples), *target)``.

    Values, dtype and conversions are those of ``torch.nn.functional.pad`` on every
    sample followed by ``torch.stack``, except that integers are padded with exactly the
    padding value. The backend writes plain dense tensors of one dtype that need no
    gradient in one pass. For all others, these torch functions run.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ, or None.
        values: padding value of every sample.
        name: returns the name of sample ``i`` for an error.
        dtype: of the result, if the samples have floating-point numbers; or None.
    """
    if dtype is None and may_stack_equal():
        small = backend.pad_small_batch(samples, pad_dims, values)
        if small is not None:
            return count_padding(small, samples)
    samples, plain = prepare(samples, name, dtype)
    plan = plan_stack(list(map(_shape_of, samples)), pad_dims, name)
    return stack_planned(samples, plan, values, name, plain, dtype=dtype)


def prepare(
    samples: Sequence[torch.Tensor], name: Name, dtype: torch.dtype | None
) -> tuple[Sequence[torch.Tensor], bool]:
    """Return the samples for `stack_planned`, and the result of `are_plain` for them.

    Samples that the backend does not cast while it copies are cast here.
    """
    samples = without_subclasses(samples)
    plain = are_plain(samples)
    if not plain:
        torch_stack.check_layouts(samples, name)
    if dtype is None:
        return samples, plain
    first = samples[0]
    if plain and first.is_cpu and (first.dtype, dtype) in CASTS:
        return samples, True
    samples = torch_stack.cast(samples, dtype, name)
    return samples, are_plain(samples)


def stack_padded(
    samples: Sequence[torch.Tensor],
    pad_dims: int,
    values: Sequence[Any],
    name: Name,
    padding: Padding,
    out: torch.Tensor | None = None,
) -> torch.Tensor | Padded:
    """Return the samples as one tensor with a given padding; see `stack`.

    Args:
        samples: at least one tensor.
        pad_dims: number of trailing dimensions that may differ.
        values: padding value of every sample.
        name: returns the name of sample ``i`` for an error.
        padding: the target shape, the sides, and whether to return sizes and a mask.
        out: a plain contiguous tensor with the shape and dtype of the result.
    """
    dtype = padding.dtype
    samples, plain = prepare(samples, name, dtype)
    shapes = list(map(_shape_of, samples))
    plan = plan_stack(shapes, pad_dims, name, padding)
    fixed = len(plan.shape) - pad_dims
    sizes = mask = None
    if padding.mask:
        shape = (len(samples), *plan.shape[fixed:])
        mask = allocation.empty(shape, torch.bool, samples[0].device)
    data = None
    if out is None and not any(plan.padded):
        data = stack_equal(samples, dtype=dtype)
    if mask is not None and (data is not None or not pad_dims):
        mask.fill_(1)
    if data is None:
        # The backend cannot write a mask without dimensions; it is filled above.
        unfilled = mask if pad_dims else None
        data = stack_planned(samples, plan, values, name, plain, out, unfilled, dtype)
    if padding.sizes:
        rows = [tuple(shape[fixed - 1 :]) for shape in shapes]
        sizes = int64_tensor(rows, (len(samples), pad_dims), samples[0].device)
    return Padded(data, sizes, mask) if padding.sizes or padding.mask else data


def stack_planned(
    samples: Sequence[torch.Tensor],
    plan: StackPlan,
    values: Sequence[Any],
    name: Name,
    plain: bool,
    out: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the planned tensor, written by the backend or by torch's operators.

    Args:
        samples: dense tensors of the planned shapes, from `prepare`.
        plan: the plan of the stack.
        values: padding value of every sample.
        name: returns the name of sample ``i`` for an error.
        plain: the result of `are_plain` for the samples.
        out: a tensor for the result; None: a new one is allocated.
        mask: ``(n, *target[-k:])`` or None; True is written where the data are.
        dtype: as of `prepare`.
    """
    if plain:
        made = torch_stack.cast_dtype(samples[0].dtype, dtype)
        patterns = padding_patterns(plan, made, values, name)
        result = out
        if result is None:
            result = _allocate(plan, made, samples[0].device, name)
        try:
            backend.pad_copy(result, samples, patterns, plan.starts, mask)
            if out is not None:  # so that autograd notices that a saved `out` changed
                torch.autograd.graph.increment_version(out)
            return count_padding(result, samples)
        except (TypeError, ValueError):  # before any write; see are_plain
            torch_stack.check_layouts(samples, name)
            if dtype is not None:
                samples = torch_stack.cast(samples, dtype, name)
    result = torch_stack.pad_and_stack(samples, plan, values, name, out)
    if mask is not None:
        torch_stack.fill_mask(mask, plan, list(map(_shape_of, samples)))
    return count_padding(result, samples)


def _allocate(
    plan: StackPlan, dtype: torch.dtype, device: torch.device, name: Name
) -> torch.Tensor:
    try:
        return allocation.empty(plan.shape, dtype, device)
    except RuntimeError as error:
        if device.type != "cpu":  # torch has its own error for device memory
            raise
        nbytes = math.prod(plan.shape) * dtype.itemsize
        if allocation.in_worker() and not allocation.is_packed_later():
            raise BatchMemoryError(
                f"{name(0)} and the samples stacked with it must fit into shared "
                f"memory, where torch's DataLoader needs {nbytes} bytes and a file "
                f"descriptor for them, but torch reports: {error}. Use "
                "pyparallel.DataLoader, or increase the limit of open files (ulimit "
                "-n) or the size of /dev/shm."
            ) from error
        raise BatchMemoryError(
            f"{name(0)} and the samples stacked with it must fit into memory, but the "
            f"padded shape {plan.shape} of {dtype} takes {nbytes} bytes. Use a smaller "
            "batch, or smaller samples."
        ) from error


def may_stack_equal() -> bool:
    """Return True if `stack_equal` can return a tensor in this thread now."""
    if allocation.in_worker() and not allocation.is_packed_later():
        return False
    return not (in_forward_ad() or is_recorded())


def stack_equal(
    samples: Sequence[torch.Tensor],
    pad_dims: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Return ``torch.stack(samples)`` if no sample needs padding or a cast, else None.

    This path reads the properties of every sample only once. In a worker it is used
    only for small results that are packed into a slab later, because it does not write
    into the slab. It also returns None if the backend raises: `stack` then raises an
    error that names the sample.
    """
    if not may_stack_equal():
        return None
    first, last = samples[0], samples[-1]
    try:
        if (
            allocation.is_packed_later()
            and first.nbytes > allocation.SMALL_NBYTES // len(samples)
        ):
            return None
        # A cheap check: the first and the last of ragged samples usually differ.
        if pad_dims is not None and (
            first.dim() <= pad_dims or first.shape != last.shape
        ):
            return None
        if dtype is not None and any(
            torch_stack.cast_dtype(each.dtype, dtype) != each.dtype for each in samples
        ):
            return None
        result = backend.stack_equal(samples)
    except (TypeError, RuntimeError, AttributeError):
        return None
    return None if result is None else count_padding(result, samples)


def is_array(value: object) -> bool:
    """Return True for an array of numpy, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_numeric_array(value: Any) -> bool:
    """Return True for an array that is converted to a tensor: not of a subclass."""
    if type_name(value) not in ("numpy.ndarray", "numpy.memmap"):
        return False
    # "g" and "G" are the long doubles of C.
    return value.dtype.kind in "biufc" and value.dtype.char not in "gG"


def is_masked(value: Any) -> bool:
    """Return True for a masked array of numpy, without importing numpy."""
    return _is_masked_type(type(value))


def _is_masked_type(cls: type) -> bool:
    ma = sys.modules.get("numpy.ma")
    return ma is not None and issubclass(cls, ma.MaskedArray)


def check_masks(values: Sequence[Any], name: Name) -> None:
    """Raise TypeError for a masked array, whose mask a tensor cannot hold.

    Args:
        values: values of any types.
        name: returns the name of value ``i`` for the error.
    """
    if not any(map(_is_masked_type, set(map(type, values)))):
        return
    i = next(i for i, each in enumerate(values) if is_masked(each))
    raise with_advice(
        BatchTypeError,
        f"{name(i)} must be an array without a mask, because a tensor cannot hold the "
        f"mask, but is {type_name(values[i])}.",
        "Return filled() of the array and its mask as two values.",
    )


def is_image(value: Any) -> bool:
    """Return True for a PIL image, without importing PIL."""
    return any(
        cls.__module__ == "PIL.Image" and cls.__name__ == "Image"
        for cls in type(value).__mro__
    )


def as_tensor(value: Any) -> torch.Tensor:
    """View an array as a tensor; copy arrays that torch cannot view or warns about."""
    if is_image(value):
        import numpy

        value = numpy.asarray(value)
    if is_numeric_array(value) and not (
        value.flags.writeable
        and value.dtype.isnative
        and all(step >= 0 and step % value.itemsize == 0 for step in value.strides)
    ):
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(value)


def as_tensors(values: Sequence[Any]) -> list[Any]:
    """Convert numeric arrays and PIL images to tensors; keep other values."""
    return [as_tensor(x) if is_numeric_array(x) or is_image(x) else x for x in values]


def are_plain(samples: Sequence[torch.Tensor]) -> bool:
    """Return True if the backend may copy the bytes of these samples.

    The backend checks every sample before it writes. It refuses tensors that are
    sparse, conjugated, wrapped by torch.func, on another device, or without storage.
    So this function only excludes three kinds: tensors that the backend would accept
    (gradients, subclasses), tensors without a plan (quantized, nested), and a common
    case (mixed dtypes). A trace or a mode of torch gets operators of torch to record.
    """
    first = samples[0]
    return (
        (first.is_cpu or first.device.type in backend.devices)
        and PLAIN.issuperset(map(type, samples))
        and len(set(map(_dtype_of, samples))) == 1
        and not (first.is_quantized or any(map(_is_nested, samples)))
        and not (torch.is_grad_enabled() and any(map(_requires_grad, samples)))
        and not in_forward_ad()
        and not is_recorded()
    )


def int64_tensor(
    values: Sequence[Any], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return a contiguous ``torch.int64`` tensor with these values on the device.

    On the host, `allocation.empty` provides its memory.

    Stream: `to_device.send` copies the values from a pinned slab to a device with
    streams, so the host does not wait for the copy.
    """
    host = torch.tensor(values, dtype=torch.int64, device="cpu").view(shape)
    if device.type in ("cpu", "meta"):
        return allocation.empty(shape, torch.int64, device).copy_(host)
    (sent,) = to_device.start_copy([host], device)()
    return sent


# --- The number of stacked bytes, and of padding bytes among them.


class PaddingCounter:
    """Count the bytes that this thread stacks within a ``with`` block.

    `collate` and `pad_stack` add to it. Read the counts after the block. The counts of
    an inner block are added to those of the outer block.

    Attributes:
        stacked_nbytes: bytes of the stacked tensors.
        padding_nbytes: bytes of the padding in these tensors.
    """

    __slots__ = ("_outer", "padding_nbytes", "stacked_nbytes")

    padding_nbytes: int
    stacked_nbytes: int

    def __enter__(self) -> PaddingCounter:
        self.stacked_nbytes = self.padding_nbytes = 0
        self._outer, active.counter = active.counter, self
        return self

    def __exit__(self, *error: object) -> None:
        active.counter = outer = self._outer
        if outer is not None:
            outer.add(self.stacked_nbytes, self.padding_nbytes)

    def add(self, nbytes: int, padding_nbytes: int = 0) -> None:
        """Count a stacked tensor of ``nbytes``, including its padding."""
        self.stacked_nbytes += nbytes
        self.padding_nbytes += padding_nbytes


class _Active(threading.local):
    """The innermost counter of each thread, or None."""

    counter: PaddingCounter | None = None


active: _Active = _Active()


def count_padding(
    result: torch.Tensor, samples: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Add the result to the active counter, if there is one, and return it.

    Without ``samples`` it has no padding.
    """
    counter = active.counter
    if counter is not None:
        num_items = result.numel()
        if samples is not None:
            num_items = sum(sample.numel() for sample in samples)
        padding = (result.numel() - num_items) * result.element_size()
        counter.add(result.nbytes, padding)
    return result
