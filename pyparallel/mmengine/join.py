"""Importing this joins the process group of torchrun, before a `Runner` tries to.

It is for configs: ``custom_imports = dict(imports=["pyparallel.mmengine.join"])``.
mmengine's Runner then finds the group and leaves it alone; its own way to one ends in
an error without CUDA. In a process that torchrun did not start, and in one that has a
group already, nothing is done. In Python, call `init_dist`, which takes a backend.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from .launchers import init_dist

if {"RANK", "LOCAL_RANK"} <= os.environ.keys() and not dist.is_initialized():
    init_dist("pytorch")
