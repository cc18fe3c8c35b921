"""The known reasons for which a peer is faster.

A loss without an entry is reported as ``reason unknown``, in the table and at the end
of the run. Add an entry only after the reason has been found.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

UNKNOWN = "reason unknown"
#: Instead of an unknown reason, if some rounds are no loss.
DRAW = "a draw: in a quarter of the rounds the peer is slower or equal"


class Reason(NamedTuple):
    """The reason for a loss, with patterns of the names to which it applies."""

    case: str
    peer: str
    ours: str
    text: str


_ONE_CASE = (
    "The peer is written for this one case. It checks no containers, dtypes, devices "
    "or gradients, and its errors do not name the wrong sample. mmcv has these checks "
    "and is slower."
)
_SAME_WAY = (
    "pyparallel's Python path does the same work, one fill and one copy, after a check "
    "of every sample."
)
_NEW_FLOATS = (
    "Both write a new batch of floats, whose page faults take most of the time: see "
    "the clone of the output. With an allocator that keeps memory, the peer is slower."
)
_LEFT_OVERS = (
    "malloc places the peer's batch in the memory of the padded copies of the previous "
    "call. pyparallel makes no such copies, so the memory of its batch is always new."
)
_COLUMN = (
    "Both spend their time in torch.stack. pyparallel's Python path first checks the "
    "types of each column."
)
_NO_PADDING = (
    "Without padding, torch.stack is all of the work. pyparallel checks the containers "
    "before it."
)
_RECURSION = (
    "The peer supports only dicts, lists, tuples and tensors. pyparallel also finds "
    "chunks, compares all leaves, and names the leaf that differs."
)
_MANY_CALLS = (
    "pyparallel's Python path calls torch several times for each sample or leaf "
    "(slice, copy, padding, view). The peer makes one or two calls."
)
_FRESH_PAGES = (
    "Each operator allocates megabytes. With the default allocator these are fresh "
    "pages, and the threads of a process wait for each other to get them."
)
_LESS_SORTING = (
    "The peer sorts along one dimension, or divides samples into fixed groups. It does "
    "not balance ranks. Its batches have more padding or less balanced ranks."
)

_CHEAP_SAMPLES = (
    "A worker sends a sample in more time than it needs to make it. Without workers or "
    "with threads nothing is sent; ours with threads is in the same table."
)
_NATIVE_PEER = (
    "The peer pads with the compiled extension, and casts with torch. pyparallel's "
    "Python path makes several calls of torch for each sample."
)
_SHORT_ROWS = (
    "The rows have 12 to 16 values. pyparallel converts each row while it copies it, "
    "which takes longer than one conversion of the whole batch, as the rows without a "
    "cast in this table show."
)
_DECODER = (
    "DALI decodes and normalises with operators of its own. On two cores the CPU time "
    "decides, and DALI's epoch takes less of it than a loop without workers: see the "
    "column CPU."
)
_STEP_ALONE = (
    "No loader is the limit: the training waits for batches in at most 1 % of the "
    "epoch. The rest is the step, which differs by as much between processes."
)
_START = (
    "New processes start an interpreter and import torch. Threads of the same process "
    "need neither; ours with threads is in the same table."
)
_GIL = (
    "The sample is a loop in Python, so the GIL lets one thread run at a time. Ours "
    "with processes is in the same table."
)

_GIL_ALONE = (
    "The sample is a loop in Python, so the GIL lets one thread run at a time, and a "
    "loop without workers takes as long. Loaders add only switches between threads."
)
_FAULTS_OF_STEP = (
    "The time of the step decides, and malloc decides on the step. By default it "
    "returns the memory of a step to the system, or keeps it if blocks of the size of "
    "a batch were freed before: see the column of page faults. The epochs with memory "
    "kept have another order."
)
_DECODER_ALONE = (
    "The decoder uses both cores for the whole epoch, and takes the same CPU time with "
    "both. Loaders of pyparallel that are equal differ by as much: see docs/threads.md."
)
_TORCHS_COLLATE = (
    "pyparallel's Python path calls torch's default_collate. It also counts the batch, "
    "and keeps the position for a resume."
)
_ONLY_A_THREAD = (
    "A batch has 64 bytes, so there is no copy and no step beside which the thread "
    "could work. PreDataLoader counts each batch, and notes its position, once more."
)

#: Neither mmcv nor mmengine: they have no special cases, so a loss to them is a defect.
_NOT_MM = "[!m]*"

#: The first entry that matches counts.
REASONS = (
    Reason("tiny", _NOT_MM, "ours, Python", _ONE_CASE),
    Reason("ragged labels", _NOT_MM, "ours, *", _ONE_CASE),
    Reason("many small fields", "*", "ours, Python", _COLUMN),
    Reason("equal shapes", "torch.stack*", "ours, *", _NO_PADDING),
    Reason("equal shapes", "torch default_collate", "ours, *", _NO_PADDING),
    Reason("equal shapes", "mmengine*", "ours, *", _NO_PADDING),
    Reason("one big", "mmengine*", "ours, *", _NO_PADDING),
    Reason("one big", "torch.stack*", "ours, *", _NO_PADDING),
    Reason("one big", "torch default_collate", "ours, *", _NO_PADDING),
    Reason("scatter *", "by hand*", "ours, *", _RECURSION),
    Reason("pack *", "by hand*", "ours, Python", _MANY_CALLS),
    Reason("many small", _NOT_MM, "ours, Python", _MANY_CALLS),
    Reason("glyph crops", _NOT_MM, "ours, Python", _MANY_CALLS),
    Reason("detection dict*", "by hand*", "ours, Python", _ONE_CASE),
    Reason("normalise and pad *", "pad as bytes*", "ours, Python", _NEW_FLOATS),
    Reason("one big", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("photos *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("detection *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("small *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("32 images near 224", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("detection *", "F.pad + stack", "ours, Python", _LEFT_OVERS),
    Reason("detection *", "mmengine*", "ours, Python", _LEFT_OVERS),
    Reason("*", "transformers", "ours, window=*", _LESS_SORTING),
    Reason("*", "mmdet, 2 groups", "ours, window=*", _LESS_SORTING),
    Reason("*", "torchvision, 8 groups", "ours, window=*", _LESS_SORTING),
    Reason("audio stream", "lhotse*", "ours, window=*", _LESS_SORTING),
    Reason("a table *", "*no workers", "*", _CHEAP_SAMPLES),
    Reason("photographs *sizes", "*2 threads", "*", _FAULTS_OF_STEP),
    Reason("equal images*", "DALI*", "*", _DECODER),
    Reason("equal images", "*2 threads", "*", _FAULTS_OF_STEP),
    Reason("texts *", "*", "*", _STEP_ALONE),
    Reason("* to *", "*pad_stack*", "ours, Python", _NATIVE_PEER),
    Reason("many small to *", "pad_stack, to(dtype)", "ours, native", _SHORT_ROWS),
    Reason("*, no workers", "torch's loader", "ours, Python", _TORCHS_COLLATE),
    Reason("*, PreDataLoader", "the loader alone", "ours, *", _ONLY_A_THREAD),
    Reason("threads: first batch*", "*threads", "our processes", _START),
    Reason("threads: * pure Python", "torch's processes", "ours, *", _GIL),
    Reason("threads: *", "torchdata's nodes*", "ours, Python", _MANY_CALLS),
    Reason("threads: * pure Python", "torchdata's nodes*", "*", _GIL_ALONE),
    Reason("threads: JPEG*", "torchdata's nodes*", "*", _DECODER_ALONE),
    Reason("torch: blur", "a loop, *", "ours", _FRESH_PAGES),
)


def reason(case: str, peer: str, ours: str) -> str:
    """Return the reason for which ``peer`` is faster than ``ours``, or `UNKNOWN`."""
    for each in REASONS:
        if all(map(fnmatchcase, (case, peer, ours), each[:3])):
            return each.text
    return UNKNOWN
