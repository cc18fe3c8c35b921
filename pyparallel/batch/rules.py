"""The rules of `Collate`: how the values of one field become a batch."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    check_int,
    problem_of,
    type_name,
    with_advice,
)
from . import plan, pytree, stack, torch_stack
from .columns import NUMBER_DTYPES, Path, batch_tensors, batch_values, sample_path
from .container import DataContainer
from .options import check_dtype, checked_options, text_of
from .padding import Padded, Padding, PaddingOptions, Sizes
from .padding_values import as_number
from .ragged import (
    Ragged,
    for_each_row,
    join_samples,
    rest_beside_empty,
    without_rows,
)

_KEEP_LIST = "Use List() to keep the values in a list."

#: The numbers of channels that images usually have.
_CHANNELS = {1, 3, 4}


class Rule:
    """How the values of one field become a batch."""

    __slots__ = ()

    if not TYPE_CHECKING:  # for type checkers a rule is no collate_fn either

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Raise an error: a rule is not a ``collate_fn``."""
            raise BatchTypeError(
                f"{self!r} must be a rule of Collate, but was called as a function. "
                f"Use Collate(default={self!r})."
            )

    def _batch(self, column: list[Any], path: Path) -> Any:
        raise NotImplementedError

    def _advise(self, samples: Sequence[Any]) -> str:
        """Return the advice for samples that the rule cannot batch."""
        return advise_rules(samples)

    def __repr__(self) -> str:
        """Show the options that are not the default."""
        return text_of(self)


@dataclass(frozen=True, slots=True, repr=False)
class Stack(Rule):
    """Stack values of equal shape, as torch's ``default_collate`` does.

    The result is a tensor ``(n, *shape)``. Tensors, numeric arrays, PIL images, numbers
    and lists of numbers can be stacked.

    Args:
        dtype: as of `Padding`.

    Raises:
        TypeError: ``dtype`` is no floating-point dtype.

    Example:
        >>> Collate(id=Stack())([{"id": 3}, {"id": 5}])
        {'id': tensor([3, 5])}
    """

    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_dtype("Stack", self.dtype)

    def _batch(self, column: list[Any], path: Path) -> torch.Tensor:
        if type(column[0]) in NUMBER_DTYPES:
            stacked: torch.Tensor = batch_values(column, path)
            return stacked.to(torch_stack.cast_dtype(stacked.dtype, self.dtype))
        return batch_tensors(_as_tensors(column, path), path, self.dtype)


