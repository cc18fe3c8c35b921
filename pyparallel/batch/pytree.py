"""Flatten nested containers to a list of leaves and a structure, and rebuild them.

The backend walks nested containers of the exact types dict, list and tuple. optree
walks all others. optree must know the exact type of a container, so subclasses of dict
and list, other mappings and dataclasses are registered at their first occurrence. Every
later walk runs in compiled code. Both walks visit the keys of a dict in sorted order,
so the leaves of a batch have the same order in both.

Containers are dict, list, tuple, namedtuple, deque, OrderedDict, defaultdict, other
mappings, subclasses of list and tuple, and instances of dataclasses, of attrs classes
and of pydantic models. Classes that another
library has registered with optree or ``torch.utils._pytree``, such as TensorDict, are
containers too: that library splits and rebuilds them. All other values are leaves:
tensors, arrays, strings, bytes, ``None``, ``range``, ``torch.Size``, DataContainers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from .. import backend
from ..core import fork_locks
from ..core.errors import BatchValueError, Field
from ..core.torch_private import pytree as _pytree

if TYPE_CHECKING:
    from ..backend._C import Structure as _Structure

    #: Structures compare by value; the order of the keys in a dict does not matter.
    Structure = optree.PyTreeSpec | _Structure

_NAMESPACE = "pyparallel"

#: The maximum depth of nested containers. A deeper nest is nearly always a cycle.
MAX_DEPTH = 64

# The result of a split for optree: children, argument of the join, steps of the paths.
_Split = tuple[tuple[Any, ...], Any, tuple[Any, ...] | None]

#: Held while classes are registered.
registration_lock: Any = fork_locks.free_in_children(threading.Lock())
# Known classes of leaves, and the classes of containers registered by this module.
_leaf_types: set[type] = {type(None), str, bytes, int, float, bool, torch.Size}
_registered: set[type] = set()
_CONTAINERS = (dict, list, tuple, deque, UserDict)


class Flat(NamedTuple):
    """The leaves of a batch, its structure, and the classes of the leaves."""

    leaves: list[Any]
    structure: Structure
    classes: Collection[type]

    @property
    def is_native(self) -> bool:
        """Return True if the backend walked the batch, and not optree."""
        return not isinstance(self.structure, optree.PyTreeSpec)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of ``tree`` and its structure.

    Dictionaries are walked in the order of their sorted keys, or of insertion if a
    comparison of keys fails. ``unflatten`` restores the order of insertion.

    Raises:
        ValueError: a container contains itself, or the nest is hundreds deep.
    """
    leaves, structure, _ = _flatten(tree, 0)
    return leaves, structure


def flatten_arguments(tree: Any, roots: int) -> Flat:
    """Flatten arguments, as `flatten`; the empty containers in them are leaves.

    These are the items of an argument and, unless that is a list, the values of dicts
    among these. A search of all containers would take longer than their walk.

    Args:
        tree: an argument, or a tuple of arguments.
        roots: 1 for an argument, 2 for a tuple of arguments; 0: no empty container is
            a leaf.

    Raises:
        ValueError: as `flatten`.
    """
    flat = _flatten(tree, roots)
    if roots == 0 or not isinstance(flat.structure, optree.PyTreeSpec):
        return flat
    held = _hold_empty(tree) if roots == 1 else _hold_items(tree)
    if held is None:
        return flat
    leaves, structure = flatten(held)
    leaves = [each.value if type(each) is _Held else each for each in leaves]
    return Flat(leaves, structure, set(map(type, leaves)))


def copy_compact(
    tree: Any, roots: int, on_cpu: bool
) -> tuple[Any, Collection[type]] | None:
    """Return new containers around the same leaves, and the leaves' classes, or None.

    None means that the caller has to flatten the tree: a tensor may need a copy on the
    host, or optree has to walk it.

    Args:
        tree: as for `flatten_arguments`.
        roots: as for `flatten_arguments`.
        on_cpu: whether tensors of other devices need a copy.
    """
    return backend.copy_compact(tree, _leaf_types, roots, on_cpu)


def _flatten(tree: Any, roots: int) -> Flat:
    """Flatten a tree. Only the backend's walk holds empty containers.

    torch.compile cannot trace the walks of the backend and of optree.
    """
    if torch.compiler.is_compiling():
        flat: Flat = torch.compiler.disable(_flatten_eagerly)(tree, roots)
        return flat
    return _flatten_eagerly(tree, roots)


