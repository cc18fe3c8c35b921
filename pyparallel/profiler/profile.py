"""profile: where the time of some steps goes, recorded in a block and drawn."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import check_int
from .hooks import watching
from .recorder import VARIABLE, Settings


class Profile:
    """What a block that was profiled has given; complete when the block has ended.

    Attributes:
        files: what was written, a page for a browser first.
        text: the report for a terminal: the verdict, the parts of a step, what to
            change first.
        verdict: one line, as of `LoaderStats`: ``input-bound`` or ``compute-bound``.
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
    """Record the steps within a block, and draw where their time goes.

    As ``pyparallel profile -- python train.py`` does for a whole script. Loaders of
    torch and of pyparallel are seen, with their workers, and `collate`, `scatter` and
    the steps of the wrappers. Workers must be started within the block: an iterator,
    or persistent workers, of before it are waited for but not looked into.

    Args:
        out: the folder for ``profile.html``, ``.svg``, ``.json`` and, if matplotlib is
            installed, ``.png``. It is made; files of these names are replaced.
        steps: how many steps to look at. The block goes on behind them, unwatched.
        warmup: how many steps before them are left out.
        synchronize: end a step when the accelerator has done what it was given, if one
            is in use. Without, a loop that only queues work seems to wait for input.

    Yields:
        A `Profile`, filled in at the end of the block, also if an exception ends it.

    Raises:
        TypeError: ``steps`` or ``warmup`` is not an integer.
        ValueError: ``steps`` is below 1, or ``warmup`` below 0.
        RuntimeError: this process is being profiled already; or no step was seen.
        OSError: the folder cannot be written.
    """
    steps = check_int(steps, 1, "profile: steps")
    warmup = check_int(warmup, 0, "profile: warmup")
    if VARIABLE in os.environ:
        raise RuntimeError(
            "profile: a process must be profiled by one at a time, but this one is "
            "already, by a block around this one or by the command. Leave one away."
        )
    found = Profile()
    with tempfile.TemporaryDirectory(prefix="pyparallel-profile-") as folder:
        settings = Settings(folder, steps, warmup, synchronize)
        failed = True
        try:
            with watching(settings):
                yield found
            failed = False
        finally:
            seen = _finish(found, Path(folder), Path(out))
    if not seen and not failed:
        raise RuntimeError(
            "profile: two steps or more must be made within the block, but none was "
            "seen. Iterate over a loader of torch or pyparallel there."
        )


def _finish(found: Profile, folder: Path, out: Path) -> bool:
    """Write what was seen; return False if that is nothing."""
    from . import report  # only who draws has to have it

    written = report.write(report.gather(folder, None), out)
    for each in written[:1]:
        found.files, found.verdict = each.files, each.summary.verdict
        found.text = report.text(each)
    return bool(written)
