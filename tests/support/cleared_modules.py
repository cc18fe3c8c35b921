"""The last step of an interpreter's exit, done early: modules lose their globals.

Their order differs from program to program. So a script assigns a `Clearing` first: it
dies before all other objects of the script, and no later code finds any global.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


class Clearing:
    """Sets the globals of all modules of the package to None when it dies."""

    def __init__(self) -> None:
        self._write: Callable[[str], Any] = sys.stdout.write
        self._is_finalizing, self._collect = sys.is_finalizing, gc.collect
        self._modules = sys.modules

    def find(self) -> None:
        """Find the modules: before the exit, which forgets them."""
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