def _flatten_eagerly(tree: Any, roots: int) -> Flat:
    while True:
        flat = backend.flatten(tree, _leaf_types, roots)
        if flat is not None:
            return Flat(*flat)
        # The result is valid only if no thread registers a class during the walk.
        num_registered = len(_registered)
        try:
            leaves, structure = _walk(tree)
        except RecursionError:
            raise nesting_error("the batch") from None
        except Exception:  # of keys that cannot be sorted
            with optree.dict_insertion_ordered(True, namespace=_NAMESPACE):
                leaves, structure = _walk(tree)
        classes = {type(leaf): leaf for leaf in leaves}
        unknown = [each for cls, each in classes.items() if cls not in _leaf_types]
        for leaf in unknown:
            _register_container(leaf)
        # Repeat after new classes: the backend may know all leaf types of the tree now.
        if not unknown and len(_registered) == num_registered:
            return Flat(leaves, structure, classes)


def _walk(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)


def is_empty(value: Any) -> bool:
    """Return True for a container without items."""
    return isinstance(value, _CONTAINERS) and not value


class _Held:
    """An empty container that is a leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hold_empty(tree: Any) -> Any:
    """Return a flattened argument with its empty containers held, or None.

    None means that none of those that `flatten_arguments` names is empty.
    """
    cls = type(tree)
    if cls is not dict and cls is not list and cls is not tuple:
        return None
    values = tree.values() if cls is dict else tree
    kinds = set(map(type, values))
    if kinds <= _leaf_types or (cls is list and kinds == {dict} and all(values)):
        return None
    held = [
        _Held(value)
        if is_empty(value)
        else _hold_empty(value)
        if type(value) is dict and cls is not list
        else None
        for value in values
    ]
    if not any(held):
        return None
    items = [v if h is None else h for v, h in zip(values, held, strict=True)]
    return dict(zip(tree, items, strict=True)) if cls is dict else cls(items)


def _hold_items(trees: tuple[Any, ...]) -> tuple[Any, ...] | None:
    held = [_hold_empty(tree) for tree in trees]
    if not any(each is not None for each in held):
        return None
    return tuple([v if h is None else h for v, h in zip(trees, held, strict=True)])


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Rebuild the containers of ``structure`` around ``leaves``."""
    return structure.unflatten(leaves)


def key_of(structure: Structure) -> Any:
    """Return a hashable value, which is equal for structures with the same paths.

    optree's structures may hold the containers of the batch, which are not hashable.
    """
    if isinstance(structure, optree.PyTreeSpec):
        return tuple(structure.paths())
    return structure


def accessors(structure: Structure) -> list[optree.PyTreeAccessor]:
    """Return the paths of all leaves. This is slow; use it for messages only."""
    if not isinstance(structure, optree.PyTreeSpec):
        tree = structure.unflatten([None] * structure.num_leaves)
        structure = optree.tree_structure(tree, none_is_leaf=True)
    return structure.accessors()


def find_container(structure: Structure, cls: type) -> int | None:
    """Return the index of the first leaf inside a container of exactly this class.

    This visits every container, so do not call it for every batch.
    """
    if not isinstance(structure, optree.PyTreeSpec):
        return None  # such trees contain only dict, list and tuple
    if structure.type is cls:
        return 0
    before = 0
    for child in structure.children():
        found = find_container(child, cls)
        if found is not None:
            return before + found
        before += child.num_leaves
    return None


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a new tree with ``function`` applied to every leaf."""
    leaves, structure = flatten(tree)
    return unflatten(structure, map(function, leaves))


def nesting_error(where: str) -> BatchValueError:
    """Return the error for containers that are nested too deeply or in a cycle."""
    return BatchValueError(
        f"{where} must nest its containers at most {MAX_DEPTH} deep, but it nests "
        "deeper. Look for a container that contains itself."
    )


def is_namedtuple(value: object) -> bool:
    """Return True for an instance of a namedtuple class."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def field_names(cls: type) -> list[str] | None:
    """Return the fields of a dataclass, an attrs class or a pydantic model, or None."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    if hasattr(cls, "__attrs_attrs__"):
        return [field.name for field in cls.__attrs_attrs__]
    names = getattr(cls, "__pydantic_fields__", None)  # of models; since pydantic 2.10
    return None if names is None else list(names)


def has_fields(value: object) -> bool:
    """Return True for an instance of a class with `field_names`; False for a class."""
    return not isinstance(value, type) and field_names(type(value)) is not None


def is_keyed(value: object) -> bool:
    """Return True for an object with the methods of a mapping, but another base class.

    Examples are ``Data`` of torch_geometric, and rows of pandas.
    """
    cls = type(value)
    keyed = hasattr(cls, "keys") and hasattr(cls, "__getitem__")
    return keyed and not isinstance(value, Mapping)


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the items of an object with the methods of a mapping."""
    return {key: value[key] for key in value.keys()}


