"""All bad inputs in one table, and a run of it without ``assert``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from pyparallel import collate
from tests.support.errors import (
    bad_inputs_nests,
    bad_inputs_scatter,
    bad_inputs_stack,
    collate_errors,
)
from tests.support.errors.bad_inputs import Case, attempt
from tests.support.errors.bad_inputs import refused as error


def _known(name: str) -> Case:
    batch, old, meaning, message = collate_errors.CASES[name]
    call: Callable[[Any], Any] = lambda x: collate(x, 8)  # noqa: E731 - one of two
    if callable(batch):
        call = lambda x: x()  # noqa: E731 - the other
    return Case(lambda: batch, call, error(message, old, meaning))


TABLES: dict[str, dict[str, Case]] = {
    "collate": {name.replace(" ", "-"): _known(name) for name in collate_errors.CASES},
    "shapes": bad_inputs_stack.SHAPES,
    "tensors": bad_inputs_stack.TENSORS,
    "nests": bad_inputs_nests.NESTS,
    "loaders": bad_inputs_nests.LOADERS,
    "targets": bad_inputs_scatter.TARGETS,
    "options": bad_inputs_scatter.OPTIONS,
    "batches": bad_inputs_scatter.BATCHES,
    "slow": bad_inputs_scatter.SLOW,
}
CASES = {
    f"{table}/{name}": case
    for table, cases in TABLES.items()
    for name, case in cases.items()
}


def main() -> None:
    """Run all cases; print the failed ones and the number of cases."""
    if sys.flags.optimize == 0:
        sys.exit("run this with -O")
    cases = {name: case for name, case in CASES.items() if name[:5] != "slow/"}
    for name, case in cases.items():
        try:
            attempt(case)
        except BaseException:
            print(name, traceback.format_exc())
    print(len(cases))


if __name__ == "__main__":
    main()
