"""The kept threads of ``parallel_apply``."""

from __future__ import annotations

import threading

import torch

from pyparallel.parallel._thread_pool import Worker

HOST = torch.device("cpu")
TWO = ["cpu", "cpu"]
SOON = 30.0


def ours() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if isinstance(t, Worker)}
