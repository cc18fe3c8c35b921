"""A device on threads: slow streams, events, and allocators that reuse memory eagerly.

It implements `TorchDevice` of `transfer` and the interface for copies to the host. It
behaves like CUDA and torch's allocators, but with long random delays, so that a missing
wait leads to a wrong value. Streams access memory by address, like a GPU: queued work
keeps no tensor alive. With several devices, an access to the memory of another device
is an error.
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
from typing import Any

import numpy as np
import torch

from pyparallel.transfer.device import TorchFence

POISON = 0xDB
DEVICE = torch.device("cuda", 0)  # only a name here


def memory(address: int, nbytes: int) -> np.ndarray:
    """Return the bytes at an address, without owning them."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Stream:
    """A queue of work; a thread runs it in order, with random delays."""

    def __init__(self, delay: float, device: torch.device = DEVICE) -> None:
        self.delay, self.device = delay, device
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
    """An allocator that reuses memory when its owner and its streams are done."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []  # never freed: streams store addresses only
        self.free: dict[int, list[tuple[np.ndarray, list]]] = defaultdict(list)
        self.streams: dict[int, set[Stream]] = defaultdict(set)
        self.num_reused = 0
        self.lock = threading.RLock()  # a finalizer may run while the lock is held

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
        owner = block[:nbytes]  # a new object, freed with the tensor's storage
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
        return any(
            block.ctypes.data <= address < block.ctypes.data + block.nbytes
            for block in self.blocks
        )


def strided_memory(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor as ``(*shape, itemsize)``, without owning them."""
    shape, size = tuple(tensor.shape), tensor.itemsize
    if not tensor.numel():
        return np.empty((*shape, size), np.uint8)
    steps = [step * size for step in tensor.stride()]
    reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + size
    whole = memory(tensor.data_ptr(), reach)
    return np.lib.stride_tricks.as_strided(whole, (*shape, size), (*steps, 1))


def record(stream: Stream) -> threading.Event:
    event = threading.Event()
    stream.queue(threading.Event.set, event)
    return event


