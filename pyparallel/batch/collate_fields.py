"""The class `Collate`: a collate function with a rule for each field."""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from functools import partial
from keyword import iskeyword
from typing import Any, TypeVar, overload

import torch

from ..core.errors import (
    BatchTypeError,
    BatchValueError,
    Error,
    MissingKeyError,
    add_note,
    check_int,
    format_path,
    problem_of,
    type_name,
    warn_once,
)
from ..core.tracing import span
from . import pytree
from .collate import Walk, check_is_batch, check_not_empty, open_columns
from .columns import Path, registered_collate
from .options import meant_by
from .padding import Padding
from .padding_free import TEXTS, add_arguments, padding_free_rules, with_labels
from .ragged import Ragged
from .rules import (
    Concat,
    List,
    Pad,
    Rule,
    Stack,
    advise_rules,
    apply_rule,
    convert,
    is_fields,
)

#: A rule, or a function that gets the list of the field's values.
AnyRule = Rule | Callable[[list[Any]], Any]
_Key = TypeVar("_Key")

_OPTIONS = [each.name for each in dataclass_fields(Pad) if each.init]
_RULES = "Pad(...), Stack(), Concat(), List() or a function of the list of values"


class Collate:
    """A ``collate_fn`` with a rule for each field of the samples.

    The data set returns plain values. The rules are `Pad`, `Stack`, `Concat` and
    `List`, or any function of the list of the field's values. Fields without a rule are
    batched as by `collate`, with torch's rules: tensors, arrays and numbers are
    stacked, and text becomes a list.

    Args:
        *rules: rules by position, for samples that are tuples; or one mapping of names
            or positions to rules.
        default: the rule of every other field. `List` and functions get whole fields.
            The other rules are applied to each tensor, array, number and list of
            numbers in a field, and text becomes a list.
        flatten: each item of the data set is a list of samples, such as random crops or
            views of one image. The batch has the samples of all lists.
        padding_free: the samples are texts for a model of transformers, dicts with
            ``input_ids`` and perhaps ``labels``. The batch has the arguments of a model
            without padding, as ``DataCollatorWithFlattening`` makes them.
        **fields: rules by name. A dotted name such as ``"target.boxes"`` is a field of
            a nested dict, object or tuple; an integer in it is a position. A nested
            mapping of rules has the same meaning.

    Raises:
        TypeError: a rule is neither a rule nor a function, or ``flatten`` or
            ``padding_free`` is not a bool.
        ValueError: two rules for one field, ``index_of`` names no field with the rule
            ``Concat()``, or ``padding_free`` beside another rule for its fields.

    The batch has the structure of a sample: a dict has the same keys, and a tuple
    becomes a list. It contains tensors, `Padded` (of `Pad` with ``mask`` or ``sizes``),
    `Ragged` (of `Concat`) and lists, and no chunks. Its tensors are plain, also if the
    values are of a subclass. As with `collate`, a ``DataLoader`` worker writes each
    tensor once, directly into shared memory.

    Example:
        >>> collate = Collate(image=Pad(size_divisor=4, mask=True), boxes=Concat())
        >>> batch = collate([
        ...     {"image": torch.ones(3, 5, 6), "boxes": torch.ones(2, 4), "id": 7},
        ...     {"image": torch.ones(3, 4, 7), "boxes": torch.ones(1, 4), "id": 8},
        ... ])
        >>> batch["image"].shape, batch["image"].sizes.tolist()
        (torch.Size([2, 3, 8, 8]), [[5, 6], [4, 7]])
        >>> batch["boxes"].offsets, batch["id"]
        (tensor([0, 2, 3]), tensor([7, 8]))
    """

    def __init__(
        self,
        /,
        *rules: AnyRule | Mapping[Any, Any],
        default: AnyRule | None = None,
        flatten: bool = False,
        padding_free: bool = False,
        **fields: AnyRule | Mapping[str, Any],
    ) -> None:
        self._rules: dict[str, AnyRule] = {}
        if len(rules) == 1 and isinstance(rules[0], Mapping):
            self._add("", rules[0])
        else:
            self._add("", {str(i): rule for i, rule in enumerate(rules)})
        self._add("", fields)
        self._default, self._flatten = default, flatten
        self._padding_free = padding_free
        _check_bool("flatten", flatten)
        _check_bool("padding_free", padding_free)
        if padding_free:
            self._add("", padding_free_rules(self._rules))
        if default is not None:
            _check_rule(default, "default")
            if isinstance(default, Concat) and default.index_of is not None:
                raise BatchValueError(
                    f"Collate, default={default!r}: default must be a rule without "
                    "index_of. Give each field of indices its own rule."
                )
        for name, each in self._rules.items():
            _check_index(name, each, self._rules)
        self._parents = {parent for name in self._rules for parent in _parents(name)}
        for name in sorted(self._parents.intersection(self._rules)):
            # "" is the sample, which contains all fields, and may be the name of one.
            inside = (each for each in self._rules if each.startswith(f"{name}."))
            if (inner := next(inside, None)) is None:
                continue
            raise BatchValueError(
                f"Collate: {name!r} must have one rule, but has a rule, and {inner!r} "
                "has another one. Remove one of them."
            )

    @overload
    def __call__(self, batch: Sequence[dict[_Key, Any]]) -> dict[_Key, Any]: ...
    @overload
    def __call__(self, batch: Sequence[Any]) -> Any: ...
    def __call__(self, batch: Sequence[Any]) -> Any:
        """Return the samples as one batch.

        Raises:
            TypeError: samples or values of a type that their rule cannot batch.
            ValueError: an empty batch, samples with different keys, a missing field, or
                shapes that do not fit the rule. The message names the field and the
                sample.
            RuntimeError: a tensor that requires grad in a ``DataLoader`` worker.
        """
        check_is_batch(batch, "Collate")
        check_not_empty(batch, "Collate")
        return self._of_lists(batch) if self._flatten else self._of_samples(batch)

    def _of_lists(self, batch: Sequence[Any]) -> Any:
        """Return the samples in lists as one batch."""
        places = []
        for i, samples in enumerate(batch):
            if not isinstance(samples, list | tuple) or pytree.is_namedtuple(samples):
                raise BatchTypeError(
                    f"Collate, flatten=True: batch[{i}] must be a list of samples, but "
                    f"is {type_name(samples)}. Return a list from the data set, or "
                    "remove flatten."
                )
            places += [f"batch[{i}][{k}]" for k in range(len(samples))]
        flat = list(itertools.chain.from_iterable(batch))
        check_not_empty(flat, "Collate, flatten=True")
        try:
            return self._of_samples(flat)
        except Error as error:  # it names the samples by their positions in all lists
            text = re.sub(r"\bbatch\[(\d+)]", lambda m: places[int(m[1])], str(error))
            error.args = (text,)
            raise

    def _of_samples(self, batch: Sequence[Any]) -> Any:
        if self._padding_free:
            batch = with_labels(batch)
        for name, rule in self._rules.items():
            if not _has_field(batch[0], name):
                raise _missing_field_error(batch, name, rule)
        with span("pyparallel.collate"):
            walk = _RuleWalk(self._rules, self._parents, self._default)
            result = walk.column(list(batch), ())
            for name, (rule, indices) in walk.joined.items():
                if rule.index_of is not None:
                    rule.count_rows(indices, walk.joined[rule.index_of][1], name)
            if self._padding_free:
                add_arguments(result, {x: walk.joined[x][1] for x in TEXTS})
            return result

    def __repr__(self) -> str:
        """Show the rules as Python code that creates them."""
        given = TEXTS if self._padding_free else ()
        rules = {name: rule for name, rule in self._rules.items() if name not in given}
        names = list(rules)
        if names and names == [str(i) for i in range(len(names))]:
            shown = [repr(rule) for rule in rules.values()]
        elif all(map(_is_argument, names)):
            shown = [f"{name}={rule!r}" for name, rule in rules.items()]
        else:
            shown = [repr(rules)]
        if self._default is not None:
            shown.append(f"default={self._default!r}")
        if self._flatten:
            shown.append("flatten=True")
        if self._padding_free:
            shown.append("padding_free=True")
        return f"Collate({', '.join(shown)})"

    @classmethod
    def auto(cls, dataset: Any, num_samples: int = 16) -> Collate:
        """Return a `Collate` with rules chosen from some samples of a data set.

        Numbers, and tensors and arrays of equal shapes, get `Stack`. Images, which
        differ only in the last two of three or more dimensions, get `Pad`. All other
        fields get `List`. If shapes differ, a warning shows the rules (PP105).

        The samples are read here and not in the first batches, because workers see
        different batches and could choose different rules.

        Args:
            dataset: a data set, or any iterable of samples. Samples of a sequence are
                taken at equal distances, and those of an iterable from its start.
            num_samples: the number of samples to read.

        Raises:
            TypeError: ``num_samples`` is not an integer, or samples of different types.
            ValueError: ``num_samples`` is less than 1, there are no samples, or they
                have different fields.
        """
        num_samples = check_int(num_samples, 1, "Collate.auto: num_samples")
        samples = _some_samples(dataset, num_samples)
        if not samples:
            raise BatchValueError(
                "Collate.auto: dataset must have at least one sample, but is empty."
            )
        chooser = _Chooser()
        chooser.choose(samples, ())
        whole = chooser.rules.pop("", None)
        chosen = cls(chooser.rules, default=whole)
        if chooser.differing:
            names = ", ".join(
                repr(each) if each else "the samples" for each in chooser.differing
            )
            warn_once(
                "PP105",
                f"Collate.auto: shapes differ among {len(samples)} samples in {names}, "
                f"so the rules are {chosen!r}. Write these rules into the program, "
                "with Pad, Concat or List for each of these fields.",
                place=names,
            )
        return chosen

    def _add(self, prefix: str, rules: Mapping[Any, Any]) -> None:
        for key, rule in rules.items():
            name = f"{prefix}{key}"
            if isinstance(rule, Mapping):
                self._add(f"{name}.", rule)
                continue
            _check_rule(rule, repr(name))
            if name in self._rules:
                raise BatchValueError(
                    f"Collate: {name!r} must have one rule, but has "
                    f"{self._rules[name]!r} and {rule!r}. Remove one of them."
                )
            self._rules[name] = rule


