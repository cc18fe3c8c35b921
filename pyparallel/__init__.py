"""PyTorch data loading for samples of different sizes, with one copy to the device.

`DataContainer` sets how a field is batched, `collate` makes the batch, `scatter` copies
it to devices, and the wrappers run the training step on it. ``pyparallel doctor``
reports the backend in use and the reason for it.
"""

from . import memory
from .batch.collate import collate
from .batch.collate_fields import Collate
from .batch.container import DataContainer
from .batch.pad_stack import pad_stack
from .batch.padding import Padded, Padding
from .batch.ragged import Ragged
from .batch.rules import Concat, List, Pad, Stack
from .batch.unpad import resize_mask, unpad
from .core import versions as _versions
from .core.errors import BatchWarning, Error, LoaderWarning
from .images.preprocessor import ImagePreprocessor
from .loader.data_loader import DataLoader
from .loader.sample_random import sample_random
from .loader.stats import LoaderStats
from .parallel.data_parallel import MMDataParallel
from .parallel.distributed import MMDistributedDataParallel
from .parallel.parallel_apply import parallel_apply
from .parallel.registry import MODULE_WRAPPERS, is_module_wrapper
from .parallel.replicate import replicate
from .prefetch.pre_data_loader import PreDataLoader
from .profiler.hooks import install_from_environment as _install_profiler
from .profiler.profile import profile
from .sampler.distributed_eval_sampler import DistributedEvalSampler
from .sampler.size_batch_sampler import SizeBatchSampler
from .sampler.size_batcher import SizeBatcher
from .scatter_gather.gather import gather
from .scatter_gather.scatter import scatter, scatter_kwargs
from .scatter_gather.to_host import HostCopy, start_to_host, to_host
from .transfer.static import StaticBatches

__version__ = _versions.VERSION

_install_profiler()

__all__ = [
    "MODULE_WRAPPERS",
    "BatchWarning",
    "Collate",
    "Concat",
    "DataContainer",
    "DataLoader",
    "DistributedEvalSampler",
    "Error",
    "HostCopy",
    "ImagePreprocessor",
    "List",
    "LoaderStats",
    "LoaderWarning",
    "MMDataParallel",
    "MMDistributedDataParallel",
    "Pad",
    "Padded",
    "Padding",
    "PreDataLoader",
    "Ragged",
    "SizeBatchSampler",
    "SizeBatcher",
    "Stack",
    "StaticBatches",
    "collate",
    "gather",
    "is_module_wrapper",
    "memory",
    "pad_stack",
    "parallel_apply",
    "profile",
    "replicate",
    "resize_mask",
    "sample_random",
    "scatter",
    "scatter_kwargs",
    "start_to_host",
    "to_host",
    "unpad",
]


def __dir__() -> list[str]:
    """Return the public names, for completion; internal modules stay hidden."""
    imported = {"mmcv", "mmengine"}.intersection(globals())
    return sorted([*__all__, *imported, *(n for n in globals() if n[:2] == "__")])
