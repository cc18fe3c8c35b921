"""A device on threads: slow streams, events, and allocators that reuse memory eagerly.

It implements `pyparallel._slab.DeviceApi` as CUDA and torch's allocators behave, with
every delay made long and random, so that a missing wait shows as a wrong value.
Streams touch memory by address, as a GPU does: queued work keeps no tensor alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
import weakref
from collections import defaultdict

import numpy as np
import torch

POISON = 0xDB
DEVICE = torch.device("cuda", 0)  # only a name here


def memory(address: int, nbytes: int) -> np.ndarray:
    """Return the bytes at an address, without owning them."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Stream:
    """A queue of work that a thread does in order, each piece after a random delay."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def queue(self, function, *args) -> None:
        self.work.put((function, args))

    def close(self) -> None:
        self.work.put(None)
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        while (item := self.work.get()) is not None:
            function, args = item
            if function is not threading.Event.set:
                time.sleep(random.random() * self.delay)
            function(*args)


class Pool:
    """Memory that is handed out again as soon as its owner and its streams are done."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []  # never freed: streams hold bare addresses
        self.free: dict[int, list[tuple[np.ndarray, list]]] = defaultdict(list)
        self.streams: dict[int, set[Stream]] = defaultdict(set)
        self.num_reused = 0
        self.lock = threading.RLock()  # a finalizer may run while it is held

    def take(self, nbytes: int) -> torch.Tensor:
        size = max(64, 1 << (nbytes - 1).bit_length()) if nbytes else 64
        with self.lock:
            block = next(
                (
                    self.free[size].pop(i)[0]
                    for i, (_, events) in enumerate(self.free[size])
                    if all(event.is_set() for event in events)
                ),
                None,
            )
            if block is None:
                block = np.full(size + 64, POISON, np.uint8)
                block = block[-block.ctypes.data % 64 :][:size]
                self.blocks.append(block)
            else:
                self.num_reused += 1
        owner = block[:nbytes]  # a new object: it dies with the tensor's storage
        weakref.finalize(owner, self.give_back, block).atexit = False
        return torch.from_numpy(owner)

    def give_back(self, block: np.ndarray) -> None:
        with self.lock:
            streams = self.streams.pop(block.ctypes.data, ())
            events = [record(stream) for stream in streams]
            self.free[block.size].append((block, events))

    def use(self, address: int, stream: Stream) -> None:
        with self.lock:
            self.streams[address].add(stream)

    def owns(self, address: int) -> bool:
        return any(block.ctypes.data == address for block in self.blocks)


def record(stream: Stream) -> threading.Event:
    event = threading.Event()
    stream.queue(threading.Event.set, event)
    return event


class FakeDevice:
    """The correct device. Subclasses below leave one protection out."""

    def __init__(self, copy_delay: float = 1e-3, compute_delay: float = 5e-4) -> None:
        self.copies = Stream(copy_delay)
        self.main = Stream(compute_delay)
        self.side = Stream(compute_delay)
        self.pools: dict[Stream, Pool] = defaultdict(Pool)
        self.host = Pool()
        self.local = threading.local()
        self.num_copies = 0

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.main, self.side, self.copies):
            stream.close()

    @contextlib.contextmanager
    def using(self, stream: Stream):
        before = self.current_stream(DEVICE)
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = before

    # What pyparallel calls.

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.host.owns(tensor.untyped_storage().data_ptr())

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.host.take(nbytes)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        return self.pools[self.current_stream(device)].take(nbytes)

    def copy_stream(self, device: torch.device) -> Stream:
        return self.copies

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self.local, "stream", self.main)

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(pool.owns(address) for pool in list(self.pools.values()))

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        assert self.is_pinned(src), "a copy from memory that is not pinned"
        self.host.use(src.untyped_storage().data_ptr(), stream)
        self.num_copies += 1
        stream.queue(
            np.copyto,
            memory(dst.data_ptr(), dst.nbytes),
            memory(src.data_ptr(), src.nbytes),
        )

    def record(self, stream: Stream) -> threading.Event:
        return record(stream)

    def wait(self, stream: Stream, event: threading.Event) -> None:
        stream.queue(event.wait, 30)

    def is_done(self, event: threading.Event) -> bool:
        return event.is_set()

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        address = tensor.untyped_storage().data_ptr()  # as torch: of the whole block
        home = next(pool for pool in list(self.pools.values()) if pool.owns(address))
        home.use(address, stream)

    # What a model does.

    def read(self, tensor: torch.Tensor, into: list[bytes]) -> None:
        """Queue a kernel that reads a tensor on the current stream."""
        where = memory(tensor.data_ptr(), tensor.nbytes)
        self.current_stream(DEVICE).queue(lambda: into.append(where.tobytes()))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Queue a kernel that writes a tensor on the current stream."""
        where = memory(tensor.data_ptr(), tensor.nbytes)
        self.current_stream(DEVICE).queue(where.fill, value)


class LentMemory(FakeDevice):
    """It can read memory of a ring that sees no copies: what is dropped is free."""

    def __init__(self, **delays: float) -> None:
        super().__init__(**delays)
        self.ring = Pool()

    def is_pinned(self, tensor):
        address = tensor.untyped_storage().data_ptr()
        return self.ring.owns(address) or super().is_pinned(tensor)


class NoWaitAtLanding(FakeDevice):
    """The consumer does not wait for the copy."""

    def wait(self, stream, event):
        if stream is self.copies:
            super().wait(stream, event)


class NoWaitBeforeCopy(FakeDevice):
    """The copy does not wait for those who still use the memory."""

    def wait(self, stream, event):
        if stream is not self.copies:
            super().wait(stream, event)


class HastyHostPool(FakeDevice):
    """Page-locked memory is reused while a copy still reads it."""

    def copy(self, dst, src, stream):
        super().copy(dst, src, stream)
        self.host.streams.clear()


class NoKeep(FakeDevice):
    """The allocator is not told of a consumer on another stream."""

    def keep(self, tensor, stream):
        pass