@dataclass(frozen=True, slots=True, repr=False)
class Pad(Rule, PaddingOptions):
    """Pad values to a common shape, and stack them.

    The result is a tensor ``(n, *target)``, or a `Padded` with it if ``sizes`` or
    ``mask`` is requested.

    Args:
        value: the number written into the padding. The dtype of the values must be
            able to hold it; integers are not rounded.
        dims: the number of trailing dimensions that may differ and are padded. None:
            the number of sizes in the other options; without such sizes 2, or 1 for
            values with one dimension.
        size_divisor, shape, buckets, side, mask, dtype: as of `Padding`. ``divisor`` is
            another name of ``size_divisor``.
        sizes: as of `Padding`. None: the same as ``mask``.

    Raises:
        TypeError, ValueError: as `Padding`.

    Example:
        >>> collate = Collate(tokens=Pad(side="left"))
        >>> collate([{"tokens": [5, 6]}, {"tokens": [7, 8, 9]}])
        {'tokens': tensor([[0, 5, 6],
                [7, 8, 9]])}
    """

    value: float = 0
    dims: int | None = None
    sizes: bool | None = field(default=None, kw_only=True)
    _padding: Padding = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Equal rules have equal options, whichever types the caller passed.
        given = self.sizes
        _set(self, "sizes", self.mask if given is None else given)
        PaddingOptions.__post_init__(self)
        options = {each.name: getattr(self, each.name) for each in fields(Padding)}
        padding = Padding(**options)
        _set(self, "_padding", padding)
        _set(self, "sizes", given)
        is_real = isinstance(self.value, numbers.Real)
        value = as_number(self.value) if is_real else None
        if value is None:
            raise BatchTypeError(
                f"Pad: value must be a real number, but is {self.value!r} "
                f"({type_name(self.value)})."
            )
        _set(self, "value", value)
        dims, num_sizes = self.dims, padding.num_dims
        if dims is not None:
            dims = check_int(dims, 1, "Pad: dims", "None or an integer")
            _set(self, "dims", dims)
        if None not in (dims, num_sizes) and dims != num_sizes:
            raise BatchValueError(
                f"Pad: dims must be {num_sizes}, the number of sizes in the other "
                f"options, but is {dims}. Omit dims, or change these options."
            )

    @property
    def divisor(self) -> int | Sizes:
        """The ``size_divisor``."""
        return self.size_divisor

    def _batch(self, column: list[Any], path: Path) -> torch.Tensor | Padded:
        samples, padding = _as_tensors(column, path), self._padding
        num_dims = samples[0].dim()
        dims = self.dims or padding.num_dims or min(2, num_dims)

        def name(i: int) -> str:
            return sample_path(path, i)

        if num_dims < dims:
            raise with_advice(
                BatchValueError,
                f"{name(0)} must have at least {dims} dimensions, but has shape "
                f"{tuple(samples[0].shape)}.",
            )
        if samples is not column and stack.is_image(column[0]):
            self._check_channels(samples, path)
        dtypes = {sample.dtype for sample in samples} if self.value != 0 else ()
        if not all(_can_hold(dtype, self.value) for dtype in dtypes):
            self._check_padded(samples, dims, name)
        if padding == _NO_OPTIONS:
            stacked = stack.stack_equal(samples, dims)
            if stacked is not None:
                return stacked
        values = [self.value] * len(samples)
        if padding == _NO_OPTIONS and num_dims > dims:
            return stack.stack(samples, dims, values, name)
        return stack.stack_padded(samples, dims, values, name, padding)

    def _advise(self, samples: Sequence[Any]) -> str:
        shapes = _shapes(samples)
        if shapes is not None and (rest := rest_beside_empty(shapes)) is not None:
            empty = f"torch.empty{(0, *rest)}"
            return f"Return {empty} for no rows, or use Concat() or List()."
        if shapes is None or len({len(shape) for shape in shapes}) > 1:
            return advise_rules(samples)
        num_dims, dim = len(shapes[0]), _first_difference(shapes)
        dims = self.dims or self._padding.num_dims or min(2, num_dims)
        if num_dims < dims:
            return advise_rules(samples)
        if dim is None or num_dims - dim <= dims:
            return "Use another value, or convert the samples to another dtype."
        last = {shape[-1] for shape in shapes}
        if num_dims - dim == 3 and len(last) == 1 and last <= _CHANNELS:
            channels_last = self._with_channels_last(*last)
            if channels_last is not None and not _differ_in_channels(shapes, dim):
                return f"Use {channels_last!r} or List()."
        advice = f"{_make_equal(shapes, dim)} List()"
        if self._padding.num_dims is None and self.size_divisor == 1:
            advice += f" or {replace(self, dims=num_dims - dim)!r}"
        return f"{advice}."

    def _check_padded(
        self, samples: Sequence[torch.Tensor], dims: int, name: plan.Name
    ) -> None:
        """Raise if a sample is padded, but its dtype cannot hold the value."""
        shapes = [sample.shape for sample in samples]
        padded = plan.plan_stack(shapes, dims, name, self._padding).padded
        for i, sample in enumerate(samples):
            if padded[i] and not _can_hold(sample.dtype, self.value):
                raise with_advice(
                    BatchValueError,
                    f"{name(i)} must have a padding_value that {sample.dtype} can "
                    f"hold, but has {self.value!r}.",
                )

    def _check_channels(self, images: Sequence[torch.Tensor], path: Path) -> None:
        """Raise if the channels of PIL images, their last dimension, are padded."""
        channels = images[0].shape[2:]
        for i, image in enumerate(images):
            if image.shape[2:] != channels:
                raise BatchValueError(
                    f"{sample_path(path, i)} must have the channels of "
                    f"{sample_path(path, 0)}, but has shape {tuple(image.shape)} where "
                    f"{tuple(images[0].shape)} was expected. Convert the PIL images to "
                    'one mode, as with convert("RGB").'
                )
        divisor = (
            self.size_divisor
            if isinstance(self.size_divisor, int)
            else self.size_divisor[-1]
        )
        targets = [each[-1] for each in (self.shape, *self.buckets) if each]
        for num in channels:
            if num % divisor or any(target != num for target in targets):
                advised = self._with_channels_last(num)
                advice = _KEEP_LIST if advised is None else f"Use {advised!r}."
                raise BatchValueError(
                    f"{sample_path(path, 0)} must keep the {num} channels of a PIL "
                    f"image, its last dimension, but Pad would pad them. {advice}"
                )

    def _with_channels_last(self, channels: int) -> Pad | None:
        """Return the rule that pads height and width, before the channels."""
        if self._padding.num_dims == 1:
            return None
        divisor, side = self.size_divisor, self.side
        if isinstance(divisor, int):
            divisor = (divisor, divisor)
        return replace(
            self,
            dims=3,
            size_divisor=1 if set(divisor) == {1} else (*divisor[:2], 1),
            shape=self.shape and (*self.shape[:2], channels),
            buckets=tuple((*each[:2], channels) for each in self.buckets),
            side=side if isinstance(side, str) else (*side[:2], "right"),
        )


