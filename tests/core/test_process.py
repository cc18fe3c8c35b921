"""Functions at forks and at the exit of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pyparallel
from pyparallel.core import process
from tests.support.processes import forkserver

pytestmark = pytest.mark.one_backend

ROOT = Path(pyparallel.__file__).parents[1]

EXITS = """
import runpy, sys
names = runpy.run_path(sys.argv[1])
Living, at_exit = names["Living"], names["at_exit"]
class Named:
    def __init__(self, name): self.name = name
low = Living(at_exit=lambda each: print(each.name))
high = Living(at_exit=lambda each: print(each.name))
at_exit(lambda: print("last"))
kept, dropped = Named("low"), Named("dropped")
low.add(kept)
low.add(dropped)
also_kept = Named("high")
high.add(also_kept)
del dropped
"""


def test_the_exit_ends_living_objects_and_the_highest_floors_first() -> None:
    command = [sys.executable, "-c", EXITS, process.__file__]
    assert subprocess.check_output(command, text=True) == "last\nhigh\nlow\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_renews_living_objects_only() -> None:
    class Pid:
        value = os.getpid()

    def renew(each: Pid) -> None:
        each.value = os.getpid()

    living: process.Living[Pid] = process.Living(renew)
    one, other = Pid(), Pid()
    living.add(one)
    if not (pid := os.fork()):
        os._exit(int((one.value, other.value) != (os.getpid(), os.getppid())))
    assert os.waitpid(pid, 0)[1] == 0 and one.value == os.getpid()


def test_the_package_is_imported_on_systems_that_cannot_fork() -> None:
    """As on Windows, where a function of ``os`` is missing."""
    code = """
import importlib, os, pathlib
del os.register_at_fork
import pyparallel
root = pathlib.Path(pyparallel.__file__).parent
for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root.parent).with_suffix("").parts
    if parts[-1] not in ("__main__", "sitecustomize"):
        try:
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":  # optional
                raise
print(pyparallel.backend.name)
"""
    exit_code, output = forkserver.run(code, [str(ROOT)])
    assert (exit_code, output.strip()) == (0, pyparallel.backend.name)


REDUCTIONS = """
import os, runpy, sys, time, torch, torch.distributed as dist
runpy.run_path(sys.argv[1])

def reduce(parameter):
    dist.all_reduce(parameter.grad, async_op=True)

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.setswitchinterval(1000)  # other threads get the GIL when this one blocks only
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(reduce)
    for _ in range(5):
        (2 * parameter).sum().backward()
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass

found = set()
for _ in range(12):
    if not os.fork():
        train()
        sys.exit()
    found.add(os.wait()[1])
print(found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the states are those of Linux")
def test_the_exit_lets_threads_of_gloo_free_the_last_reductions() -> None:
    """Without the wait, about 5 of these 12 processes abort with torch 2.13."""
    command = [sys.executable, "-W", "ignore", "-c", REDUCTIONS, process.__file__]
    assert subprocess.check_output(command, text=True) == "{0}\n"
