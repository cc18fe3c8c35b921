"""Why a peer is faster: the known reason of every loss in the table.

A loss that matches no entry is reported as ``reason unknown``, in the table and at the
end of the run; an entry is added only when the reason has been found.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

UNKNOWN = "reason unknown"


class Reason(NamedTuple):
    """The reason for a loss; patterns as for file names say where it holds."""

    case: str
    peer: str
    ours: str
    text: str


_ONE_CASE = (
    "written for the one case, it looks at nothing: no containers, no dtypes, no "
    "devices, no gradients, and a wrong sample is not named; mmcv, which looks too, is "
    "slower"
)
_SAME_WAY = (
    "pure Python does what this does, one fill and one copy, and has looked at every "
    "sample before"
)
_LEFT_OVERS = (
    "malloc lays this batch where the padded copies of the call before lay; ours makes "
    "no copies, so that in pure Python its memory is new to the process every time"
)
_COLUMN = (
    "both spend their time inside torch.stack; pure Python looks at the types of each "
    "column first"
)
_NO_PADDING = (
    "without padding to do torch.stack is all the work and all that this does; ours "
    "has looked at the containers first"
)
_RECURSION = (
    "knows dicts, lists, tuples and tensors and nothing else; ours finds out whether "
    "there are chunks, checks that all leaves agree, and can name the one that does not"
)
_MANY_CALLS = (
    "pure Python needs several calls into torch for each sample or leaf (a slice, a "
    "copy, the margins or a view), where this needs one or two"
)

#: Neither mmcv nor mmengine, which know no special case: a loss to them is a defect.
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
    Reason("detection dict", "by hand*", "ours, Python", _ONE_CASE),
    Reason("photos *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("detection *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("small *", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("32 images near 224", "new_full + copy_", "ours, Python", _SAME_WAY),
    Reason("detection *", "F.pad + stack", "ours, Python", _LEFT_OVERS),
    Reason("detection *", "mmengine*", "ours, Python", _LEFT_OVERS),
)


def reason(case: str, peer: str, ours: str) -> str:
    """Return why ``peer`` is faster than ``ours``, or that nobody knows."""
    for each in REASONS:
        if all(map(fnmatchcase, (case, peer, ours), each[:3])):
            return each.text
    return UNKNOWN
