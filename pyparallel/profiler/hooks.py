"""Install a `Recorder`; see Note [replaced methods] in `recorder`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from torch.utils.data.dataloader import DataLoader

from ..core import torch_private, tracing
from ..core.torch_private import LoaderIter
from ..loader import fetchers
from ..prefetch.iterator import PrefetchIterator
from ..prefetch.pre_data_loader import PreDataLoader
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
        setattr(cls, name, _WRAPPERS[name](original, recorder))
    before = tracing.wrap_spans(None)

    def surround(name: str, inner: tracing.Range) -> Any:
        return recorder.range(name, inner if before is None else before(name, inner))

    tracing.wrap_spans(surround)

    def uninstall() -> None:
        _installed.pop(recorder)
        tracing.wrap_spans(before)
        for cls, name, original in originals:
            setattr(cls, name, original)

    _installed[recorder] = uninstall
    return uninstall


def replaced_methods() -> list[tuple[Any, str]]:
    """Return the class and the name of every method that `install` replaces."""
    return [
        *((cls, "fetch") for cls in _FETCHERS),
        *((cls, "__next__") for cls in (LoaderIter, PrefetchIterator)),
        *((cls, "__iter__") for cls in (DataLoader, PreDataLoader)),
    ]


def _wrap_next(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        return recorder.wait(iterator, functools.partial(original, iterator))

    return next_batch


def _wrap_iter(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def begin(loader: Any) -> Any:
        options = vars(loader)
        init = options.get("worker_init_fn")
        if "worker_init_fn" in options:  # not in a PreDataLoader
            told = functools.partial(_init_worker, recorder.settings, init)
            options["worker_init_fn"] = told
        try:
            return recorder.begin(loader, functools.partial(original, loader))
        finally:
            if "worker_init_fn" in options:
                options["worker_init_fn"] = init

    return begin


def _wrap_fetch(original: Any, recorder: Recorder) -> Any:
    @functools.wraps(original)
    def fetch(fetcher: Any, index: Any) -> Any:
        if not recorder.records_fetches():
            return original(fetcher, index)
        collate_fn, made = fetcher.collate_fn, []

        def collate(samples: Any) -> Any:
            with recorder.range("collate", nullcontext()):
                batch = collate_fn(samples)
            made.append((samples, batch))
            return batch

        fetcher.collate_fn = collate
        try:
            with recorder.range("fetch", nullcontext(), batch=batch_number()):
                batch, held = recorder.run(lambda: original(fetcher, index))
        finally:
            fetcher.collate_fn = collate_fn
        if made and isinstance(made[0][0], list):
            recorder.write_batch(*made[0], held)
        return batch

    return fetch


#: The classes that read samples: of torch's iterators, and of this package's.
_FETCHERS: tuple[Any, ...] = (
    *(torch_private.MapFetcher, torch_private.IterableFetcher),
    *(fetchers.MapFetcher, fetchers.IterableFetcher),
)
_WRAPPERS = {"fetch": _wrap_fetch, "__next__": _wrap_next, "__iter__": _wrap_iter}

#: The recorders of this process, each with the function that removes it.
_installed: dict[Recorder, Callable[[], None]] = {}


def _init_worker(
    settings: Settings, init: Callable[[int], Any] | None, worker: int
) -> None:
    """Record a worker, and call its ``worker_init_fn``.

    A fork server and its workers have the environment of its start. So they lack the
    variable of a later profile, or belong to an earlier one.
    """
    if settings not in [recorder.settings for recorder in _installed]:
        for uninstall in reversed(list(_installed.values())):
            uninstall()
        install(Recorder(settings))
    if init is not None:
        init(worker)


def is_active() -> bool:
    """Return True if this process is a part of a profile that has not ended."""
    text = os.environ.get(VARIABLE, "")
    # A fork server may have the variable of a profile that has ended.
    return bool(text) and os.path.exists(json.loads(text)["folder"])


def install_from_environment() -> None:
    """Record this process to its end if `VARIABLE` makes it a part of a profile."""
    text = os.environ.get(VARIABLE)
    if text:
        install(Recorder(Settings(**json.loads(text))))
