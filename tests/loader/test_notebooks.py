"""A notebook: its kernel is interrupted in an epoch, runs the cell again, restarts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.repository.docs_blocks import blocks

jupyter_client = pytest.importorskip("jupyter_client")

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

IMPORTS = """
import multiprocessing, threading, time, torch
import tqdm, tqdm.auto
from pyparallel import DataLoader, PreDataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        time.sleep({read})
        return torch.full((100, 100), float(i))
"""
#: A cell of a notebook, which is also run again.
CELL = """
loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=2, {options})
seen = []
for batch in {loop}:
    time.sleep({step})
    seen += batch[:, 0, 0].tolist()
    print("step", len(seen) // 4, flush=True)
assert sorted(seen) == list(range(100))
print("the end")
"""
#: The processes and threads of workers that are left after a cell.
LEFT = """
deadline = time.monotonic() + 20
while True:  # threads end after their sample
    children = multiprocessing.active_children()
    threads = [t.name for t in threading.enumerate() if "pyparallel" in t.name]
    if not children + threads or time.monotonic() > deadline:
        break
    time.sleep(0.1)
print("left:", len(children), threads)
"""


class Kernel:
    """A running kernel and its messages."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.client = manager, manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code: str, *interrupts: str) -> tuple[str, str]:
        """Return the printed text of a cell, and the name of its error.

        Args:
            code: the cell.
            interrupts: texts after which the cell is interrupted, in their order.
        """
        waiting = list(interrupts)
        request, printed, error = self.client.execute(code), "", ""
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            printed += content.get("text", "") if "name" in content else ""
            if message["msg_type"] == "error":
                error = content["ename"]
            if content.get("execution_state") == "idle":
                return printed, error
            if waiting and waiting[0] in printed:
                del waiting[0]
                self.manager.interrupt_kernel()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(stderr=subprocess.DEVNULL)
    started = Kernel(manager)
    yield started
    started.client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ("", "tqdm.tqdm(loader)"),
        ("", "tqdm.auto.tqdm(loader)"),
        ("", "tqdm.tqdm(PreDataLoader(loader))"),
        ("worker_method='thread'", "tqdm.tqdm(loader)"),
        ("worker_method='thread'", "tqdm.tqdm(PreDataLoader(loader))"),
    ],
)
def test_a_cell_is_interrupted_and_runs_again(
    kernel: Kernel, options: str, loop: str
) -> None:
    # In the step, and while the loop waits for a batch.
    for read, step in ((0.0, 0.05), (0.05, 0.0)):
        cell = CELL.format(options=options, loop=loop, step=step)
        kernel.run(IMPORTS.format(read=read))
        # Python drops an interrupt in a finalizer, so there is a second one.
        assert kernel.run(cell, "step 3", "step 12")[1] == "KeyboardInterrupt"
        if "auto" in loop:  # this bar keeps the iterator as long as the error lives
            kernel.run("raise ValueError")
            kernel.run("import gc; gc.collect()")
        assert kernel.run(LEFT) == ("left: 0 []\n", "")
        printed, error = kernel.run(cell)
        assert error == "" and "the end" in printed and "100%" in printed, printed
        assert "Error" not in printed and "Warning" not in printed
        assert kernel.run(LEFT) == ("left: 0 []\n", "")


def test_a_restart_ends_the_workers(kernel: Kernel) -> None:
    kernel.run(IMPORTS.format(read=0))
    cell = CELL.format(
        options="persistent_workers=True", loop="tqdm.tqdm(loader)", step=0
    )
    assert kernel.run(cell)[1] == ""
    code = "print(*[child.pid for child in multiprocessing.active_children()])"
    pids = [int(pid) for pid in kernel.run(code)[0].split()]
    assert len(pids) == 2
    workers = [psutil.Process(pid) for pid in pids]
    kernel.manager.restart_kernel(now=True)
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    kernel.client.wait_for_ready(timeout=120)
    kernel.run(IMPORTS.format(read=0))
    assert kernel.run(cell)[1] == ""


#: The program of the page, as a cell.
(PAGE,) = (it.text for it in blocks("docs/frameworks.md") if "from tqdm" in it.text)


def test_the_cell_of_the_page_is_interrupted_and_runs_again(kernel: Kernel) -> None:
    kernel.run("import multiprocessing, threading, time")
    assert kernel.run(PAGE, "loss=", "20%|")[1] == "KeyboardInterrupt"
    assert kernel.run(LEFT) == ("left: 0 []\n", "")
    printed, error = kernel.run(PAGE)
    assert error == "" and "500/500" in printed and "loss=" in printed, printed
    assert kernel.run(LEFT) == ("left: 0 []\n", "")