Collate.__module__ = "pyparallel"


class _RuleWalk(Walk):
    """A pass over the samples that uses the rules of a `Collate`.

    Attributes:
        joined: the rule and the result for each field with the rule `Concat`, by name.
    """

    drops_keys = False

    def __init__(
        self, rules: dict[str, AnyRule], parents: set[str], default: AnyRule | None
    ) -> None:
        super().__init__(sys.maxsize)
        self._rules, self._parents, self._default = rules, parents, default
        self.joined: dict[str, tuple[Concat, Ragged]] = {}

    def column(self, column: list[Any], path: Path) -> Any:
        name = _dotted(path)
        rule = self._rules.get(name) if path else None
        if rule is None and name not in self._parents:
            rule = self._default_rule(column[0], path)
        if rule is not None:
            if isinstance(rule, Concat):
                ragged = apply_rule(rule, column, path)
                self.joined[name] = rule, ragged
                return ragged if rule.dim == 0 else ragged.values
            if isinstance(rule, Rule):
                return apply_rule(rule, column, path)
            try:
                return rule(column)
            except Exception as error:
                add_note(error, f"Collate: in the rule of {name or 'default'!r}.")
                raise
        try:
            return super().column(column, path)
        except (BatchTypeError, BatchValueError) as error:
            problem = problem_of(error)
            if problem is None:
                raise
            where, advice = self._advise(column, path)
            text = f"Collate{where}: {problem} {advice}"
            raise type(error)(text) from error.__cause__

    def registered(self, first: Any, path: Path) -> Any:
        # The function would ignore the rules of the fields.
        if _dotted(path) in self._parents:
            return None
        return super().registered(first, path)

    def may_stack_equal(self, path: Path) -> bool:
        # The backend would stack fields that have another rule.
        if self._default is not None or _dotted(path) in self._parents:
            return False
        return super().may_stack_equal(path)

    def _advise(self, column: list[Any], path: Path) -> tuple[str, str]:
        """Return the missing rule for a message, and the advice of the message."""
        name, first = _dotted(path), column[0]
        is_sample = not path and (is_fields(first) or isinstance(first, list))
        if is_sample or name in self._parents:
            advice = "Give every sample the same fields."
            if not path and isinstance(first, list) and any(map(is_fields, first)):
                advice = "Use flatten=True for lists of samples."
            return "", advice
        where = f", no rule for {name!r}" if path else ", default=None"
        return where, advise_rules(convert(column))

    def _default_rule(self, first: Any, path: Path) -> AnyRule | None:
        """Return the default for a field, or None to walk into it."""
        default = self._default
        if default is None:
            return None
        is_sample = not path and isinstance(first, list)
        if isinstance(default, Rule) and not isinstance(default, List):
            walked = is_sample or is_fields(first) or isinstance(first, str | bytes)
        else:
            walked = is_sample or (not path and is_fields(first))
        return None if walked else default


