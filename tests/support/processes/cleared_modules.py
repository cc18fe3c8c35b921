"""Simulate the last step of an interpreter's exit early: clear the globals of modules.

The order of modules differs between programs. So a script first assigns a `Clearing`:
it is freed before all other objects of the script, and later code finds no globals.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


class Clearing:
    """Sets the globals of all modules of the package to None when it is freed."""

    def __init__(self) -> None:
        self._write: Callable[[str], Any] = sys.stdout.write
        self._is_finalizing, self._collect = sys.is_finalizing, gc.collect
        self._modules = sys.modules

    def find(self) -> None:
        """Find the modules before the exit, which removes them."""
        self._globals = [
            vars(module)
            for name, module in self._modules.items()
            if name.partition(".")[0] == "pyparallel"
        ]

    def __del__(self) -> None:
        """Clear them, as ``finalize_modules`` of CPython does."""
        for names in self._globals:
            for name in names:
                if name != "__builtins__":
                    names[name] = None
        self._collect()
        self._write(f"{len(self._globals) > 20} {self._is_finalizing()}\n")
