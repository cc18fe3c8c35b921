"""The mutations: changes that each remove one protection from the code."""

from __future__ import annotations

from tests.mutations import (
    compat,
    extension,
    memory,
    native,
    streams,
    threads,
    values,
    workers,
)
from tests.mutations.entry import Mutation

__all__ = ["ALL", "Mutation"]

#: All mutations; their names are unique.
ALL: tuple[Mutation, ...] = (
    *streams.MUTATIONS,
    *memory.MUTATIONS,
    *workers.MUTATIONS,
    *threads.MUTATIONS,
    *values.MUTATIONS,
    *native.MUTATIONS,
    *extension.MUTATIONS,
    *compat.MUTATIONS,
)
