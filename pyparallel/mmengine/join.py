"""Initialize torch.distributed on import, in processes that torchrun started.

For configs: ``custom_imports = dict(imports=["pyparallel.mmengine.join"])``. mmengine's
Runner then uses the existing process group; its own initialization raises an error
without CUDA. The import does nothing in a process without torchrun's environment
variables, or if a process group exists. In Python code, call `init_dist` instead, which
also takes a backend.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from .launchers import init_dist

if {"RANK", "LOCAL_RANK"} <= os.environ.keys() and not dist.is_initialized():
    init_dist("pytorch")