def rebuild_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items`` in the type of ``like``, or unchanged if it takes no dict."""
    cls: Any = type(like)
    if cls is dict:
        return items
    try:
        if isinstance(like, defaultdict):
            return cls(like.default_factory, items)
        return items if _makes_other_items(cls) else cls(items)
    except Exception:  # a constructor may raise any error
        return items


@functools.cache
def _makes_other_items(cls: Any) -> bool:
    """Return True if the constructor takes a dict as one of its values, or drops it."""
    items = {"key": object()}
    try:
        return list(cls(items).values()) in ([], [items])
    except Exception:  # the class may need other keys or values
        return False


def rebuild_sequence(like: Sequence[Any], values: list[Any]) -> Any:
    """Return ``values`` in the type of ``like``.

    They are returned unchanged if the constructor refuses a list, or drops its items.
    """
    cls: Any = type(like)
    if cls is list:
        return values
    try:
        if is_namedtuple(like):
            result = cls._make(values)
        elif isinstance(like, deque):
            result = cls(values, like.maxlen)
        else:
            result = cls(values)
        return result if len(result) == len(values) else values
    except Exception:  # as above
        return values


def rebuild_fields(like: Any, values: Iterable[Any]) -> Any:
    """Return a new instance of the class of ``like`` with its fields set to ``values``.

    These are the fields that are set in ``like``. ``__init__``, ``__post_init__`` and
    validators are not run, because their checks are for one sample and may fail for the
    fields of a batch. Frozen and slotted classes work.
    """
    cls = type(like)
    result, names = object.__new__(cls), list(field_values(like))
    if hasattr(cls, "__pydantic_fields__"):  # the slots that each model needs
        state = {"fields_set": set(names), "extra": None, "private": None}
        for slot, value in state.items():
            object.__setattr__(result, f"__pydantic_{slot}__", value)
    _set_fields(result, dict(zip(names, values, strict=True)))
    return result


def field_values(value: Any) -> dict[str, Any]:
    """Return the fields of an instance that are set, in field order, without copies."""
    cls = type(value)
    names = [*(field_names(cls) or ())]
    if hasattr(cls, "__pydantic_fields__"):  # a model may allow extra fields
        names += getattr(value, "__pydantic_extra__", None) or ()
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _set_fields(value: Any, fields: dict[str, Any]) -> None:
    """Set fields without the checks of the class."""
    own, extra = field_names(type(value)) or (), {}
    for name, each in fields.items():
        if name in own:
            object.__setattr__(value, name, each)
        else:
            extra[name] = each
    if extra:
        object.__setattr__(value, "__pydantic_extra__", extra)


class Container(NamedTuple):
    """One container: its items by path step, and the function that rebuilds it.

    The function takes other items in the same order.
    """

    items: dict[Any, Any]
    rebuild: Callable[[list[Any]], Any]


def open_container(value: Any) -> Container | None:
    """Return the items of a container, or None for any other value."""
    is_sequence = isinstance(value, list | tuple | deque)
    if not (is_sequence or isinstance(value, dict)):
        found = split_registered(value)
        if found is not None:
            children, like, registered = found
            items = dict(zip(registered or (), children, strict=True))
            return Container(items, functools.partial(join_registered, like))
    if isinstance(value, Mapping):
        items = dict(value)
        return Container(items, functools.partial(_join_mapping, value))
    if has_fields(value):
        items = {Field(name): each for name, each in field_values(value).items()}
        return Container(items, functools.partial(rebuild_fields, value))
    if is_sequence:
        items = dict(zip(sequence_steps(value), value, strict=True))
        return Container(items, functools.partial(rebuild_sequence, value))
    return None


def sequence_steps(value: Any) -> Iterable[Any]:
    """Return the path steps of a sequence: the fields of a namedtuple, or indices."""
    named = is_namedtuple(value)
    return map(Field, type(value)._fields) if named else range(len(value))


def split_registered(
    value: Any,
) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]] | None:
    """Return the children of an instance of a class in torch's pytree registry.

    Returns:
        The children, the argument of `join_registered`, and the path step of each
        child; None for an instance of any other class.
    """
    # torch leaves `is_child` in a reference cycle, which must not keep the value alive.
    whole = [value]

    def is_child(each: Any) -> bool:
        return each is not whole[0]

    try:
        found, spec = _pytree.tree_flatten_with_path(value, is_child)
    except ValueError:  # the class is registered without a function for paths
        children, spec = _pytree.tree_flatten(value, is_child)
        steps: tuple[Any, ...] = tuple(range(len(children)))
    else:
        children = [child for _, child in found]
        steps = tuple([_path_step(path[0]) if path else None for path, _ in found])
    finally:
        whole.clear()
    if len(children) == 1 and children[0] is value:
        return None
    return tuple(children), (spec, getattr(value, "batch_dims", None)), steps


def join_registered(like: tuple[Any, Any], children: Iterable[Any]) -> Any:
    """Let the library of the class build an instance with these children."""
    spec, batch_dims = like
    result: Any = _pytree.tree_unflatten(list(children), spec)
    if batch_dims is not None and result.batch_dims != batch_dims:
        result.auto_batch_size_(batch_dims)  # TensorDict guesses it from shapes
    return result


def _path_step(key: Any) -> Any:
    if isinstance(key, _pytree.GetAttrKey):
        return Field(key.name)
    return key.idx if isinstance(key, _pytree.SequenceKey) else key.key


def _register_container(value: Any) -> None:
    """Register the class of ``value`` with optree if it is a container."""
    cls = type(value)
    split: Callable[[Any], Any]
    join: Callable[[Any, Any], Any]
    if split_registered(value) is not None:
        split, join = split_registered, join_registered
    elif issubclass(cls, Mapping):
        split, join = _split_mapping, _move_mapping
    elif field_names(cls) is not None:
        split, join = _split_fields, _fields_join(cls)
    elif issubclass(cls, list | tuple):
        split, join = _split_sequence, _join_sequence
    else:
        _leaf_types.add(cls)
        return
    with registration_lock:
        if cls not in _registered:
            register: Any = optree.register_pytree_node
            register(cls, split, join, namespace=_NAMESPACE)
            _registered.add(cls)


def _split_mapping(value: Mapping[Any, Any]) -> _Split:
    return tuple(value.values()), value, tuple(value)


def _join_mapping(like: Mapping[Any, Any], children: Sequence[Any]) -> Any:
    return rebuild_mapping(like, dict(zip(like, children, strict=True)))


def _move_mapping(like: Mapping[Any, Any], children: Sequence[Any]) -> Any:
    copied = _copy_with(like, dict(zip(like, children, strict=True)))
    return _join_mapping(like, children) if copied is None else copied


def _copy_with(like: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a dict or a list with its attributes and other items, or None.

    None means that it has no attributes, or that they follow its items. ``pin_memory``
    of torch keeps attributes in the same way.
    """
    is_user = isinstance(like, UserDict)
    attributes = set(getattr(like, "__dict__", ())) - ({"data"} if is_user else set())
    if not attributes or not attributes.isdisjoint(items):
        return None
    put: Any = list.__setitem__ if isinstance(like, list) else dict.__setitem__
    with suppress(Exception):  # of the user's class, or it is neither dict nor list
        result = copy.copy(like)
        store = result.data if is_user else result
        if store is not (like.data if is_user else like):
            for key, value in items.items():
                put(store, key, value)
            if all(result[key] is value for key, value in items.items()):
                return result
    return None


