"""The class `DataContainer`: a value with the instructions for batching it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch

from .. import backend
from ..backend.plain import PLAIN
from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    NoDataError,
    called_by_user,
    has_warned,
    type_name,
    warn_once,
)
from . import pytree
from .padding import MOST_PAD_DIMS, Padding, check_num_dims

_TensorFunction = Callable[[torch.Tensor], torch.Tensor]
_STATE = ("_data", "_stack", "_padding_value", "_cpu_only", "_pad_dims")


class DataContainer:
    """Hold one field of a sample or of a batch, and the instructions for batching it.

    The flags select the rule of `collate`:

    * ``cpu_only``: values are kept in lists and never leave the host (metadata);
    * ``stack``: tensors are padded to a common shape and stacked;
    * ``ragged``: tensors are joined along dimension 0 without padding, see `Ragged`;
    * no flag: tensors are kept in lists, one list for each device.

    Args:
        data: any object; a tensor if ``stack`` is set.
        stack: pad and stack this field.
        padding_value: the number written into the padding of this sample. An integer
            dtype of ``data`` gets exactly this number. For another dtype it is
            converted as ``torch.nn.functional.pad`` does.
        cpu_only: keep this field on the host.
        pad_dims: the number of trailing dimensions that may differ between samples and
            are padded at their end: 1, 2 or 3; None if all shapes are equal.
        padding: the target shape and the sides of the padding, and whether to return
            sizes and a mask; the same for all samples. With it a sample may also have
            exactly ``pad_dims`` dimensions, as tokens have.
        ragged: keep this field ragged in one tensor; samples differ in dimension 0.

    Raises:
        TypeError: ``pad_dims`` is not an integer, or ``padding`` is not a `Padding`.
        ValueError: ``pad_dims`` is not None, 1, 2 or 3 (an ``AssertionError`` too);
            ``padding`` without ``stack`` or for another number of dimensions;
            ``ragged`` together with ``stack`` or ``cpu_only``.

    The five positional arguments, the attributes and, without the keyword arguments,
    the pickled state are those of mmcv 1.x. So pickles of mmcv's containers load here.
    `to`, `pin_memory`, indexing and iteration are additions. They let a container pass
    through ``DataLoader(pin_memory=True)``, accelerate and Lightning.

    Example:
        >>> DataContainer(torch.zeros(3, 4, 5), stack=True).size()
        torch.Size([3, 4, 5])
    """

    # Instances have these attributes only if they are set, so that the pickled state
    # is otherwise that of mmcv.
    _padding: Padding | None = None
    _ragged: bool = False
    # True if there are several chunks because `collate` got no samples_per_gpu.
    _has_default_chunks: bool = False

    def __init__(
        self,
        data: Any,
        stack: bool = False,
        padding_value: float = 0,
        cpu_only: bool = False,
        pad_dims: int | None = 2,
        *,
        padding: Padding | None = None,
        ragged: bool = False,
    ) -> None:
        _check_pad_dims(pad_dims)
        if padding is not None:
            _check_padding(padding, stack, cpu_only, pad_dims)
            self._padding = padding
        if ragged:
            _check_ragged(stack, cpu_only)
            self._ragged = True
        self._data = data
        self._cpu_only = cpu_only
        self._stack = stack
        self._padding_value = padding_value
        self._pad_dims = pad_dims

    @property
    def data(self) -> Any:
        """The value; in a batch, the list of chunks.

        ``(images,) = batch["img"].data`` returns the only chunk, and raises if the
        batch has several.
        """
        # A subclass of list could warn at [0] only, but torch's pytree would not treat
        # it as a list. So every read of the list warns.
        if self._has_default_chunks:
            self._warn_about_chunks()
        return self._data

    @property
    def datatype(self) -> type | str:
        """The type; for a tensor its legacy name, such as ``'torch.FloatTensor'``."""
        if isinstance(self._data, torch.Tensor):
            return self._data.type()
        return type(self._data)

    @property
    def cpu_only(self) -> bool:
        """Whether the value stays on the host."""
        return self._cpu_only

    @property
    def stack(self) -> bool:
        """Whether samples are padded and stacked."""
        return self._stack

    @property
    def padding_value(self) -> float:
        """The number that is written into the padding."""
        return self._padding_value

    @property
    def pad_dims(self) -> int | None:
        """The number of padded trailing dimensions, or None."""
        return self._pad_dims

    @property
    def padding(self) -> Padding | None:
        """The padding of these dimensions; None is the same as ``Padding()``."""
        return self._padding

    @property
    def ragged(self) -> bool:
        """Whether samples are joined along dimension 0 without padding."""
        return self._ragged

    def size(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``data.size(*args, **kwargs)``.

        Raises:
            AttributeError: the data is not a tensor.
        """
        return self._tensor_attribute("size")(*args, **kwargs)

    def dim(self) -> int:
        """Return the number of dimensions of the tensor inside.

        Raises:
            AttributeError: the data is not a tensor.
        """
        return int(self._tensor_attribute("dim")())

    def to(
        self, device: torch.device | str | int, non_blocking: bool = False
    ) -> DataContainer:
        """Return a container with every tensor inside on ``device``.

        A ``cpu_only`` container is returned unchanged. Nested lists, tuples, dicts,
        dataclasses and containers are walked; other values are kept by reference.

        Stream: copies are queued on the current stream of ``device``. With
        ``non_blocking`` the source must be pinned, and must stay alive until the copies
        are done.
        """
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self, device: Any = None) -> DataContainer:
        """Return a container with every CPU tensor inside in pinned memory.

        ``torch.utils.data.DataLoader(pin_memory=True)`` calls this method. A
        ``cpu_only`` container is returned unchanged.

        Args:
            device: ignored; some torch versions pass it.

        Raises:
            RuntimeError: torch finds no accelerator to pin memory for.
        """
        return self._map(lambda leaf: leaf.pin_memory() if leaf.is_cpu else leaf)

    def __getitem__(self, index: Any) -> Any:
        """Return ``data[index]``."""
        if self._has_default_chunks:
            self._warn_about_chunks()
        return self._data[index]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the data."""
        return iter(self._data)

    def __len__(self) -> int:
        """Return ``len(data)``; raise TypeError if the data has no length."""
        return len(self._data)

    def __bool__(self) -> bool:
        """Return True if the data has items, or has no length."""
        try:
            return len(self._data) > 0
        except TypeError:
            return True

    def __repr__(self) -> str:
        """Show the data."""
        return f"{type(self).__name__}({self._data!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled container of this class or of mmcv 1.x.

        Raises:
            TypeError: the state is not a dict, or its ``pad_dims`` not an integer.
            ValueError: the state lacks an attribute or has an impossible ``pad_dims``.
        """
        if not isinstance(state, dict):
            raise BatchTypeError(
                "the pickled state of a DataContainer must be a dict, but is "
                f"{type_name(state)}."
            )
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise BatchValueError(
                f"the pickled state of a DataContainer must have {', '.join(_STATE)}, "
                f"but lacks {', '.join(missing)}."
            )
        _check_pad_dims(state["_pad_dims"])
        stack, cpu_only = state["_stack"], state["_cpu_only"]
        if state.get("_padding") is not None:
            _check_padding(state["_padding"], stack, cpu_only, state["_pad_dims"])
        if state.get("_ragged"):
            _check_ragged(stack, cpu_only)
        self.__dict__.update(state)

    def _with_chunks(self, chunks: list[Any], *, is_default: bool) -> DataContainer:
        """Return the container of a batch, with the flags of this container.

        It has the default ``pad_dims``, as in mmcv, since its tensors are padded.

        Args:
            chunks: the data of the batch.
            is_default: True if `collate` got no samples_per_gpu.
        """
        result = object.__new__(DataContainer)
        result._data, result._pad_dims = chunks, 2
        result._cpu_only, result._stack = self._cpu_only, self._stack
        result._padding_value = self._padding_value
        if self._ragged:
            result._ragged = True
        if is_default and len(chunks) > 1:
            result._has_default_chunks = True
        return result

    def _warn_about_chunks(self) -> None:
        """Warn if user code reads the data; call it directly from the read method."""
        if has_warned("PP104") or not called_by_user(2):
            return
        num = len(self._data)
        warn_once(
            "PP104",
            "DataContainer: a batch should have one chunk for each device, but has "
            f"{num} chunks of 1 sample, because collate got no samples_per_gpu. "
            f"data[0] is 1 sample of {num}. For one device use partial(collate, "
            f"samples_per_gpu={num}), or collate_fn=collate in pyparallel.DataLoader. "
            "Pass samples_per_gpu=1 to keep these chunks.",
        )

    def _tensor_attribute(self, name: str) -> Any:
        if not isinstance(self._data, torch.Tensor):
            raise AttributeError(
                f"DataContainer has no attribute {name} for type {self.datatype}"
            )
        return getattr(self._data, name)

    def _map(self, function: _TensorFunction, depth: int = 0) -> DataContainer:
        """Return a container of the same class with ``function`` on every tensor."""
        if self._cpu_only:
            return self
        if depth > pytree.MAX_DEPTH:
            raise pytree.nesting_error("the batch")
        result = object.__new__(type(self))
        result.__dict__.update(self.__dict__)
        result._data = map_tensors(function, self._data, depth + 1)
        return result


