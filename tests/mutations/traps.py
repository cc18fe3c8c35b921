"""Common defects of code between a dataset and a device, and their protections."""

from __future__ import annotations

from typing import NamedTuple


class Trap(NamedTuple):
    """One trap.

    Attributes:
        text: the defect.
        protection: the protection against it, and the note that explains it.
        rest: the part that no mutation can show, and the reason.
    """

    text: str
    protection: str
    rest: str = ""


#: By the name that mutations refer to.
TRAPS: dict[str, Trap] = {
    "the consumer reads too early": Trap(
        "A copy is queued on one stream and its result is read on another. The "
        "reading stream is the stream that is current at consumption. It may differ "
        "for each batch, thread and device.",
        "One event is recorded after all copies of a batch. `wait` makes the stream "
        "that is then current wait for this event (Notes [slab lifetime], [streams of "
        "jobs], [transformed batches]). The same list of copies is started and waited "
        "for.",
    ),
    "the producer writes too early": Trap(
        "The memory of a new batch was just freed, but its last reader is still "
        "queued.",
        "An event is recorded on the stream that owns the memory, after the "
        "allocation, and the copy waits for it. The stream also waits for copies that "
        "fail, and for copies whose `wait` is never called.",
    ),
    "memory of another stream": Trap(
        "A freed block returns to the stream that allocated it, and is allocated "
        "there again while other streams still read it.",
        "Memory is allocated on the consumer's stream. If another stream uses it, "
        "`record_stream` informs the allocator.",
    ),
    "recorded memory grows": Trap(
        "If a second stream is recorded for a block, the allocator frees the block "
        "late, and only when it checks its events. Memory grows.",
        "A stream is recorded only if it uses a batch without owning its memory, and "
        "for the results of a transform.",
    ),
    "a new stream for every epoch": Trap(
        "Each stream has its own memory pool, and torch has only 32 streams.",
        "The whole process uses one copy stream for each device and direction.",
    ),
    "a stream of another device or of a captured graph": Trap(
        "A stream belongs to one device. While a graph is captured from a stream, no "
        "other work may use the stream.",
        "Streams are stored by device. Before any work is queued, a stream is checked "
        "for capture.",
        "A test of the sources checks that each call of the CUDA runtime first "
        "selects the device of its stream. Only a machine with several GPUs can show "
        "the effect.",
    ),
    "the default stream": Trap(
        "The legacy default stream waits for all other streams, and batched copies "
        "fail on it.",
        "Copies use streams of torch's pool, one for each direction, and explicit "
        "events.",
        "A batch of copies is sent one by one on the legacy stream; only a GPU can "
        "show this.",
    ),
    "copies that only look asynchronous": Trap(
        "A non-blocking copy of pageable memory is staged by the driver and waits for "
        "earlier work.",
        "Only pinned memory is read in place; every source is checked. All other "
        "sources are packed into pinned blocks.",
    ),
    "results read before they arrive": Trap(
        "The host reads a pinned buffer whose copy is still queued.",
        "Reading the handle of `to_host` waits for its event (Note [copies to the "
        "host]).",
    ),
    "pinned memory reused too early": Trap(
        "A block is written again while a copy still reads it. torch tracks only its "
        "own blocks. An event that is recorded when memory is freed comes too late.",
        "Each block, and each source that is read in place, is kept until its own "
        "event has completed. The event is recorded directly after the copy (Notes "
        "[staging lifetime], [in-place sources], [copies of dropped batches]).",
    ),
    "sources that change or are freed": Trap(
        "The user changes or frees a tensor directly after sending it.",
        "When `send` returns, packed sources may be changed. Sources that are read in "
        "place are kept alive, and the documentation says that they must not change.",
    ),
    "pinned memory without a limit": Trap(
        "Allocators round up, never split blocks, and never return memory to the "
        "system. Pinning is slow and limited.",
        "Rings, blocks, results, caches and queues have a limit in bytes or batches. "
        "At the limit, the caller waits or uses other memory, and a counter records "
        "it (Notes [staging limit], [idle blocks], [alive results]).",
    ),
    "tensors without elements": Trap(
        "A null address must not be offset, copied or pinned. A CUDA error that is "
        "not fetched appears at a later call.",
        "For zero bytes, no work is queued and no address is used. The only place "
        "that launches kernels also fetches the last error.",
    ),
    "misaligned slots and views that keep slabs alive": Trap(
        "Vector loads and complex128 need alignment to 16 bytes, and views need a "
        "multiple of their item size. Each view keeps its whole slab alive.",
        "Slots start at multiples of 64 bytes and never overlap, also in plans from "
        "outside. If most of a span is other data, the leaves are packed instead.",
    ),
    "non-temporal stores": Trap(
        "Non-temporal stores need a fence before another thread or device reads. Some "
        "CPUs lack the instructions.",
        "Every worker ends with a fence. The instruction set is chosen at run time, "
        "with a portable version for other CPUs.",
        "On x86 a missing fence does not change the bytes, so the test counts fences.",
    ),
    "tensors with more state than their bytes": Trap(
        "Tensors can have gradients, tangents or a subclass, or be quantized, "
        "conjugated, expanded or sparse. Arrays can have negative strides or be "
        "read-only.",
        "torch's own operators handle each of these, or it is resolved first, or an "
        "error names it.",
    ),
    "write-combined memory": Trap(
        "The CPU reads it slowly, and some machines copy it slowly.",
        "The library never allocates it; a test checks the sources for this.",
    ),
    "devices in workers": Trap(
        "A worker that uses a device creates a context, or fails after a fork. The "
        "first pinned allocation during a fork can deadlock both processes.",
        "Querying a device does not initialize it. A forked child of an engine gets "
        "an error. First-time initialization runs in the consumer's thread.",
        "A parent with a live CUDA context and its workers: see the tests named "
        "*_cuda.py.",
    ),
    "locks and threads across a fork": Trap(
        "A child inherits the locks of its parent in their current state, and none of "
        "its threads.",
        "Pools, locks, caches and rings store their process id and start anew in a "
        "child. Parallel loops of a child run on one thread. A child does not touch "
        "the pending copies of its parent.",
    ),
    "pinned private memory across a fork": Trap(
        "Private pages that are pinned are copied at a fork, or lost.",
        "Pinned memory that a child inherits is a shared mapping of a memfd.",
    ),
    "pages unpinned too early or twice": Trap(
        "Pages are pinned for one process. They must not be unpinned or unmapped "
        "while a copy reads them.",
        "Only the parent pins pages, when a batch first arrives. It unpins before it "
        "pins more, and finally after the last event.",
    ),
    "shared memory that is short or remains": Trap(
        "/dev/shm is small in containers, and a write beyond its limit ends in "
        "SIGBUS. Names in it remain after a process is killed.",
        "Memory has no name and is reserved before it is written. Programs that a "
        "worker starts do not inherit it.",
    ),
    "slabs whose holder has died or changed": Trap(
        "A worker dies while it holds a slab, a consumer keeps all slabs, or a tensor "
        "is still alive when its slab is used again.",
        "The header records the holder of each slab (Notes [slot holders], [ring "
        "lifetime]). A slab is free when its last tensor has been freed. Slabs of "
        "dead workers are reclaimed. Workers never wait for a full ring.",
    ),
    "a descriptor for each tensor": Trap(
        "torch sends one file descriptor for each tensor.",
        "A batch in the ring uses no descriptor, and a batch outside the ring uses "
        "one. Both processes close it.",
    ),
    "errors and tensors that cannot be pickled": Trap(
        "A pickling error is raised in a thread of the queue, and the parent waits "
        "for ever.",
        "Batches and errors are pickled in the worker's main thread. If an error "
        "cannot be pickled, another error that describes it is sent.",
    ),
    "errors in the wrong place": Trap(
        "An error in a thread or a worker is lost, comes late, or looks like the end "
        "of the data, or a stale batch follows it.",
        "Every error is raised in place of its batch or item, and ends the iterator. "
        "The library keeps it no longer than its receiver does.",
    ),
    "samples lost or used twice": Trap(
        "A sample that raises ends the run, or changes the number of batches of one "
        "rank. A resumed epoch repeats samples.",
        "`on_error` never changes the number of batches, and never hides errors of the "
        "machine. An epoch continues with the samples that no rank has used.",
    ),
    "waits without an end": Trap(
        "A blocking put or get continues after its partner has ended. A lock is lost "
        "with its process.",
        "One condition also covers the request to stop. Waits for other processes use "
        "short timeouts and check that these are alive (Note [lifetime of the "
        "thread]).",
    ),
    "the end of the interpreter": Trap(
        "Daemon threads in native code abort the process. Other threads are joined "
        "before they can be stopped. Destructors call a driver that is already shut "
        "down.",
        "`atexit` stops and joins daemon threads. Memory that a copy still reads is "
        "never freed (Note [threads at the end]).",
    ),
    "locks held while waiting": Trap(
        "Waiting with the GIL or a mutex held stops all other threads.",
        "Long copies release the GIL. Mutexes are held for list operations only.",
        "`tests/support/gil.py` detects C calls that hold the GIL; it has its own "
        "test.",
    ),
    "modes of threads": Trap(
        "Gradient mode, inference mode, autocast with dtype and cache, the default "
        "device and context variables belong to a thread.",
        "They are recorded at the call and entered in the thread. Changes by a call "
        "are undone afterwards (Note [thread state]).",
    ),
    "threads inside of operators": Trap(
        "Each of several threads computes with all cores.",
        "Jobs on the host share the caller's number of threads. The caller gets it "
        "back at the end.",
    ),
    "containers and tensors that change during a copy": Trap(
        "The user or another thread changes a batch during the walk or the copy. Or a "
        "list contains itself.",
        "The walk of the extension runs no Python code, keeps a reference to every "
        "leaf, and goes 200 levels deep. Each tensor is read once, with the GIL held "
        "(Note [read once]), and compared with the plan.",
        "Free-threaded Python is not supported: the extension does not declare it.",
    ),
    "leaves that are already in place": Trap(
        "Leaves that are already on the device, or should stay on the host, are "
        "copied anyway.",
        "Such leaves, and values that are not tensors, are returned unchanged.",
    ),
    "padding before or after normalisation": Trap(
        "mmcv pads raw pixels, and mmengine pads normalised pixels. Each sample may "
        "have its own padding value.",
        "Both orders are supported, with the value of each sample, in the order of "
        "its channels.",
    ),
    "padding values and sizes that do not fit": Trap(
        "The dtype cannot hold a padding value, a size exceeds 64 bits, or pad_dims "
        "comes from a pickle.",
        "Arithmetic is checked, in 64 bits. Values are converted as `fill_` does, or "
        "an error names them.",
    ),
    "rounding": Trap(
        "A reciprocal, a fused operation or a wrong tie changes the last bit.",
        "With `exact`, each operation is rounded as in IEEE 754, and ties go to even. "
        "Tests compare bits with numpy and torch.",
    ),
    "an oracle with faults": Trap(
        "torch's `_foreach_copy_` was wrong for mixed dtypes, and test data of zeros "
        "hide most faults.",
        "tests/support/oracle.py uses loops over elements, and the test data are "
        "random bytes.",
        "This concerns the tests, not the code.",
    ),
    "empty, single, equal and uneven batches": Trap(
        "A batch is empty, has one sample, has samples of equal shape, or does not "
        "divide evenly by its devices.",
        "All fields of a batch use one partition. If a field would be dropped, cut or "
        "split differently, an error names it.",
    ),
    # Traps of the promises in reliability.md.
    "bytes of an earlier batch": Trap(
        "Reused memory shows an old batch in padding, gaps or slack.",
        "Every byte of a slab is written: leaves, and zeros between them.",
    ),
    "memory that was freed": Trap(
        "Sharding frees the storage under a tensor, and torch's operators still read "
        "there.",
        "Every source is checked against its storage before it is read.",
    ),
    "an output that is an input, or too small": Trap(
        "A copy overwrites its own source, or writes beyond the end of its output.",
        "Before the first byte is written, the output is compared with all sources, "
        "and its size with the plan.",
    ),
    "numbers from other processes": Trap(
        "The header of a ring is written by other processes.",
        "Each call checks it like user input.",
    ),
    "samples that are lost or used twice": Trap(
        "Ranks have different numbers of batches, which stops a run. A sampler with "
        "batches of similar sizes loses its last samples, or a resumed run uses "
        "samples twice.",
        "All ranks calculate one plan. A state has the position in it, also of a "
        "stream and of a run with other ranks. Property tests count each sample.",
    ),
    "defects of mmcv and mmengine": Trap(
        "mmcv and mmengine lose container types, bypass torch's context around a "
        "step, and let ranks or replicas train different models.",
        "Each known defect of this kind is fixed, and has a test.",
    ),
}