class _Chooser:
    """Choose a rule for each field of some samples.

    Attributes:
        rules: the rule by dotted name; ``""`` is the sample itself.
        differing: the dotted names of the fields whose shapes differ.
    """

    def __init__(self) -> None:
        self.rules: dict[str, AnyRule] = {}
        self.differing: list[str] = []

    def choose(self, column: list[Any], path: Path) -> None:
        """Choose the rules for the values at ``path`` of all samples."""
        columns: dict[Any, list[Any]] = {}
        first = column[0]
        walks = is_fields(first) or (not path and isinstance(first, list))
        walks = walks and registered_collate(first) is None
        try:
            if walks and len(path) < pytree.MAX_DEPTH:
                advice = "Give every sample the same fields."
                columns, _ = open_columns(column, path, advice) or ({}, None)
        except (BatchTypeError, BatchValueError, MissingKeyError) as error:
            if not path:  # no rule can batch such samples
                raise type(error)(f"Collate.auto: {error}") from None
            # fields of different structures stay whole
        for step, values in columns.items():
            self.choose(values, (*path, step))
        rule = None if columns else self._rule(column, path)
        if rule is not None:
            self.rules[_dotted(path)] = rule

    def _rule(self, column: list[Any], path: Path) -> AnyRule | None:
        """Return a rule, or None for values that another library batches."""
        samples, registered = convert(column), registered_collate(column[0])
        if not all(isinstance(each, torch.Tensor) for each in samples):
            return None if registered else List()
        if any(each.is_nested or each.layout is not torch.strided for each in samples):
            return List()
        shapes = {tuple(each.shape) for each in samples}
        if len(shapes) == 1:
            return None if registered else Stack()
        self.differing.append(_dotted(path))
        least = min(map(len, shapes))
        is_image = least > 2 and len({(len(s), s[:-2]) for s in shapes}) == 1
        return Pad() if is_image else List()