class FakeDevice:
    """The correct device."""

    def __init__(
        self,
        copy_delay: float = 1e-3,
        compute_delay: float = 5e-4,
        num_devices: int = 1,
    ) -> None:
        self.devices = [torch.device("cuda", i) for i in range(num_devices)]
        self.copy_streams = {d: Stream(copy_delay, d) for d in self.devices}
        self.main_streams = {d: Stream(compute_delay, d) for d in self.devices}
        self.copies, self.main = self.copy_streams[DEVICE], self.main_streams[DEVICE]
        self.side = Stream(compute_delay)
        self.compute_delay, self.new_streams = compute_delay, []
        self.pools: dict[Stream, Pool] = defaultdict(Pool)
        self.host = Pool()
        self.local = threading.local()
        self.num_copies = self.num_packs = 0
        self.captured: Stream | None = None
        self.calls: list[tuple[str, torch.device]] = []  # in order

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *error: object) -> None:
        mains, copies = self.main_streams.values(), self.copy_streams.values()
        for stream in (*mains, self.side, *copies, *self.new_streams):
            stream.close()

    @contextlib.contextmanager
    def using(self, stream: Stream):
        current = self.local.__dict__.setdefault("streams", {})
        before = self.current_stream(stream.device)
        current[stream.device] = stream
        try:
            yield
        finally:
            current[stream.device] = before

    # The interface for pyparallel.

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self.host.owns(tensor.untyped_storage().data_ptr())

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.host.take(nbytes)

    def allocate(self, sizes: list[int], stream: Stream) -> list[torch.Tensor]:
        assert stream.device in self.devices
        return [self.pools[stream].take(nbytes) for nbytes in sizes]

    def relaxed(self, device: torch.device) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def is_idle(self, stream: Stream) -> bool:
        return False

    def copy_stream(self, device: torch.device) -> Stream:
        return self.copy_streams[device]

    def new_stream(self, device: torch.device) -> Stream:
        self.new_streams.append(Stream(self.compute_delay, device))
        return self.new_streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        current = self.local.__dict__.get("streams", {})
        return current.get(device, self.main_streams[device])

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        address = tensor.untyped_storage().data_ptr()
        for stream, pool in list(self.pools.items()):
            if pool.owns(address):
                return stream.device
        return None

    def holds(self, device: torch.device, tensor: torch.Tensor) -> bool:
        return self.device_of(tensor) == device

    def packs(self, device: torch.device) -> bool:
        return True

    def pack(self, slab: torch.Tensor, leaves: list, plan: Any) -> None:
        """Queue a kernel that packs on the current stream of the slab's device."""
        device = self.device_of(slab)
        assert device is not None
        assert all(self.device_of(leaf) == device for leaf in leaves)
        self.num_packs += 1
        parts = [(strided_memory(leaf), leaf.nbytes) for leaf in leaves]
        where = memory(slab.data_ptr(), slab.nbytes)

        def run() -> None:
            where[:] = 0
            for (part, nbytes), offset in zip(parts, plan.offsets, strict=True):
                where[offset : offset + nbytes] = part.reshape(-1)

        self.current_stream(device).queue(run)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        host, there = (src, dst) if self.is_pinned(src) else (dst, src)
        found = self.device_of(there)
        assert found == stream.device, f"a stream of {stream.device} touches {found}"
        if self.is_pinned(host):
            self.host.use(host.untyped_storage().data_ptr(), stream)
        else:
            assert host is dst, "a copy from memory that is not pinned"
        self.num_copies += 1
        self.calls.append(("copy", stream.device))
        stream.queue(
            np.copyto,
            memory(dst.data_ptr(), dst.nbytes),
            memory(src.data_ptr(), src.nbytes),
        )

    def record(self, stream: Stream) -> threading.Event:
        return record(stream)

    def wait(self, stream: Stream, event: threading.Event) -> None:
        self.calls.append(("wait", stream.device))
        stream.queue(event.wait, 30)

    def wait_on_host(self, event: threading.Event) -> None:
        assert event.wait(30)

    def is_done(self, event: threading.Event) -> bool:
        return event.is_set()

    def is_capturing(self, stream: Stream) -> bool:
        return stream is self.captured

    def has_engine(self, device: torch.device) -> bool:
        return False

    def fence(self, device: torch.device) -> TorchFence:
        return TorchFence(self.current_stream(device), self)

    def keep(self, tensors: list[torch.Tensor], stream: Stream) -> None:
        for tensor in tensors:
            # As in torch: the whole block.
            address = tensor.untyped_storage().data_ptr()
            pools = list(self.pools.values())
            next(pool for pool in pools if pool.owns(address)).use(address, stream)

    # The work of a model.

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of the current stream."""
        return self.allocate([nbytes], self.current_stream(device))[0]

    def put(self, tensor: torch.Tensor, device: torch.device = DEVICE) -> torch.Tensor:
        """Return a tensor of the same strides on a device, written by a kernel."""
        reach = tensor.untyped_storage().nbytes()
        block = self.empty(reach, device)
        there = torch.empty(0, dtype=tensor.dtype).set_(
            block.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        values = strided_memory(tensor).copy()
        where = strided_memory(there)
        self.current_stream(device).queue(lambda: np.copyto(where, values))
        return there

    def read(
        self,
        tensor: torch.Tensor,
        into: list[bytes],
        device: torch.device = DEVICE,
    ) -> None:
        """Queue a kernel that reads a tensor on the current stream."""
        where = memory(tensor.data_ptr(), tensor.nbytes)
        self.current_stream(device).queue(lambda: into.append(where.tobytes()))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Queue a kernel that writes a tensor on the current stream."""
        where = memory(tensor.data_ptr(), tensor.nbytes)
        self.current_stream(DEVICE).queue(where.fill, value)


class PinnedRing(FakeDevice):
    """It reads ring memory in place, but the ring reuses dropped memory at once."""

    def __init__(self, **delays: float) -> None:
        super().__init__(**delays)
        self.ring = Pool()

    def is_pinned(self, tensor):
        address = tensor.untyped_storage().data_ptr()
        return self.ring.owns(address) or super().is_pinned(tensor)
