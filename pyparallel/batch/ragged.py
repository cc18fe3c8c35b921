"""The class `Ragged`: samples of different lengths in one tensor, without padding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

import torch

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    EmptyBatchError,
    type_name,
    with_advice,
)
from ..core.torch_private import is_split_along_rows, is_wrapped
from . import stack, torch_stack
from .padding import Padded, Padding, Sizes, check_num_dims
from .plan import StackPlan, plan_stack, sample_name
from .tensor_fields import TensorFields


class Ragged(TensorFields):
    """Samples that differ in dimension 0, concatenated in one tensor.

    Attributes:
        values: ``(sum of the lengths, *rest)``.
        offsets: ``torch.int64`` ``(n + 1,)``: sample ``i`` is
            ``values[offsets[i]:offsets[i + 1]]``. On the device of ``values``.

    This is the jagged layout of torch's NestedTensor, and the cu_seqlens layout of
    attention without padding. ``len``, iteration and indexing count samples. The
    tensors are moved like any tensors in a batch. To be split over several devices, a
    `Ragged` must be the chunk of a `DataContainer`, as
    ``DataContainer(..., ragged=True)`` creates it.

    Raises:
        TypeError: ``values`` or ``offsets`` is not a tensor.
        ValueError: ``offsets`` is not a ``torch.int64`` tensor with one dimension on
            the device of ``values``, or does not ascend from 0 to ``len(values)``. The
            numbers are checked only on the CPU, so that the host never waits.

    Example:
        >>> ragged = Ragged.from_tensors([torch.ones(2), torch.zeros(1)])
        >>> ragged.values, ragged.offsets
        (tensor([1., 1., 0.]), tensor([0, 2, 3]))
        >>> ragged.to_padded(padding_value=-1)
        tensor([[ 1.,  1.],
                [ 0., -1.]])
    """

    _names = ("values", "offsets")

    values: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        _check_fields(values, offsets)
        self.values, self.offsets = values, offsets

    @classmethod
    def from_tensors(cls, samples: Sequence[torch.Tensor]) -> Ragged:
        """Concatenate tensors that differ in dimension 0, copied in one pass.

        In a ``DataLoader`` worker they are written directly into shared memory.
        Gradients flow through. Mixed dtypes are promoted as ``torch.cat`` does. Among
        tensors with more dimensions, one of shape ``(0,)``, such as
        ``torch.tensor([])``, has zero rows of their dtype.

        Raises:
            TypeError: a sample is not a dense tensor.
            ValueError: no samples, or shapes that differ outside dimension 0; the
                message names the first wrong sample.
        """
        if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
            raise BatchTypeError(
                "Ragged.from_tensors: samples must be a sequence of tensors, but is "
                f"{type_name(samples)}."
            )
        if not samples:
            raise EmptyBatchError(
                "Ragged.from_tensors: samples must have at least one tensor, but is "
                "empty."
            )
        for i, sample in enumerate(samples):
            if not isinstance(sample, torch.Tensor):
                stack.check_masks(samples, "Ragged.from_tensors: samples[{}]".format)
                raise BatchTypeError(
                    f"Ragged.from_tensors: samples[{i}] must be a tensor, but is "
                    f"{type_name(sample)}. Convert it with torch.as_tensor."
                )
        return join_samples(samples, sample_name)

    @classmethod
    def from_nested(cls, nested: torch.Tensor) -> Ragged:
        """Convert a NestedTensor of either layout to `Ragged`.

        The result shares the memory of a NestedTensor that is jagged in dimension 1 and
        has no holes. Ragged dimensions other than dimension 1 raise the errors of
        `from_tensors`.

        Raises:
            TypeError: ``nested`` is not a NestedTensor.
        """
        if not isinstance(nested, torch.Tensor) or not nested.is_nested:
            raise BatchTypeError(
                "Ragged.from_nested: nested must be a nested tensor, but is "
                f"{type_name(nested)}. Use Ragged.from_tensors for a list."
            )
        source: Any = nested
        dense = nested.layout is torch.jagged and source.lengths() is None
        if dense and is_split_along_rows(nested):
            return cls(nested.values(), source.offsets().to(torch.int64))
        return cls.from_tensors(nested.unbind())

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.offsets.shape[0] - 1

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``n``, None for the lengths, which differ, and the rest of the shape."""
        return (self.num_samples, None, *self.values.shape[1:])

    def lengths(self) -> torch.Tensor:
        """Return the length of every sample, ``torch.int64`` ``(n,)``."""
        return self.offsets.diff()

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """The offsets as ``torch.int32``, as attention without padding needs them.

        Raises:
            ValueError: ``values`` has 2**31 or more rows.

        Stream: on a GPU the host does not wait.
        """
        if self.values.shape[0] > torch.iinfo(torch.int32).max:
            raise BatchValueError(
                "Ragged.cu_seqlens: values must have less than 2**31 rows, but has "
                f"{self.values.shape[0]}. Use smaller batches, or offsets."
            )
        return self.offsets.to(torch.int32)

    @property
    def max_seqlen(self) -> int:
        """The largest length of a sample; 0 without samples.

        Stream: on a GPU the host waits for the offsets.
        """
        return max(self._numbers(self.lengths()), default=0)

    @property
    def position_ids(self) -> torch.Tensor:
        """The index of every row in its sample, ``torch.int64`` ``(len(values),)``.

        Stream: on a GPU the host does not wait.
        """
        total = self.values.shape[0]
        starts = for_each_row(self.offsets[:-1], self.offsets, total)
        return torch.arange(total, device=self.offsets.device) - starts

    @property
    def segment_ids(self) -> torch.Tensor:
        """The index of the sample of every row, ``torch.int64`` ``(len(values),)``.

        This is the vector ``batch`` of torch_geometric.

        Stream: on a GPU the host does not wait.
        """
        samples = torch.arange(self.num_samples, device=self.offsets.device)
        return for_each_row(samples, self.offsets, self.values.shape[0])

    def unbind(self) -> list[torch.Tensor]:
        """Return the samples as views of ``values``.

        Stream: on a GPU the host waits for the offsets.
        """
        return list(self.values.split(self._numbers(self.lengths())))

    def part(self, start: int, stop: int) -> Ragged:
        """Return the samples from ``start`` up to ``stop``; values are a view.

        Stream: on a GPU the host waits for two offsets.
        """
        start, stop, _ = slice(start, stop).indices(self.num_samples)
        offsets = self.offsets[start : max(start, stop) + 1]
        first, last = self._numbers(offsets[[0, -1]])
        return Ragged.from_fields((self.values[first:last], offsets - first))

    def _sample(self, index: int) -> torch.Tensor:
        """Return one sample as a view of ``values``; ``0 <= index < len(self)``.

        Stream: on a GPU the host waits for two offsets.
        """
        first, last = self._numbers(self.offsets[index : index + 2])
        return self.values[first:last]

    @staticmethod
    def _numbers(offsets: torch.Tensor) -> list[int]:
        """Return the numbers of offsets or lengths; raise if they have no data."""
        if offsets.is_meta:
            raise BatchValueError(
                "Ragged: offsets must have data to find the samples, but is on the "
                "meta device. Use the shape of values, which is all that it has."
            )
        numbers: list[int] = offsets.tolist()
        return numbers

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over the samples; see `unbind`."""
        return iter(self.unbind())

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    @overload
    def to_padded(
        self, padding_value: float = 0, padding: None = None
    ) -> torch.Tensor: ...
    @overload
    def to_padded(
        self, padding_value: float = 0, padding: Padding | None = None
    ) -> torch.Tensor | Padded: ...
    def to_padded(
        self, padding_value: float = 0, padding: Padding | None = None
    ) -> torch.Tensor | Padded:
        """Return the samples padded and stacked.

        Args:
            padding_value: the number written into the padding; see `pad_stack`.
            padding: options for the one padded dimension, dimension 0 of the samples.

        Returns:
            ``(n, max, *rest)``, or a `Padded` with it and, if requested, ``sizes``
            ``(n, 1)`` and ``mask`` ``(n, max)``.

        Raises:
            TypeError: an error of `pad_stack`.
            ValueError: no samples, or an error of `pad_stack`.

        Stream: on a GPU the host waits for the offsets.
        """
        lengths = self._numbers(self.lengths())
        if not lengths:
            raise EmptyBatchError(
                "Ragged.to_padded: there must be at least one sample, but there are 0."
            )
        padding = Padding() if padding is None else padding
        check_num_dims(padding, 1, "Ragged.to_padded")
        plan = plan_stack([(length,) for length in lengths], 1, sample_name, padding)
        values = [padding_value] * len(lengths)
        dtype, wide = padding.dtype, _add_dimensions(plan, self.values)
        samples, plain = stack.prepare(self.unbind(), sample_name, dtype)
        data = stack.stack_planned(
            samples, wide, values, sample_name, plain, dtype=dtype
        )
        if not (padding.sizes or padding.mask):
            return data
        sizes = self.lengths().unsqueeze(1)
        mask = _mask(plan, sizes) if padding.mask else None
        return Padded(data, sizes if padding.sizes else None, mask)

    def to_nested(self) -> torch.Tensor:
        """Return a NestedTensor of the jagged layout that shares this memory."""
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets
        )
        return nested


# Pickles name the public path, so they do not depend on the layout of the package.
Ragged.__module__ = "pyparallel"


def for_each_row(
    numbers: torch.Tensor, offsets: torch.Tensor, total: int
) -> torch.Tensor:
    """Return the number of each sample for all of its rows, in ``total`` rows."""
    return numbers.repeat_interleave(offsets.diff(), output_size=total)


def join_samples(
    samples: Sequence[torch.Tensor], name: Callable[[int], str], dim: int = 0
) -> Ragged:
    """Concatenate tensors to one `Ragged`.

    Args:
        samples: at least one tensor.
        name: returns the name of sample ``i`` for an error.
        dim: the dimension. The offsets of the result are those along it.
    """
    torch_stack.check_layouts(samples, name)
    shapes = [sample.shape for sample in samples]
    # Nearly always all shapes have equal ends.
    is_usual = dim == 0 and () not in shapes and len({x[1:] for x in shapes}) == 1
    if not is_usual and _differ(shapes, dim):
        if rest_beside_empty(shapes, dim) is None:
            _check_shapes(shapes, name, dim)
        like = next(each for each in samples if each.dim() > 1)
        rows = without_rows(like, dim)
        samples = [each if each.dim() > 1 else rows for each in samples]
        shapes = [sample.shape for sample in samples]
    values = torch_stack.cat(samples, name, dim)
    ends = list(accumulate((shape[dim] for shape in shapes), initial=0))
    offsets = stack.int64_tensor(ends, (len(ends),), values.device)
    return Ragged.from_fields((values, offsets))


def without_rows(like: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return a tensor like another one whose size in a dimension is 0.

    If it lacks this dimension, the result is the empty tensor of one dimension.
    """
    if not -like.dim() <= dim < like.dim():
        return torch.empty(0)
    shape = list(like.shape)
    shape[dim] = 0
    return like.new_empty(shape)


