"""Record the steps within a block, and report where their time goes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import check_int
from .hooks import is_active, recording
from .recorder import Settings


class Profile:
    """The report of a profiled block; it is filled in at the end of the block.

    Attributes:
        files: the written files, with the HTML page first.
        text: the report for a terminal: the verdict, the parts of a step, and the most
            promising changes.
        verdict: one line that begins with ``input-bound`` or ``compute-bound``, as in
            `LoaderStats`.
    """

    files: tuple[Path, ...] = ()
    text: str = ""
    verdict: str = ""

    def __str__(self) -> str:
        """Return ``text``."""
        return self.text


@contextmanager
def profile(
    out: str | os.PathLike[str] = "pyparallel-profile",
    *,
    steps: int = 30,
    warmup: int = 5,
    synchronize: bool = True,
) -> Iterator[Profile]:
    """Record the steps within a block, and report where their time goes.

    ``pyparallel profile -- python train.py`` does the same for a whole script. Recorded
    are loaders of torch and of pyparallel with their workers, `collate`, `scatter`, and
    the steps of the wrappers. The block must start the workers: for iterators and
    persistent workers that were started before the block, only waits are recorded.

    Args:
        out: the folder for ``profile.html``, ``.json`` and ``.trace.json``, and with
            matplotlib also ``.svg`` and ``.png``. It is created; existing files with
            these names are replaced.
        steps: the number of steps to record. The block continues after them.
        warmup: the number of steps to leave out before them.
        synchronize: if an accelerator is in use, end a step when it has finished its
            work. Otherwise a loop that only queues work seems to wait for input.

    Yields:
        A `Profile`. It is filled in at the end of the block, also after an exception.

    Raises:
        TypeError: ``steps`` or ``warmup`` is not an integer.
        ValueError: ``steps`` is below 1, or ``warmup`` below 0.
        RuntimeError: another profile of this process is active, or no step was
            recorded.
        OSError: the folder cannot be written.
    """
    steps = check_int(steps, 1, "profile: steps")
    warmup = check_int(warmup, 0, "profile: warmup")
    if is_active():
        raise RuntimeError(
            "profile: profiles of a process must not overlap, but one is active: an "
            "outer block, or the command pyparallel profile. Remove one of them."
        )
    found, path = Profile(), Path(out)
    absolute = path.absolute()
    with tempfile.TemporaryDirectory(prefix="pyparallel-profile-") as folder:
        settings = Settings(folder, steps, warmup, synchronize)
        failed = True
        try:
            with recording(settings):
                yield found
            failed = False
        finally:
            if path.absolute() != absolute:  # the block has called os.chdir()
                path = absolute
            has_steps = _finish(found, Path(folder), path)
    if not has_steps and not failed:
        raise RuntimeError(
            "profile: the block must contain at least two steps, but none was "
            "recorded. Iterate over a loader of torch or pyparallel in the block."
        )


def _finish(found: Profile, folder: Path, out: Path) -> bool:
    """Write the report; return False if no step was recorded."""
    from . import report  # imported on use: `import pyparallel` stays fast

    written = report.write(report.gather(folder, None), out)
    for each in written[:1]:
        found.files, found.verdict = each.files, each.summary.verdict
        found.text = report.text(each)
    return bool(written)
