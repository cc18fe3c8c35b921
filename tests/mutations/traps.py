"""What code between a dataset and a device falls into, and what keeps it out here."""

from __future__ import annotations

from typing import NamedTuple


class Trap(NamedTuple):
    """One trap.

    Attributes:
        text: what goes wrong.
        protection: what is done about it, and where the long reason stands.
        rest: what no mutation can show here, and why.
    """

    text: str
    protection: str
    rest: str = ""


#: By the name that mutations use.
TRAPS: dict[str, Trap] = {
    "the consumer reads too early": Trap(
        "A copy is queued on one stream and read on another. The stream that reads is "
        "the one that is current at consumption, which may be another for each batch, "
        "thread and device.",
        "One event after all copies of a batch; `wait` makes the stream that is "
        "current then wait for it (Notes [slab lifetime], [streams of jobs], "
        "[transformed batches]). The list of copies that were started is the list to "
        "wait for.",
    ),
    "the producer writes too early": Trap(
        "The memory of a new batch was just given up, but its last reader is still "
        "queued.",
        "An event is recorded on the stream that owns the memory, after the "
        "allocation, and the copy waits for it. That stream waits for copies that fail "
        "or are never waited for.",
    ),
    "memory of another stream": Trap(
        "A block goes back to the stream that it was allocated on, and is handed out "
        "there while other streams still read it.",
        "Memory is allocated on the consumer's stream. Where it ends up on another "
        "one, the allocator is told of that.",
    ),
    "recorded memory grows": Trap(
        "A block that the allocator knows a second stream of comes back late, and only "
        "when it looks: memory grows.",
        "A stream is recorded only if it uses a batch and does not own its memory, and "
        "for the results of a transform.",
    ),
    "a new stream for every epoch": Trap(
        "Each stream has its own pool of memory, and there are 32 of them.",
        "One copy stream for each device and direction, for the whole process.",
    ),
    "a stream of another device, or under capture": Trap(
        "A stream belongs to a device. One that a graph is captured from must not meet "
        "work from outside.",
        "Streams are kept by device, and asked whether they are captured before "
        "anything is queued.",
        "That each call of the CUDA runtime makes the device of its stream current is "
        "held by a rule over its source; only several GPUs can show it.",
    ),
    "the default stream": Trap(
        "The legacy default stream waits for all others, and batched copies refuse it.",
        "Copies have streams of torch's pool, one for each direction, and explicit "
        "events.",
        "That a batch of copies goes one by one on the legacy stream needs a GPU.",
    ),
    "copies that only look asynchronous": Trap(
        "A non-blocking copy of pageable memory is staged by the driver and waits for "
        "earlier work.",
        "Only page-locked memory is read in place, which is asked for every source; "
        "all else is packed into page-locked blocks.",
    ),
    "results read before they arrive": Trap(
        "The host reads a page-locked buffer whose copy is still queued.",
        "Reading the handle of `to_host` waits for its event (Note [copies to the "
        "host]).",
    ),
    "page-locked memory used again too early": Trap(
        "A block is written again while a copy still reads it. torch tracks its own "
        "blocks only, and events recorded when memory is freed come too late.",
        "Each block, and each source that is read in place, is held until its own "
        "event has passed, recorded right behind the copy (Notes [staging lifetime], "
        "[in-place sources], [copies of dropped batches]).",
    ),
    "sources that change or die": Trap(
        "The user changes or drops a tensor as soon as it was sent.",
        "What is packed may be changed when `send` returns; what is read in place is "
        "held, and documented.",
    ),
    "page-locked memory without bounds": Trap(
        "Allocators round up, never split, and keep what they have; page-locking is "
        "slow and limited.",
        "Rings, blocks, results, caches and queues have a size in bytes or batches; at "
        "it one waits, or takes other memory, and a number says so (Notes [staging "
        "limit], [idle blocks], [alive results]).",
    ),
    "tensors of no size": Trap(
        "A null address must not be offset, copied or page-locked, and an error of "
        "CUDA that nobody fetches comes up later.",
        "Where there are no bytes nothing is queued and no address is touched. The one "
        "place that launches asks for the last error.",
    ),
    "slots that are misaligned, and what one view keeps": Trap(
        "Vector loads want 16 bytes, complex128 too, views a multiple of their item. "
        "All views of a slab keep all of it.",
        "Slots start at multiples of 64 bytes and never overlap, also in plans from "
        "outside. A span that is mostly something else is packed.",
    ),
    "stores past the caches": Trap(
        "Non-temporal stores need a fence before another thread or device reads. "
        "Instructions may be missing.",
        "Every worker ends with a fence. Kinds are chosen when the module runs, with a "
        "portable one for other CPUs.",
        "Nothing on x86 shows a missing fence in the bytes, so the test counts it.",
    ),
    "tensors that are more than their bytes": Trap(
        "Gradients, tangents, subclasses, quantized, conjugated, expanded and sparse "
        "tensors, arrays with negative strides or read-only.",
        "Each kind goes by torch's own operators, is resolved first, or is refused by "
        "name.",
    ),
    "write-combined memory": Trap(
        "The CPU reads it slowly, and some machines copy it slowly.",
        "Nobody asks for it; a rule over the sources holds that.",
    ),
    "devices in workers": Trap(
        "A worker that touches a device opens a context, or fails after a fork; the "
        "first page-locked allocation beside a fork can lock up both.",
        "Looking at a device does not wake it. A forked child of an engine is refused. "
        "What is first of its kind happens in the consumer's thread.",
        "A parent with a live CUDA context and its workers: tests/test_cuda*.py.",
    ),
    "locks and threads across a fork": Trap(
        "A child has the locks of its parent as they were, and none of its threads.",
        "Pools, locks, caches and rings know their process and begin anew; parallel "
        "loops of a child run on one thread; what the parent sent is left to it.",
    ),
    "page-locked private memory across a fork": Trap(
        "Private pages that are page-locked are copied at a fork, or get lost.",
        "What is page-locked and inherited is a shared mapping of a memfd.",
    ),
    "pages unlocked too early, or twice": Trap(
        "Pages are locked for one process, and must not be unlocked or unmapped while "
        "a copy reads them.",
        "Only the parent locks, when a batch first arrives; it unlocks before it locks "
        "more, and at the end behind the last event.",
    ),
    "shared memory that is short, or stays": Trap(
        "/dev/shm is small in containers: writing ends in SIGBUS. Names in it outlive "
        "a process that is killed.",
        "Memory has no name and is reserved before it is written; programs that a "
        "worker starts do not inherit it.",
    ),
    "slabs whose holder is gone, or somebody else": Trap(
        "A worker dies with a slab, a consumer keeps all of them, a tensor outlives "
        "the turn of its slab.",
        "The header says who holds what (Notes [slot holders], [ring lifetime]). A "
        "slab is free when its last tensor died; the slabs of the dead are taken back; "
        "a full ring is never waited for.",
    ),
    "a descriptor for each tensor": Trap(
        "torch sends one file descriptor for each tensor.",
        "A batch takes none, or one outside of the ring, and both ends close it.",
    ),
    "errors and tensors that do not pickle": Trap(
        "What does not pickle fails in a thread of the queue, and the parent waits for "
        "ever.",
        "Batches and errors are pickled in the worker's main thread; an error that "
        "cannot be is replaced by one that says so.",
    ),
    "an error out of its place": Trap(
        "An error in a thread or a worker is lost, comes late, passes for the end, or "
        "a stale batch follows it.",
        "Every error is raised in the place of its batch, or of its item, and ends the "
        "iterator. Nothing holds it longer than its receiver.",
    ),
    "waits that nobody ends": Trap(
        "A blocking put or get outlives its partner; a lock dies with a process.",
        "One condition with a wish to stop; waits for processes come in slices, each "
        "of which looks whether they live (Note [lifetime of the thread]).",
    ),
    "the end of the interpreter": Trap(
        "Daemons in native code abort the process, other threads are joined before "
        "anybody can stop them, destructors call a driver that is gone.",
        "`atexit` stops and joins daemons; what is still read is never given up "
        "(Note [threads at the end]).",
    ),
    "locks that are held while waiting": Trap(
        "Waiting with the interpreter's lock, or under a mutex, stops everybody else.",
        "Long copies run without the interpreter's lock; mutexes are held for list "
        "operations only.",
        "That a call of C which keeps the lock is found, and one that does not is not: "
        "the way to ask is tested itself (`tests/support/gil.py`).",
    ),
    "modes of a thread": Trap(
        "Gradient mode, inference mode, autocast with dtype and cache, the default "
        "device and context variables belong to a thread.",
        "They are taken down at the call and entered in the thread, and what a call "
        "leaves behind is put back (Note [thread state]).",
    ),
    "threads inside of operators": Trap(
        "Each of several threads computes with all cores.",
        "Jobs on the host share the number of their caller, who has it back.",
    ),
    "containers and tensors that change meanwhile": Trap(
        "The user, or another thread, changes a batch while it is walked or copied, or "
        "has put a list into itself.",
        "The walk of the extension runs no Python code, holds every leaf and goes 200 "
        "deep; tensors are read once, with the interpreter's lock (Note [read once]), "
        "and compared with what was planned.",
        "Free-threaded Python is not claimed: the extension does not declare it.",
    ),
    "leaves that are there already": Trap(
        "What is on the device, or is to stay on the host, is sent or copied all the "
        "same.",
        "Such leaves and everything that is no tensor are handed out as they are.",
    ),
    "padding before or after normalisation": Trap(
        "mmcv pads raw pixels, mmengine pads what is normalised; samples have values "
        "of their own.",
        "Both ways, with the value of each sample, in the order of its channels.",
    ),
    "padding values and sizes that do not fit": Trap(
        "A value that the dtype cannot hold, sizes beyond 64 bits, pad_dims from a "
        "pickle.",
        "Checked arithmetic in 64 bits; values are converted as `fill_` does, or "
        "refused by name.",
    ),
    "rounding": Trap(
        "A reciprocal, a fused operation or a wrong tie changes the last bit.",
        "With `exact` each operation is rounded as IEEE says; ties go to even; tests "
        "compare bits with numpy and torch.",
    ),
    "an oracle with faults": Trap(
        "torch's `_foreach_copy_` was wrong for mixed dtypes, and zeros hide most "
        "faults.",
        "tests/support/oracle.py is written in loops over elements, and cases are "
        "random bytes.",
        "It is a property of the tests, not of the code.",
    ),
    "empty, single, equal and uneven batches": Trap(
        "Nothing, one sample, equal shapes, a batch that its devices do not divide.",
        "One partition for all that is in a batch; what would be dropped, cut or dealt "
        "apart is an error that names it.",
    ),
    # What the promises in reliability.md add to these.
    "bytes of an earlier batch": Trap(
        "Recycled memory shows an old batch in padding, gaps or slack.",
        "Every byte of a slab is written: leaves, and zeros between them.",
    ),
    "memory that is gone": Trap(
        "Sharding frees the storage under a tensor, and torch's operators read there.",
        "Every source is compared with its storage before it is read.",
    ),
    "an output that is an input, or too small": Trap(
        "A copy writes over what it has still to read, or beyond what it was given.",
        "Where something is written is compared with all that is read, and its size "
        "with what was planned, before the first byte.",
    ),
    "numbers from other processes": Trap(
        "The header of a ring is written by other processes.",
        "It is checked like input at every call.",
    ),
    "defects of what is replaced": Trap(
        "mmcv and mmengine lose container types, go past torch's own bracket of a "
        "step, and let ranks or replicas train different models.",
        "Each such defect that is known is fixed, and has a test.",
    ),
}
