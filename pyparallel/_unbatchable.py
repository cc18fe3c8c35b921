"""Which value of a column it was that torch refused to batch, and why."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

from ._errors import BatchTypeError, BatchValueError, at, kind
from ._stack import as_tensor, is_array


def unbatchable(column: list[Any], path: tuple[Any, ...]) -> Exception:
    """Return the error for values that torch refuses; it names the first at fault."""

    def place(i: int) -> str:
        return at(f"batch[{i}]", path)

    i = next((i for i, item in enumerate(column) if _is_refused(item)), None)
    if i is None:
        # Each alone would do, so it is their mixture.
        i = next((i for i, x in enumerate(column) if type(x) is not type(column[0])), 0)
        if i == 0:
            i, error = _mismatch(column)
            return BatchValueError(
                f"{place(i)} must fit {place(0)}, but default_collate cannot join two "
                f"{kind(column[0])} objects: {error}"
            )
        return BatchTypeError(
            f"{place(i)} must be {kind(column[0])} like {place(0)}, but is "
            f"{kind(column[i])}."
        )
    if isinstance(column[i], int | float):
        return BatchValueError(
            f"{place(i)} must be a number that a tensor can hold, but is "
            f"{column[i]!r:.80}."
        )
    found = kind(column[i])
    if is_array(column[i], numeric=False):
        found += f" of dtype {column[i].dtype}"
    return BatchTypeError(
        f"{place(i)} must be a tensor, a numeric array, a number, a string or a "
        f"container of these, but is {found}. Wrap the field in a DataContainer with "
        "cpu_only=True to keep the values in a list."
    )


def _mismatch(column: list[Any]) -> tuple[int, Exception | None]:
    """Return the first value that cannot be joined with the first one, and why."""
    for i, value in enumerate(column):
        try:
            default_collate([column[0], value])
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            return i, error
    return 0, None


def _is_refused(value: Any) -> bool:
    try:
        default_collate([as_tensor(value) if is_array(value) else value])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return True
    return False
