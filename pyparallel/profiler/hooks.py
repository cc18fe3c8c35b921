"""Install a `Recorder`; see Note [replaced methods] in `recorder`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from ..core import tracing
from ..core.torch_private import IterableFetcher, LoaderIter, MapFetcher
from ..prefetch.iterator import PrefetchIterator
from .recorder import VARIABLE, Recorder, Settings, batch_number


@contextmanager
def recording(settings: Settings) -> Iterator[Recorder]:
    """Record this process, and those that it starts, within a block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(asdict(settings))
    recorder = Recorder(settings)
    uninstall = install(recorder)
    try:
        yield recorder
    finally:
        recorder.stop()
        uninstall()
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def install(recorder: Recorder) -> Callable[[], None]:
    """Replace the methods that a recorder records; return a function that undoes it."""
    originals = [(cls, name, getattr(cls, name)) for cls, name in replaced_methods()]
    for cls, name, original in originals:
        wrap = _wrap_fetch if name == "fetch" else _wrap_next
        setattr(cls, name, wrap(original, recorder))
    before = tracing.wrap_spans(None)

    def surround(name: str, inner: tracing.Range) -> Any:
        return recorder.range(name, inner if before is None else before(name, inner))

    tracing.wrap_spans(surround)

    def uninstall() -> None:
        tracing.wrap_spans(before)
        for cls, name, original in originals:
            setattr(cls, name, original)

    return uninstall


def replaced_methods() -> list[tuple[Any, str]]:
    """Return the class and the name of every method that `install` replaces."""
    fetchers, iterators = (MapFetcher, IterableFetcher), (LoaderIter, PrefetchIterator)
    return [(cls, "fetch") for cls in fetchers] + [
        (cls, "__next__") for cls in iterators
    ]


def _wrap_next(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        return recorder.wait(iterator, functools.partial(original, iterator))

    return next_batch


def _wrap_fetch(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def fetch(fetcher: Any, index: Any) -> Any:
        if not recorder.records_fetches():
            return original(fetcher, index)
        collate_fn = fetcher.collate_fn

        def collate(samples: Any) -> Any:
            with recorder.range("collate", nullcontext()):
                return collate_fn(samples)

        fetcher.collate_fn = collate
        try:
            with recorder.range("fetch", nullcontext(), batch=batch_number()):
                return original(fetcher, index)
        finally:
            fetcher.collate_fn = collate_fn

    return fetch


def install_from_environment() -> None:
    """Record this process to its end if `VARIABLE` makes it a part of a profile."""
    text = os.environ.get(VARIABLE)
    if text:
        install(Recorder(Settings(**json.loads(text))))