def _rest(shape: Sizes, dim: int) -> Sizes | None:
    """Return all sizes but that of a dimension; None if it does not exist."""
    at = dim if dim >= 0 else dim + len(shape)
    return (*shape[:at], *shape[at + 1 :]) if 0 <= at < len(shape) else None


def _differ(shapes: Sequence[Sizes], dim: int) -> bool:
    """Return True if not all shapes have the dimension, and are equal beside it."""
    rests = {_rest(shape, dim) for shape in shapes}
    return len(rests) > 1 or None in rests


def rest_beside_empty(shapes: Sequence[Sizes], dim: int = 0) -> Sizes | None:
    """Return the other dimensions that samples with rows share, beside empty ones.

    Args:
        shapes: the shapes of the samples.
        dim: the dimension of the rows.

    Returns:
        None unless all shapes are ``(0,)`` or have the size ``n`` in ``dim`` and
        ``rest`` in the others, with both among them and at least one dimension in
        ``rest``.
    """
    rests = {_rest(shape, dim) for shape in shapes if shape != (0,)}
    if len(rests) != 1 or (0,) not in shapes:
        return None
    (rest,) = rests
    return rest or None


def _check_fields(values: Any, offsets: Any) -> None:
    for name, field in (("values", values), ("offsets", offsets)):
        if not isinstance(field, torch.Tensor):
            raise BatchTypeError(
                f"Ragged: {name} must be a tensor, but is {type_name(field)}. Use "
                "Ragged.from_tensors for a list of samples."
            )
    found = f"{offsets.dtype} of shape {tuple(offsets.shape)} on {offsets.device}"
    is_valid = offsets.dtype == torch.int64 and offsets.dim() == 1 and offsets.numel()
    if not is_valid or offsets.device != values.device or not values.dim():
        raise BatchValueError(
            "Ragged: offsets must be torch.int64 of shape (n + 1,) on the device of "
            f"values, {values.device}, but is {found} for values of shape "
            f"{tuple(values.shape)}. Use Ragged.from_tensors for a list of samples."
        )
    if type(offsets) is not torch.Tensor or not offsets.is_cpu:
        return
    if torch.compiler.is_compiling() or is_wrapped(offsets):
        return
    numbers = offsets.tolist()
    ascending = all(map(operator.le, numbers, numbers[1:]))
    if not ascending or (numbers[0], numbers[-1]) != (0, values.shape[0]):
        raise BatchValueError(
            f"Ragged: offsets must ascend from 0 to {values.shape[0]}, the length of "
            f"values, but is {numbers}. Use Ragged.from_tensors for a list of samples."
        )