# Pickles name the public path, so they do not depend on the layout of the package.
DataContainer.__module__ = "pyparallel"


def map_tensors(function: _TensorFunction, tree: Any, depth: int = 0) -> Any:
    """Apply ``function`` to the tensors of ``tree`` outside ``cpu_only`` containers."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, DataContainer):
            return leaf._map(function, depth)
        return function(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.map_leaves(apply, tree)


def _check_pad_dims(pad_dims: int | None) -> None:
    if pad_dims is None:
        return
    rule = "DataContainer: pad_dims must be None, 1, 2 or 3, but is"
    try:
        value = operator.index(pad_dims)
    except TypeError:
        raise BatchTypeError(f"{rule} {pad_dims!r} ({type_name(pad_dims)}).") from None
    if not 1 <= value <= MOST_PAD_DIMS:
        raise BatchValueError(f"{rule} {pad_dims!r}.")


def _check_padding(
    padding: Any, stack: bool, cpu_only: bool, pad_dims: int | None
) -> None:
    if not isinstance(padding, Padding):
        raise BatchTypeError(
            f"DataContainer: padding must be a Padding, but is {padding!r} "
            f"({type_name(padding)})."
        )
    if not stack or cpu_only:
        raise BatchValueError(
            "DataContainer: padding must come with stack=True and cpu_only=False, but "
            f"stack is {stack} and cpu_only {cpu_only}."
        )
    if pad_dims is None:
        raise BatchValueError(
            "DataContainer: pad_dims must be 1, 2 or 3 with a padding, but is None."
        )
    check_num_dims(padding, operator.index(pad_dims), "DataContainer")


def _check_ragged(stack: bool, cpu_only: bool) -> None:
    if stack or cpu_only:
        raise BatchValueError(
            "DataContainer: ragged must not come with stack or cpu_only, but stack is "
            f"{stack} and cpu_only {cpu_only}. Choose one of the three."
        )


# --- A batch without the tensors that are being moved.


_is_meta = operator.attrgetter("is_meta")


def check_data(
    tensors: list[torch.Tensor],
    batch: Any,
    where: str,
    cause: Exception | None = None,
) -> None:
    """Raise ValueError if one of the tensors that are copied has no data.

    Args:
        tensors: the tensors of the batch that are copied.
        batch: the batch.
        where: the name of the batch in the error.
        cause: the error of torch, or None.
    """
    if any(map(_is_meta, tensors)):
        reason = "" if cause is None else f" ({cause})"
        raise NoDataError(
            f"{name_of(batch, where, _is_meta)} must have data to be copied, but is on "
            f"the meta device{reason}. Give it data first, or leave it out of the "
            "batch."
        ) from cause


def name_of(
    batch: Any, where: str, is_meant: Callable[[torch.Tensor], bool]
) -> str | None:
    """Return the name of the first such tensor of a batch, which is named ``where``."""
    leaves, structure = pytree.flatten(batch)
    for i, leaf in enumerate(leaves):
        name = pytree.accessors(structure)[i].codify(where)
        if isinstance(leaf, DataContainer):
            if leaf.cpu_only:
                continue
            inside = name_of(leaf._data, f"{name}.data", is_meant)
            if inside is not None:
                return inside
        elif isinstance(leaf, torch.Tensor) and is_meant(leaf):
            return name
    return None


_dense_nbytes = operator.attrgetter("nbytes")
_PLACEHOLDER = torch.empty(0, device="cpu")


class TensorSkeleton:
    """A batch, with placeholders for the tensors that are moved.

    Args:
        batch: any containers; the content of ``cpu_only`` DataContainers is not moved.
        is_moved: returns True for the tensors that are moved. The result depends only
            on the device of the tensor.

    Attributes:
        tensors: the tensors that are moved, in the order of the batch.
    """

    _nbytes: Callable[[torch.Tensor], int]
    _insert: Callable[[list[torch.Tensor]], Any]

    def __init__(self, batch: Any, is_moved: Callable[[torch.Tensor], bool]) -> None:
        # A skeleton may be kept for long, so it must not keep the tensors alive.
        leaves, structure, classes = pytree.flatten_arguments(batch, 0)
        self._structure = structure
        if are_only_tensors(classes):
            tensors = backend.select_tensors(leaves)
            if backend.are_on_one_device(tensors) and is_moved(tensors[0]):
                self.tensors: list[torch.Tensor] = tensors
                self._nbytes = _dense_nbytes
                held = [_PLACEHOLDER] * len(tensors)
                rest = backend.replace_tensors(leaves, held)
                self._insert = lambda tensors: pytree.unflatten(
                    structure, backend.replace_tensors(rest, tensors)
                )
                return
        self.tensors = []

        def extract(tensor: torch.Tensor) -> torch.Tensor:
            if not is_moved(tensor):
                return tensor
            self.tensors.append(tensor)
            return _PLACEHOLDER

        self._nbytes = _nbytes
        self._insert = partial(_insert, map_tensors(extract, batch))

    @property
    def nbytes(self) -> int:
        """The bytes of ``tensors``."""
        return sum(map(self._nbytes, self.tensors))

    @property
    def key(self) -> Any:
        """A hashable value, equal for batches with the same paths."""
        return pytree.key_of(self._structure)

    def take_tensors(self) -> list[torch.Tensor]:
        """Return the tensors and drop the references to them."""
        taken, self.tensors = self.tensors, []
        return taken

    def restore(self, tensors: list[torch.Tensor]) -> Any:
        """Return the batch with these tensors in place of the moved ones."""
        return self._insert(tensors)


def _insert(batch: Any, tensors: list[torch.Tensor]) -> Any:
    remaining = iter(tensors)

    def insert(tensor: torch.Tensor) -> torch.Tensor:
        return next(remaining) if tensor is _PLACEHOLDER else tensor

    return map_tensors(insert, batch)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def are_only_tensors(classes: Collection[type]) -> bool:
    """Return True if no leaf of these classes holds tensors or is a special tensor."""
    special = (torch.Tensor, DataContainer)
    return PLAIN.issuperset(classes) or not any(
        issubclass(each, special) and each not in PLAIN for each in classes
    )
