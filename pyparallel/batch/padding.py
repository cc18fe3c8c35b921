"""The classes `Padding`, options for padding, and `Padded`, a batch with its mask."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..core.errors import BatchTypeError, BatchValueError, check_int, type_name
from .options import check_dtype, checked_options, text_of
from .tensor_fields import TensorFields

#: The largest number of dimensions that a `DataContainer` pads, as in mmcv.
MOST_PAD_DIMS = 3

_SIDES = ("right", "left", "center")

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PaddingOptions:
    """The options of `Padding` and of the rule `Pad`, with their checks."""

    size_divisor: int | Sizes = 1
    shape: Sizes | None = None
    buckets: tuple[Sizes, ...] = ()
    side: str | tuple[str, ...] = "right"
    sizes: bool | None = False  # None, only for `Pad`: the same as ``mask``
    mask: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_dtype(where, self.dtype)
        divisor: Any = self.size_divisor
        if isinstance(divisor, Sequence):
            rule = "an integer or a sequence of integers"
            divisor = _check_sizes(f"{where}: size_divisor", divisor, rule)
        else:
            divisor = check_int(divisor, 1, f"{where}: size_divisor")
        object.__setattr__(self, "size_divisor", divisor)
        if self.shape is not None:
            shape = _check_sizes(f"{where}: shape", self.shape)
            object.__setattr__(self, "shape", shape)
        name = f"{where}: buckets"
        buckets = _check_sequence(name, self.buckets, "a sequence of shapes")
        checked = [_check_sizes(f"{name}[{i}]", each) for i, each in enumerate(buckets)]
        object.__setattr__(self, "buckets", tuple(checked))
        _check_side(self, where)
        for option in ("mask", "sizes"):
            value = getattr(self, option)
            if not isinstance(value, bool):
                raise BatchTypeError(
                    f"{where}: {option} must be True or False, but is {value!r} "
                    f"({type_name(value)})."
                )
        _check_combination(self, where)

    @property
    def num_dims(self) -> int | None:
        """The number of padded dimensions of the options; None if any number fits."""
        return next((len(sizes) for _, sizes in _per_dim_options(self)), None)

    def __repr__(self) -> str:
        """Show the options that are not the default."""
        return text_of(self)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Padding(PaddingOptions):
    """Options for padding samples to a common shape.

    The padded dimensions are the last ``pad_dims`` of every sample. By default they
    are padded at their end, to the largest size among the stacked samples.

    Args:
        size_divisor: round the sizes up to multiples of this number: one for all padded
            dimensions, or one for each of them.
        shape: pad to exactly these sizes, one for each padded dimension.
        buckets: pad to one of these shapes: the smallest, by number of elements, that
            every stacked sample fits into; of equally small ones, the first. Few shapes
            mean few compilations by ``torch.compile`` or cuDNN.
        side: the side of the padding: ``"right"`` (the end), ``"left"`` or ``"center"``
            (of an odd number of cells, one more at the end). One for all padded
            dimensions, or one for each of them.
        sizes: also return the sizes of the padded dimensions before padding.
        mask: also return a mask that is True where the data are.
        dtype: the floating-point dtype to which floating-point samples are cast while
            they are copied, as by ``Tensor.to``. Other samples keep their dtype.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has an impossible value; ``shape`` and ``buckets``
            together, or one of them with a ``size_divisor``; options for different
            numbers of dimensions.

    With ``sizes`` or ``mask`` the result is a `Padded` instead of a tensor. Instances
    compare by value, are hashable and can be pickled. ``size_divisor`` is mmengine's
    ``pad_size_divisor`` and detectron2's ``size_divisibility``. ``side`` extends
    ``padding_side`` of ``torch.nn.utils.rnn.pad_sequence``.

    Example:
        >>> Padding(size_divisor=32, mask=True)
        Padding(size_divisor=32, mask=True)
    """

    sizes: bool = False


class Padded(TensorFields):
    """Padded samples in one tensor, with their sizes and a mask.

    Attributes:
        data: ``(n, *target)``.
        sizes: ``torch.int64`` ``(n, pad_dims)``, the sizes of the padded dimensions of
            every sample before padding; None if not requested.
        mask: ``torch.bool`` ``(n, *target[-pad_dims:])``, True where the data are;
            None if not requested.

    All tensors are on one device, and are moved like any tensors in a batch. ``len``,
    iteration and indexing count samples: ``padded[i]`` is ``data[i]`` with its padding.
    """

    _names = ("data", "sizes", "mask")

    data: torch.Tensor
    sizes: torch.Tensor | None
    mask: torch.Tensor | None

    def __init__(
        self,
        data: torch.Tensor,
        sizes: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        self.data, self.sizes, self.mask = data, sizes, mask

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.data.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of ``data``."""
        return self.data.shape

    def part(self, start: int, stop: int) -> Padded:
        """Return the samples from ``start`` up to ``stop``, as views."""
        return Padded.from_fields(
            each if each is None else each[start:stop] for each in self.fields()
        )

    def _sample(self, index: int) -> torch.Tensor:
        """Return one sample with its padding; ``0 <= index < len(self)``."""
        return self.data[index]

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples


checked_options(
    Padding,
    {
        "value": "Give padding_value to DataContainer or pad_stack, or use Pad(value).",
        "dims": "Give pad_dims to DataContainer or pad_stack, or use Pad(dims=...).",
    },
)
# Pickles name the public path, so they do not depend on the layout of the package.
Padding.__module__ = Padded.__module__ = "pyparallel"


