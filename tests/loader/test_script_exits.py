"""The exit of flat scripts: names at module level, no function, no ``del``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import pyparallel
from tests.support.processes.interpreters import Ended, run
from tests.support.repository.peers import installed

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend, pytest.mark.timeout(300)]

#: Libraries whose import changes the order in which modules are cleared at the exit.
PEERS = installed("accelerate", "lightning", "mmengine", "torchdata", "transformers")

START = f"""
from tests.support.processes.cleared_modules import Clearing
_first = Clearing()
import atexit, gc, sys
import torch
{"".join(f"import {name}{chr(10)}" for name in PEERS)}
from pyparallel import DataLoader, PreDataLoader
torch.set_num_threads(1)
"""
LOADER = """
data = torch.arange(40.0)
loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
"""
EPOCH = """
for batch in loader: pass

"""
ITERATOR = """
it = iter(loader)
first = next(it)
"""
#: Flat scripts, their exit codes, and the last line of stderr.
SCRIPTS = {
    "epoch": (EPOCH, 0, ""),
    "iterator": (ITERATOR, 0, ""),
    "exit": (EPOCH + ITERATOR + "sys.exit(5)", 5, ""),
    "exception": (EPOCH + ITERATOR + "1 / 0", 1, "ZeroDivisionError: division by zero"),
    "exception in a worker": (
        "loader = DataLoader([1, None], num_workers=1, persistent_workers=True)"
        + EPOCH,
        1,
        "found <class 'NoneType'>",
    ),
    "two workers": ("loader = DataLoader(data, num_workers=2)" + ITERATOR, 0, ""),
    "no workers": ("loader = DataLoader(data)" + ITERATOR, 0, ""),
    "pinned ring": (
        # A device: max() pins memory, and a call of print() would be seen.
        "from types import SimpleNamespace\n"
        "lock = SimpleNamespace(pin=max, unpin=print, fence=print)\n"
        "data = torch.ones(40, 9000)  # too large for a message\n"
        "loader = DataLoader(data, 4, num_workers=1, persistent_workers=True)\n"
        "it = iter(loader)\n"
        "loader._receiver.ring.pin(lock)\n"
        "first = next(it)\n"
        "assert loader._receiver.ring.is_pinned(0)",
        0,
        "",
    ),
    "prefetch": (
        "loader = PreDataLoader(loader)" + EPOCH + ITERATOR + "array = first.numpy()",
        0,
        "",
    ),
    "cycle": (ITERATOR + "first.it = it; it.batches = [next(it), it]", 0, ""),
}


#: How a script clears globals: by force, or beside the peers in Python's order.
END, OUTPUT = ("_first._globals = []", "False") if PEERS else ("_first.find()", "True")


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    codes = [f"{LOADER}{END}\n{code}" for code, _, _ in SCRIPTS.values()]
    return dict(zip(SCRIPTS, run(START, codes), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_without_a_message_of_ours(name: str, ended: Any) -> None:
    _, exit_code, last = SCRIPTS[name]
    code, out, err = ended[name]
    if last:
        assert err.rstrip().endswith(last) and "Exception ignored" not in err
    assert (code, out, "" if last else err) == (exit_code, f"{OUTPUT} True\n", "")


def test_finalizers_run_nothing_after_the_exit_handlers() -> None:
    """See Note [interpreter exit] in ``loader/epoch.py``."""
    finalizers = []
    for path in Path(pyparallel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                bound = [ast.unparse(default) for default in node.args.defaults]
                assert bound in (["sys.is_finalizing"], ["os.close"]), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("weakref.ref", "weakref.proxy"):
                    assert len(node.args) == 1 and not node.keywords, path
                finalizers += [path] * (called == "weakref.finalize")
    assert len(finalizers) > 5
