"""The mutations: changes that each remove one protection from the code."""

from __future__ import annotations

from tests.mutations.entry import ALL, Mutation

__all__ = ["ALL", "Mutation"]