def target_sizes(
    padding: Padding,
    shapes: Sequence[Sizes],
    largest: Sizes,
    name: Callable[[int], str],
) -> Sizes:
    """Return the sizes of the padded dimensions after padding.

    Args:
        padding: the options.
        shapes: the shape of every sample; at least one. Its last sizes are padded.
        largest: the largest size in every padded dimension.
        name: returns the name of sample ``i`` for an error.

    Raises:
        ValueError: a sample is larger than the shape, or than every bucket.
    """
    if padding.shape is not None:
        return _smallest_fitting((padding.shape,), largest, shapes, name)
    if padding.buckets:
        return _smallest_fitting(padding.buckets, largest, shapes, name)
    if padding.size_divisor == 1:
        return largest
    divisors = _one_per_dim(padding.size_divisor, len(largest))
    return tuple(
        -(-size // divisor) * divisor
        for size, divisor in zip(largest, divisors, strict=True)
    )


def start_offsets(padding: Padding, sizes: Sizes, target: Sizes) -> Sizes:
    """Return the index at which data of these sizes start, in each padded dimension."""
    sides = _one_per_dim(padding.side, len(target))
    margins = map(operator.sub, target, sizes)
    shares = {"right": 0, "center": 1, "left": 2}
    return tuple(
        margin * shares[side] // 2 for margin, side in zip(margins, sides, strict=True)
    )


def check_num_dims(padding: Any, num_dims: int, where: str) -> None:
    """Raise unless this is a `Padding` whose options fit a number of dimensions."""
    if not isinstance(padding, Padding):
        raise BatchTypeError(
            f"{where}: padding must be a Padding, but is {padding!r} "
            f"({type_name(padding)})."
        )
    for option, value in _per_dim_options(padding):
        if len(value) != num_dims:
            dims = "dimension" if num_dims == 1 else "dimensions"
            raise BatchValueError(
                f"{where}: padding must give {option} for {num_dims} padded {dims}, "
                f"but gives {value}. Give {num_dims} of them."
            )


def _smallest_fitting(
    allowed: Sequence[Sizes],
    largest: Sizes,
    shapes: Sequence[Sizes],
    name: Callable[[int], str],
) -> Sizes:
    def holds(shape: Sizes, inside: Sizes) -> bool:
        return all(map(operator.ge, shape, inside))

    fitting = [shape for shape in allowed if holds(shape, largest)]
    if fitting:
        return min(fitting, key=math.prod)
    sizes = [tuple(shape[len(shape) - len(largest) :]) for shape in shapes]
    so_far = list(accumulate(sizes, lambda one, two: tuple(map(max, one, two))))
    i = next(
        i
        for i, inside in enumerate(so_far)
        if not any(holds(shape, inside) for shape in allowed)
    )
    together = ""
    if so_far[i] != sizes[i]:
        together = f", and with the samples before it {so_far[i]}"
    one = f"at most {allowed[0]}, the shape of the padding"
    several = f"held by one of the buckets {tuple(allowed)}"
    rule = one if len(allowed) == 1 else several
    raise BatchValueError(
        f"{name(i)} must be {rule}, in the padded dimensions, but is {sizes[i]} there"
        f"{together}. Resize it before collating, or allow a larger shape."
    )


def _one_per_dim(value: Any, num_dims: int) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) * num_dims


def _per_dim_options(padding: PaddingOptions) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the options that have one entry for each padded dimension."""
    options: list[tuple[str, Any]] = [
        ("size_divisor", padding.size_divisor),
        ("shape", padding.shape),
        ("side", padding.side),
    ]
    options += [(f"buckets[{i}]", each) for i, each in enumerate(padding.buckets)]
    return [(option, value) for option, value in options if isinstance(value, tuple)]


def _check_side(padding: PaddingOptions, where: str) -> None:
    side: Any = padding.side
    sides = (
        (side,)
        if isinstance(side, str)
        else _check_sequence(f"{where}: side", side, "names of sides")
    )
    known = [isinstance(each, str) and each in _SIDES for each in sides]
    if not known or not all(known):
        raise BatchValueError(
            f"{where}: side must be 'right', 'left' or 'center', or a tuple of these, "
            f"but is {side!r}."
        )
    object.__setattr__(padding, "side", side if isinstance(side, str) else tuple(sides))


def _check_combination(padding: PaddingOptions, where: str) -> None:
    if padding.shape is not None and padding.buckets:
        raise BatchValueError(
            f"{where}: shape must not be given together with buckets, but both are. "
            "Make the shape one of the buckets."
        )
    for option in ("shape", "buckets"):
        if getattr(padding, option) and not _is_one(padding.size_divisor):
            raise BatchValueError(
                f"{where}: size_divisor must be 1 with {option}, but is "
                f"{padding.size_divisor}. Give sizes that are multiples of it."
            )
    options = _per_dim_options(padding)
    for option, value in options:
        first, expected = options[0]
        if len(value) != len(expected):
            raise BatchValueError(
                f"{where}: {option} must have {len(expected)} entries like {first}, "
                f"but has {len(value)}."
            )


def _is_one(divisor: int | Sizes) -> bool:
    return divisor == 1 or (isinstance(divisor, tuple) and set(divisor) == {1})


def _check_sequence(name: str, value: Any, rule: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise BatchTypeError(
            f"{name} must be {rule}, but is {value!r} ({type_name(value)})."
        )
    return value


def _check_sizes(name: str, value: Any, rule: str = "a sequence of integers") -> Sizes:
    items = _check_sequence(name, value, rule)
    if not items:
        raise BatchValueError(f"{name} must have a size, but is empty.")
    return tuple(check_int(each, 1, f"{name}[{i}]") for i, each in enumerate(items))
