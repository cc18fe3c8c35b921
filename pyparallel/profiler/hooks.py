"""Puts a `Watch` to where it sees something; see Note [what is replaced ...] there."""

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
from ..prefetch.iterator import Pass
from .recorder import VARIABLE, Settings, Watch, batch_number


@contextmanager
def watching(settings: Settings) -> Iterator[Watch]:
    """Watch this process, and those it starts, within a block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(asdict(settings))
    watch = Watch(settings)
    undo = install(watch)
    try:
        yield watch
    finally:
        watch.stop()
        undo()
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def install(watch: Watch) -> Callable[[], None]:
    """Let a watch see what happens; return a function that undoes it."""
    originals = [(cls, name, getattr(cls, name)) for cls, name in replaced()]
    for cls, name, original in originals:
        new = _fetch if name == "fetch" else _next
        setattr(cls, name, new(original, watch))
    before = tracing.surround(None)

    def around(name: str, inner: tracing.Range) -> Any:
        return watch.range(name, inner if before is None else before(name, inner))

    tracing.surround(around)

    def undo() -> None:
        tracing.surround(before)
        for cls, name, original in originals:
            setattr(cls, name, original)

    return undo


def replaced() -> list[tuple[Any, str]]:
    """Return the methods that are replaced: classes and names."""
    fetchers, iterators = (MapFetcher, IterableFetcher), (LoaderIter, Pass)
    return [(cls, "fetch") for cls in fetchers] + [
        (cls, "__next__") for cls in iterators
    ]


def _next(original: Any, watch: Watch) -> Any:
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        return watch.wait(iterator, functools.partial(original, iterator))

    return next_batch


def _fetch(original: Any, watch: Watch) -> Any:
    @functools.wraps(original)
    def fetch(fetcher: Any, index: Any) -> Any:
        if not watch.fetches():
            return original(fetcher, index)
        collate_fn = fetcher.collate_fn

        def collate(samples: Any) -> Any:
            with watch.range("collate", nullcontext()):
                return collate_fn(samples)

        fetcher.collate_fn = collate
        try:
            with watch.range("fetch", nullcontext(), batch=batch_number()):
                return original(fetcher, index)
        finally:
            fetcher.collate_fn = collate_fn

    return fetch


def install_if_asked() -> None:
    """Watch this process to its end if `VARIABLE` says that it is part of a profile."""
    text = os.environ.get(VARIABLE)
    if text:
        install(Watch(Settings(**json.loads(text))))