_set = object.__setattr__
_NO_OPTIONS = Padding()

#: The integers that torch can add.
_INDEX_DTYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_INTEGERS = _INDEX_DTYPES | {torch.uint16, torch.uint32, torch.uint64}


def _can_hold(dtype: torch.dtype, value: Any) -> bool:
    """Return False for a value that F.pad changes by its conversion to the dtype."""
    if dtype == torch.bool:
        return bool(value == 1)
    if dtype not in _INTEGERS or isinstance(value, numbers.Integral):
        return True
    return bool(value % 1 == 0)


@dataclass(frozen=True, slots=True, repr=False)
class Concat(Rule):
    """Concatenate values without padding.

    The result is a `Ragged`. With another ``dim`` than 0 it is a tensor without
    offsets. An empty list, a tensor of shape ``(0,)`` and an empty array of objects
    have zero rows of the other values.

    Args:
        dim: the dimension along which values are concatenated.
        index_of: the dotted name of another field, with the rule ``Concat()``. The
            values are indices of its rows, so the number of its rows in all earlier
            samples is added to them, as torch_geometric adds it to ``edge_index``.

    Raises:
        TypeError: ``dim`` is not an integer, or ``index_of`` is not a string.

    Example:
        >>> batch = Collate(boxes=Concat())([{"boxes": [[1, 2]]}, {"boxes": []}])
        >>> batch
        {'boxes': Ragged(values=(1, 2), dtype=torch.int64, device=cpu, offsets=(3,))}
        >>> batch["boxes"].offsets
        tensor([0, 1, 1])
    """

    dim: int = 0
    index_of: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not hasattr(self.dim, "__index__"):
            raise BatchTypeError(
                f"Concat: dim must be an integer, but is {self.dim!r} "
                f"({type_name(self.dim)})."
            )
        _set(self, "dim", operator.index(self.dim))
        if not isinstance(self.index_of, str | None):
            raise BatchTypeError(
                "Concat: index_of must be the name of a field, but is "
                f"{self.index_of!r} ({type_name(self.index_of)})."
            )

    def _batch(self, column: list[Any], path: Path) -> Ragged:
        """Return a `Ragged` whose samples lie along ``dim``."""
        samples = _as_tensors(column, path, self.dim)
        for i, sample in enumerate(samples if self.index_of is not None else ()):
            if sample.dtype not in _INDEX_DTYPES:
                raise BatchTypeError(
                    f"{sample_path(path, i)} must have integers, the indices of rows "
                    f"of {self.index_of!r}, but has {sample.dtype}. Convert it to "
                    "torch.int64."
                )
        return join_samples(samples, lambda i: sample_path(path, i), self.dim)

    def count_rows(self, indices: Ragged, rows: Ragged, name: str) -> None:
        """Add the rows of all earlier samples to new indices of these rows.

        Args:
            indices: the result of `_batch` for the field ``name``; it is changed.
            rows: the field ``index_of``.
            name: the dotted name of the indices, for an error.
        """
        values, last = indices.values, rows.values.shape[0] - 1
        if last > torch.iinfo(values.dtype).max:
            raise BatchValueError(
                f"Collate, {self!r}: {name!r} must have a dtype that can hold {last}, "
                f"the last row of {self.index_of!r} in the batch, but has "
                f"{values.dtype}. Convert the samples to torch.int64."
            )
        shape = [1] * values.dim()
        shape[self.dim] = -1
        total = values.shape[self.dim]
        before = rows.offsets[:-1].to(indices.offsets.device)
        values += for_each_row(before, indices.offsets, total).view(shape)