def _some_samples(dataset: Any, num_samples: int) -> list[Any]:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        return list(itertools.islice(dataset, num_samples))
    num_samples = min(num_samples, len(dataset))
    return [dataset[i * len(dataset) // num_samples] for i in range(num_samples)]


def _is_argument(name: str) -> bool:
    """Return True if the name can be a keyword argument of `Collate`."""
    options = ("default", "flatten", "padding_free")
    return name.isidentifier() and not iskeyword(name) and name not in options


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _parents(name: str) -> list[str]:
    """Return the dotted names of the containers around a field."""
    steps = name.split(".")
    return [".".join(steps[:i]) for i in range(len(steps))]


def check_collate_fn(value: Any) -> None:
    """Raise TypeError unless a loader can call this ``collate_fn``."""
    is_class = isinstance(value, type) and issubclass(value, Rule | Collate)
    if value is None or (
        callable(value) and not isinstance(value, Rule) and not is_class
    ):
        return
    advice, found = "Use Collate(...) or a function.", f"{value!r} ({type_name(value)})"
    if isinstance(value, Rule):
        advice, found = f"Use Collate(default={value!r}).", f"{value!r}, a rule of it"
    elif is_class:
        name = value.__name__
        is_rule = issubclass(value, Rule)
        advice = f"Use Collate(default={name}())." if is_rule else f"Use {name}()."
        found = f"the class {name}"
    elif isinstance(value, Padding):
        advice = "Use Collate(default=Pad(...)), which has the same options."
    elif isinstance(value, Mapping):
        advice = f"Use Collate({value!r})."
    raise BatchTypeError(
        "DataLoader: collate_fn must be a function of the samples, such as a Collate, "
        f"but is {found}. {advice}"
    )


def _meant_option(name: str, value: Any) -> Pad | None:
    """Return the rule whose option was given to `Collate` by mistake, or None."""
    option = meant_by(name, _OPTIONS)
    if option is None:
        return None
    try:
        return Pad(**{option: value})
    except (BatchTypeError, BatchValueError):
        return None


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise BatchTypeError(
            f"Collate: {name} must be True or False, but is {value!r} "
            f'({type_name(value)}). Use Collate({{"{name}": ...}}) for a field of this '
            "name."
        )


def _check_rule(rule: Any, name: str) -> None:
    if isinstance(rule, Rule) or (callable(rule) and not isinstance(rule, type)):
        return
    advice = f"Use {_RULES}."
    if rule is Ragged:
        advice = "Use Concat(), whose result is a Ragged."
    elif isinstance(rule, type) and issubclass(rule, Rule):
        advice = f"Use {rule.__name__}()."
    elif (meant := _meant_option(name.strip("'"), rule)) is not None:
        advice = f"Did you mean default={meant!r}?"
    found = type_name(rule)
    if isinstance(rule, str | type):
        found = f"{rule!r} ({found})"
    elif isinstance(rule, list):  # a batch, if the class is the collate_fn
        advice += " Set collate_fn to an instance, such as Collate(), not to the class."
    raise BatchTypeError(
        f"Collate: the rule of {name} must be {_RULES}, but is {found}. {advice}"
    )


def _check_index(name: str, rule: Any, rules: Mapping[str, AnyRule]) -> None:
    """Raise if a rule counts the rows of a field whose rows are not concatenated."""
    if not isinstance(rule, Concat) or rule.index_of is None:
        return
    other = rules.get(rule.index_of)
    if not isinstance(other, Concat) or other.dim != 0:
        found = "no rule" if other is None else repr(other)
        raise BatchValueError(
            f"Collate, {name}={rule!r}: {rule.index_of!r} must have the rule Concat(), "
            f"which concatenates its rows, but has {found}. Add the rule Concat()."
        )


def _children(value: Any) -> dict[str, Callable[[], Any]]:
    """Return functions that read the fields of a sample, by name.

    Raises:
        TypeError: another library splits and batches the sample, as TensorDict.
    """
    cls = type(value)
    is_builtin = cls is dict or cls is list or cls is tuple
    if not is_builtin and registered_collate(value) and pytree.split_registered(value):
        raise BatchTypeError(
            "Collate: rules must be for fields of dicts and objects, but a sample has "
            f"a {type_name(value)}, which its library batches as a whole. Return "
            "to_dict() of it from the data set, or remove the rules for its fields."
        )
    if pytree.is_keyed(value):
        value = pytree.as_dict(value)
    if isinstance(value, Mapping):
        return {str(key): partial(operator.getitem, value, key) for key in value}
    if pytree.has_fields(value):
        names: Iterable[str] = pytree.field_values(value)
    elif pytree.is_namedtuple(value):
        names = value._fields
    elif isinstance(value, list | tuple):
        steps = range(len(value))
        return {str(i): partial(operator.getitem, value, i) for i in steps}
    else:
        return {}
    return {name: partial(getattr, value, name) for name in names}


def _has_field(sample: Any, name: str) -> bool:
    if type(sample) is dict and name in sample:
        return True
    children = _children(sample)
    return name in children or any(
        name.startswith(f"{key}.") and _has_field(read(), name[len(key) + 1 :])
        for key, read in children.items()
    )


def _missing_field_error(batch: Sequence[Any], name: str, rule: AnyRule) -> Exception:
    """Return the error for a rule without a field, with the fields that exist."""
    sample, where, rest = batch[0], "batch[0]", name
    while "." in rest:
        key, _, after = rest.partition(".")
        read = _children(sample).get(key)
        if read is None:
            break
        sample, rest, where = read(), after, format_path(where, [key])
    found = (
        ", ".join(map(repr, _children(sample))) or f"no fields ({type_name(sample)})"
    )
    like, advice = "", "Correct the name, or remove the rule."
    other = next((i for i, each in enumerate(batch) if _has_field(each, name)), None)
    if other is not None:
        like, advice = f" like batch[{other}]", "Give every sample the same keys."
    elif where == "batch[0]" and not _children(sample):
        advice = f"Use Collate(default={rule!r}) for samples without fields."
        if not isinstance(convert([sample])[0], torch.Tensor):
            advice = "Return its fields in a dict or a dataclass from the data set."
    elif where == "batch[0]" and meant_by(rest, ["default"]):
        advice = f"Did you mean default={rule!r}?"
    return MissingKeyError(
        f"Collate, {rule!r}: {where} must have the field {rest!r}{like}, but has "
        f"{found}. {advice}"
    )