def _split_fields(value: Any) -> _Split:
    fields = field_values(value)
    return tuple(fields.values()), (value, list(fields)), tuple(map(Field, fields))


def _fields_join(cls: Any) -> Callable[[Any, Iterable[Any]], Any]:
    """Return the join of a class, which keeps attributes that are no fields."""
    attributes = [
        each
        for base in cls.__mro__
        for each in vars(base).values()
        if isinstance(each, MemberDescriptorType)  # of a name in __slots__
    ]

    def join(like: tuple[Any, list[str]], children: Iterable[Any]) -> Any:
        value, names = like
        result = object.__new__(cls)
        if hasattr(value, "__dict__"):
            result.__dict__.update(value.__dict__)
        for attribute in attributes:
            with suppress(AttributeError):
                attribute.__set__(result, attribute.__get__(value))
        _set_fields(result, dict(zip(names, children, strict=True)))
        return result

    return join


def _split_packed(value: PackedSequence) -> _Split:
    names = ("data", "sorted_indices", "unsorted_indices")  # torch moves only these
    return tuple([getattr(value, name) for name in names]), value, names


def _join_packed(like: PackedSequence, children: tuple[Any, ...]) -> PackedSequence:
    data, sorted_indices, unsorted_indices = children
    return like._replace(
        data=data, sorted_indices=sorted_indices, unsorted_indices=unsorted_indices
    )


def _split_sequence(value: Sequence[Any]) -> _Split:
    return tuple(value), value, None


def _join_sequence(like: Sequence[Any], children: tuple[Any, ...]) -> Any:
    copied = _copy_with(like, dict(enumerate(children)))
    return rebuild_sequence(like, list(children)) if copied is None else copied


_register: Any = optree.register_pytree_node
with suppress(ValueError), warnings.catch_warnings():  # registered by an earlier import
    warnings.simplefilter("ignore")  # optree warns that it is a namedtuple
    _register(
        PackedSequence,
        _split_packed,
        _join_packed,
        path_entry_type=optree.GetAttrEntry,
        namespace=_NAMESPACE,
    )