@dataclass(frozen=True, slots=True, repr=False)
class List(Rule):
    """Keep the values of any type in a list, without copies.

    Example:
        >>> Collate(caption=List())([{"caption": "a cat"}, {"caption": "two dogs"}])
        {'caption': ['a cat', 'two dogs']}
    """

    def _batch(self, column: list[Any], path: Path) -> list[Any]:
        return column


# Pickles name the public path, so they do not depend on the layout of the package.
for _rule in (Stack, Pad, Concat, List):
    _rule.__module__ = "pyparallel"

_PADS = {each.name: f"Use Pad({each.name}=...)." for each in fields(Pad) if each.init}
_PADS["dtype"] = "Convert the samples, or use scatter(dtype=...)."
checked_options(Pad, other_names={"divisor": "size_divisor"})
for _rule in (Stack, Concat, List):
    checked_options(_rule, _PADS)


def apply_rule(rule: Rule, column: list[Any], path: Path) -> Any:
    """Return the values at ``path`` of every sample as one value.

    Raises:
        TypeError, ValueError: the message names the rule, the field and the sample.
    """
    try:
        return rule._batch(column, path)
    except (BatchTypeError, BatchValueError) as error:
        problem = problem_of(error)
        text = str(error)
        if problem is not None:
            text = f"{problem} {rule._advise(convert(column))}"
        raise type(error)(f"Collate, {rule!r}: {text}") from error.__cause__


def convert(column: Sequence[Any], dim: int = 0) -> list[Any]:
    """Convert arrays, PIL images, numbers and lists of numbers to tensors.

    Other values are kept. An empty list, or an empty array of objects, gets the dtype
    of the first tensor, and its sizes in all dimensions but ``dim``. Lists of empty
    lists get this dtype, too.
    """
    given = stack.as_tensors(column)
    lists = [each for each in given if isinstance(each, list | tuple)]
    # One look at all items is cheaper than one at each list.
    nested = not set(map(type, chain.from_iterable(lists))).issubset(NUMBER_DTYPES)
    values = [
        value if nested and _is_kept(value) else _as_tensor(value) for value in given
    ]
    # Lists of empty lists have no dtype of their own.
    blank = [
        nested and isinstance(before, list | tuple) and _has_no_values(value)
        for before, value in zip(given, values, strict=True)
    ]
    found = zip(values, blank, strict=True)
    tensors = (each for each, is_blank in found if not is_blank)
    like = next((x for x in tensors if isinstance(x, torch.Tensor)), torch.empty(0))
    return [
        without_rows(like, dim)
        if _has_no_items(value)
        else value.to(like.dtype)
        if is_blank
        else value
        for value, is_blank in zip(values, blank, strict=True)
    ]


def _as_tensor(value: Any) -> Any:
    if isinstance(value, list | tuple) and not value:
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)  # as Stack does
    if isinstance(value, list | tuple | int | float) or _is_of_numpy(value):
        try:
            return torch.as_tensor(value)
        except Exception:  # an item of a list may have a class that raises any error
            return value
    return value


def _has_no_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.numel()


