"""The effects of PYPARALLEL_DEBUG=1 on a process, from its import to its end."""

from __future__ import annotations

import pytest

from pyparallel import backend
from tests.support.processes import forkserver, interpreters
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


def run(code: str, value: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the output of a process with the variable's value from its start on."""
    monkeypatch.setenv("PYPARALLEL_DEBUG", value)
    exit_code, output = forkserver.run(code, [str(ROOT)])
    assert exit_code == 0, output
    return output


@pytest.mark.parametrize(
    ("value", "enabled", "poison"),
    [("0", False, False), ("poison", False, True), ("yes", True, True)],
)
def test_the_environment_is_read_once_at_import(value, enabled, poison, monkeypatch):
    code = """
import os
from pyparallel.shm.ring import Ring
from pyparallel.transfer import debug
os.environ["PYPARALLEL_DEBUG"] = "" if debug.poison_enabled else "1"
print(debug.enabled, debug.poison_enabled, Ring(1, 1 << 16).poison_enabled)
"""
    assert run(code, value, monkeypatch) == f"{enabled} {poison} {poison}\n"


LAST = """
import torch
from tests.support.devices.fake_device import DEVICE
from tests.support.devices.probed_device import Trampling
from pyparallel.transfer import debug, to_device
debug.EXIT_SECONDS = 30  # of a busy machine
device = Trampling()
queued = to_device.send([torch.ones(100)], DEVICE, device)
"""


def test_the_last_batch_is_checked_when_the_interpreter_ends():
    (ended,) = interpreters.run("", [LAST], PYPARALLEL_DEBUG="1")
    error = "RuntimeError: the staging memory of leaf 0 of 1 (torch.float32"
    assert error in ended.err and ended.code == 0


FORK = """
import os, torch, warnings
from tests.support.devices.fake_device import DEVICE
from tests.support.devices.probed_device import Device, held_back
from pyparallel.transfer import debug, to_device
device = Device()
gate = held_back(device)
tensors = to_device.send([torch.ones(100)], DEVICE, device).wait()
warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside a thread
if os.fork() == 0:
    print(len(debug._unchecked), len(debug._watched), flush=True)
    os._exit(0)
os.wait()
gate.set()
assert debug._unchecked and debug._watched
"""


def test_a_forked_process_checks_nothing_of_its_parent(monkeypatch):
    assert run(FORK, "1", monkeypatch) == "0 0\n"


CACHED = """
import ctypes, torch, pyparallel
batch = pyparallel.collate([torch.ones(600_000), torch.ones(600_001)][:1] * 2)
where = (ctypes.c_uint8 * batch.nbytes).from_address(batch.data_ptr())
assert pyparallel.memory.cache_info().in_use >= batch.nbytes
del batch
print(set(where))
"""


def test_recycled_memory_of_the_host_contains_poison(monkeypatch):
    if backend.name != "native":
        pytest.skip("pure Python recycles nothing")
    for value in ("1", "poison"):
        assert run(CACHED, value, monkeypatch) == "{219}\n"
    assert "219" not in run(CACHED, "0", monkeypatch)
