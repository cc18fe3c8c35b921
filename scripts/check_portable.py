"""Check pure Python: the import, collate, and loaders without workers.

    PYPARALLEL_BACKEND=python python scripts/check_portable.py [--without-posix]

It runs on every system, needs only the package, and compares values with torch's.
With the option it first removes modules and functions that Windows does not have.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any

import torch
from torch.utils.data import Dataset

MODULES = ("fcntl", "grp", "posix", "pwd", "resource", "termios")
#: Modules and the names that they do not have on Windows.
NAMES = (
    (os, "fork getuid killpg memfd_create O_CLOEXEC O_NONBLOCK pread register_at_fork"),
    (os, "sched_getaffinity setsid statvfs sysconf WNOHANG"),
    (signal, "pthread_sigmask setitimer SIGALRM SIGCHLD SIGHUP SIGKILL SIGUSR1"),
    (select, "epoll poll"),
    (socket, "AF_UNIX"),
)
#: They use such names themselves, so they are imported before the names are removed.
FOREIGN = (
    "asyncio concurrent.futures multiprocessing.connection multiprocessing.reduction "
    "optree subprocess tempfile torch.distributed torch.multiprocessing "
    "torch.nn.parallel torch.utils._pytree"
)


def remove_posix() -> None:
    """Let this process look like one of Windows to modules that are imported later."""
    for name in FOREIGN.split():
        importlib.import_module(name)
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    for module, names in NAMES:
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    load: Any = ctypes.CDLL

    def library(name: str | None, *args: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("Windows has no handle of the whole process.")
        return load(name, *args, **options)

    vars(ctypes)["CDLL"] = library
    sys.platform = "win32"


class Pictures(Dataset[Any]):
    """Eight samples of different sizes."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an image and its boxes."""
        image = torch.full((3, 20 + index, 30 - index), float(index))
        return {"image": image, "boxes": torch.ones(index % 3, 4), "label": index}


def main(arguments: list[str]) -> None:
    """Import the package, and check batches of collate and of loaders."""
    if "--without-posix" in arguments:
        remove_posix()
    from pyparallel import Collate, Concat, DataLoader, Pad, PreDataLoader

    importlib.import_module("pyparallel.mmengine")
    samples = [Pictures()[i] for i in range(4)]
    images = [each["image"] for each in samples]
    padded = [
        torch.nn.functional.pad(each, (0, 32 - each.shape[2], 0, 32 - each.shape[1]))
        for each in images
    ]
    expected = torch.stack(padded)

    rules = Collate(image=Pad(divisor=32, mask=True), boxes=Concat())
    loader = DataLoader(Pictures(), batch_size=4, collate_fn=rules)
    batches = list(PreDataLoader(loader, "cpu"))
    assert len(batches) == len(loader) == 2
    assert torch.equal(batches[0]["image"].data, expected)
    assert batches[1]["boxes"].lengths().tolist() == [1, 2, 0, 1]
    assert batches[1]["label"].tolist() == [4, 5, 6, 7]

    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = DataLoader(Pictures(), batch_size=4, collate_fn=rules)
    again.load_state_dict(state)
    assert [each["label"].tolist() for each in again] == [[4, 5, 6, 7]]
    print(f"{sys.platform}: import, collate and loaders without workers are correct")


if __name__ == "__main__":
    main(sys.argv[1:])