def _check_shapes(
    shapes: Sequence[torch.Size], name: Callable[[int], str], dim: int
) -> None:
    for i, shape in enumerate(shapes):
        if not shape:
            raise with_advice(
                BatchValueError,
                f"{name(i)} must have at least 1 dimension to be ragged, but has shape "
                "().",
                "Call reshape(1) on it.",
            )
        rest = _rest(shape, dim)
        if rest is None:
            raise BatchValueError(
                f"{name(i)} must have the dimension {dim} to be concatenated along it, "
                f"but has shape {tuple(shape)}. Use Concat(), along dimension 0."
            )
        if rest != _rest(shapes[0], dim):
            raise with_advice(
                BatchValueError,
                f"{name(i)} must match {name(0)} outside dimension {dim}, but has "
                f"shape {tuple(shape)} where {tuple(shapes[0])} was expected.",
                f"Transpose the samples so that they differ in dimension {dim}, or "
                "pad them.",
            )


def _mask(plan: StackPlan, lengths: torch.Tensor) -> torch.Tensor:
    index = torch.arange(plan.shape[1], device=lengths.device)
    if plan.starts is None:
        return index < lengths
    starts = stack.int64_tensor(plan.starts, tuple(lengths.shape), lengths.device)
    return (index >= starts) & (index < starts + lengths)


def _add_dimensions(plan: StackPlan, values: torch.Tensor) -> StackPlan:
    """Return a plan of lengths as a plan of samples with further dimensions."""
    rest = tuple(values.shape[1:])
    starts = plan.starts
    if starts is not None:
        starts = tuple((*start, *(0,) * len(rest)) for start in starts)
    return StackPlan((*plan.shape, *rest), plan.padded, starts)
