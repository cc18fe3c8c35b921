"""A checkpoint that stays intact in a crash, for one or more processes."""

from __future__ import annotations

import glob
import io
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel import DataLoader


class Checkpoint:
    """One file, and the objects whose state goes into it.

    Only the first rank reads and writes the file; other ranks need no access to it.

    Args:
        path: the file; with None, `load` and `save` do nothing.
        loader: each rank saves its own state of the loader: the position in the data,
            and the random states of torch, ``random`` and NumPy.
        **parts: objects with ``state_dict`` and ``load_state_dict``, equal on all
            ranks: the model, the optimizer, the schedule.
    """

    def __init__(
        self, path: Path | None, loader: DataLoader[Any], **parts: Any
    ) -> None:
        self.path, self.loader, self.parts = path, loader, parts

    def load(self, **progress: Any) -> dict[str, Any]:
        """Restore all objects; return the progress that was saved with them.

        Args:
            **progress: returned if there is no file yet.

        Raises:
            ValueError: the file belongs to a job with another number of processes.
        """
        if self.path is None:
            return progress
        content = b""
        if dist.get_rank() == 0:
            for unfinished in self.path.parent.glob(f"{glob.escape(self.path.name)}.*"):
                if unfinished.suffix == UNFINISHED:  # its writer was killed
                    unfinished.unlink()
            if self.path.exists():
                content = self.path.read_bytes()
        content = from_first_rank(content)
        if not content:
            return progress
        state = loads(content)
        num_ranks, world = len(state["loaders"]), dist.get_world_size()
        if num_ranks != world:
            raise ValueError(
                f"{self.path} must be of a job with {world} processes, but is of one "
                f"with {num_ranks}. Start {num_ranks} processes, or use another file."
            )
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        # `loader` sets the random states too, when its next epoch begins.
        self.loader.load_state_dict(state["loaders"][dist.get_rank()])
        saved: dict[str, Any] = state["progress"]
        return saved

    def save(self, **progress: Any) -> None:
        """Write the file; every rank returns when it is on disk.

        Args:
            **progress: numbers and lists of numbers, such as the epoch. `load` gives
                all ranks the values of the first.
        """
        if self.path is None:
            return
        loaders = from_all_ranks(dumps(self.loader.state_dict()))
        if dist.get_rank() == 0:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            states = [loads(each) for each in loaders]
            write({"parts": parts, "loaders": states, "progress": progress}, self.path)
        # No rank continues or ends before the file exists.
        dist.barrier()


UNFINISHED = ".unfinished"


def write(state: Any, path: Path) -> None:
    """Write a file atomically: at any moment the old or the new file is complete.

    `os.replace` is atomic, but the disk may store the name before the content. So the
    content is flushed first, and then the folder, which contains the name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each writer has its own file, even if another one still runs unnoticed.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            os.chmod(unfinished, 0o600)  # weights may be secret
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def dumps(state: Any) -> bytes:
    """Return a state as the bytes that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loads(content: bytes) -> Any:
    """Return a state of tensors, numbers and containers; reject anything else."""
    return torch.load(io.BytesIO(content), weights_only=True)


def from_first_rank(content: bytes) -> bytes:
    """Return the argument of the first rank, on all ranks."""
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0)
    received, there = buffer(int(size), content if dist.get_rank() == 0 else b"")
    if received:
        dist.broadcast(there, 0)
    return bytes(received)


def from_all_ranks(content: bytes) -> list[bytes]:
    """Return the arguments of all ranks.

    torch's collectives for objects would unpickle data from other ranks.
    """
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(content)]))
    longest = max(int(size) for size in sizes)
    received, there = zip(*(buffer(longest) for _ in range(world)), strict=True)
    dist.all_gather(list(there), buffer(longest, content)[1])
    return [bytes(r[: int(size)]) for r, size in zip(received, sizes, strict=True)]


def buffer(size: int, content: bytes = b"") -> tuple[bytearray, Tensor]:
    """Return bytes that begin with ``content``, and a tensor ``(size,)`` of them."""
    there = bytearray(content.ljust(size, b"\0"))
    return there, torch.frombuffer(there or bytearray(1), dtype=torch.uint8)[:size]
