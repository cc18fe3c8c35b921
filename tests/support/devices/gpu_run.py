"""Options of pytest for a GPU that no test has seen before; conftest.py adds them.

The driver and torch of a new machine may warn of anything, and a checker of memory may
be a hundred times slower than elsewhere. Neither says that a test has failed.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

#: Our own warnings have a code. pytest's are of threads and finalizers that fail.
OURS = ["error:\\[PP\\d", "error::pytest.PytestWarning"]


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.addoption(
        "--unknown-warnings",
        choices=["error", "report"],
        default="error",
        help="report: list warnings of torch and the driver, and fail for ours alone",
    )
    parser.addoption(
        "--first-cases-after",
        type=float,
        metavar="SECONDS",
        help="run one case of each test, then a second one, and so on; after these "
        "seconds, only tests that have run no case",
    )


def configure(config: pytest.Config) -> None:
    """Apply the options."""
    if config.getoption("unknown_warnings") == "report":
        # Later filters have priority. Those of this list say what else is ignored.
        filters = config.getini("filterwarnings")
        filters[filters.index("error")] = "default"
        filters[1:1] = OURS
    seconds = config.getoption("first_cases_after")
    if seconds is not None:
        config.pluginmanager.register(FirstCases(seconds))


def function(item: pytest.Item) -> str:
    """Return the id of a test without its case."""
    return item.nodeid.partition("[")[0]


class FirstCases:
    """Runs the cases of all tests in turns, and leaves out the last when time is over.

    So a run of any length covers each test function.
    """

    def __init__(self, seconds: float) -> None:
        self._over = time.monotonic() + seconds
        self._num_run: Counter[str] = Counter()
        self._left_out: list[pytest.Item] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seen: Counter[str] = Counter()
        turns = {}
        for item in items:
            turns[item] = seen[function(item)]
            seen[function(item)] += 1
        items.sort(key=lambda item: turns[item])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        name = function(item)
        if self._num_run[name] and time.monotonic() > self._over:
            self._left_out.append(item)
            return True
        self._num_run[name] += 1
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._left_out:  # the last line of pytest counts them
            session.config.hook.pytest_deselected(items=self._left_out)