def _has_no_items(value: Any) -> bool:
    """Return True for an empty list, and for an empty array of objects."""
    if isinstance(value, list | tuple):
        return not value
    return _is_of_numpy(value) and getattr(value, "size", 1) == 0


def _is_kept(value: Any) -> bool:
    """Return True for nested lists with tensors or masked arrays, or with themselves.

    torch would drop the gradients and masks.
    """
    try:
        return _has_tensor(value)
    except RecursionError:
        return True


def _has_tensor(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(each, torch.Tensor) or stack.is_masked(each) or _has_tensor(each)
        for each in value
    )


def _is_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _as_tensors(column: list[Any], path: Path, dim: int = 0) -> list[torch.Tensor]:
    """Return the values as tensors; raise an error that names the first other value."""
    if set(map(type, column)) == {torch.Tensor}:
        return column
    stack.check_masks(column, lambda i: sample_path(path, i))
    samples = convert(column, dim)
    for i, sample in enumerate(samples):
        if not isinstance(sample, torch.Tensor):
            raise with_advice(
                BatchTypeError,
                f"{sample_path(path, i)} must be a tensor, a numeric array, a PIL "
                "image, a number or a list of numbers of equal lengths, but is "
                f"{_found(sample)}.",
            )
    return samples


def _found(value: Any) -> str:
    """Return the type of a value for a message, or that it is a list of strings."""
    if isinstance(value, list | tuple) and value:
        inner = value[0] if isinstance(value[0], list) else value
        if inner and all(isinstance(each, str) for each in inner):
            of = "strings" if inner is value else "lists of strings"
            return f"a {type_name(value)} of {of}"
    return type_name(value)


def is_fields(value: Any) -> bool:
    """Return True for a container whose items are fields: not a list."""
    if isinstance(value, DataContainer | str | bytes):
        return False
    if isinstance(value, Mapping | tuple) or pytree.has_fields(value):
        return True
    return pytree.is_keyed(value)


def advise_rules(samples: Sequence[Any]) -> str:
    """Return advice with the rules that can batch these values."""
    shapes = _shapes(samples)
    if shapes is None:
        if any(isinstance(each, DataContainer) for each in samples):
            return (
                "Return the value without DataContainer from the data set, or use the "
                "function collate."
            )
        fields_of = next((each for each in samples if is_fields(each)), None)
        if fields_of is not None:
            return "Give rules to its fields by dotted names, or use List()."
        return _KEEP_LIST
    lengths = {len(shape) for shape in shapes}
    if len(lengths) > 1:
        if rest_beside_empty(shapes) is not None:
            return "Use Concat() or List()."
        return _KEEP_LIST
    dim = _first_difference(shapes)
    if dim is None:
        return "Use Stack() or List()."
    rules = f"Pad(dims={len(shapes[0]) - dim})"
    if len({shape[1:] for shape in shapes}) == 1:
        rules += ", Concat()"
    start = _make_equal(shapes, dim) if _differ_in_channels(shapes, dim) else "Use"
    return f"{start} {rules} or List()."


def _shapes(samples: Sequence[Any]) -> list[torch.Size] | None:
    """Return the shapes of the samples; None if one of them is no dense tensor."""
    if not all(isinstance(x, torch.Tensor) and not x.is_nested for x in samples):
        return None
    return [each.shape for each in samples]


def _differ_in_channels(shapes: Sequence[torch.Size], dim: int) -> bool:
    """Return True if the first different dimension can be the channels of images."""
    return len(shapes[0]) - dim == 3 and _CHANNELS.issuperset(
        shape[dim] for shape in shapes
    )


def _make_equal(shapes: Sequence[torch.Size], dim: int) -> str:
    """Return the advice for samples that must be equal in a dimension."""
    images = _differ_in_channels(shapes, dim)
    example = ' (colour images: convert("RGB"))' if images else ""
    return f"Make the samples equal in dimension {dim}{example}, or use"


def _first_difference(shapes: Sequence[torch.Size]) -> int | None:
    """Return the first dimension that differs; None if all shapes are equal."""
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if len(set(sizes)) > 1:
            return dim
    return None
