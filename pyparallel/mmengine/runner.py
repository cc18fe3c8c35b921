"""mmengine's Runner with the loader of this package.

It is imported at the first name of scope ``pyparallel``. Without mmengine, the class
has no use.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ..core.torch_private import TorchLoader
from ..loader.data_loader import DataLoader
from ..prefetch.pre_data_loader import PreDataLoader
from ._upstream import available, provides

if TYPE_CHECKING or not available:

    class _Runner:
        """mmengine's ``Runner``."""

        @staticmethod
        def build_dataloader(*args: Any, **kwargs: Any) -> Any:
            """Return the loader of a config."""

else:
    _Runner = importlib.import_module("mmengine.runner").Runner

_TORCH_ARGUMENTS = inspect.signature(TorchLoader).parameters
#: The arguments that only `DataLoader` of this package has.
_OWN_ARGUMENTS = inspect.signature(DataLoader).parameters.keys() - _TORCH_ARGUMENTS
#: The keys of a config from which mmengine builds an object, or that it uses itself.
_USED_BY_MMENGINE = {
    "dataset",
    "num_batch_per_epoch",
    "sampler",
    "batch_sampler",
    "batch_size",
    "drop_last",
    "worker_init_fn",
    "disable_subprocess_warning",
    "collate_fn",
}


@provides("RUNNERS")
class Runner(_Runner):
    """mmengine's Runner, which builds `pyparallel.DataLoader` from loader configs.

    A config selects it by name. The configs of loaders stay as they are, and may also
    have the arguments that only `pyparallel.DataLoader` has::

        runner_type = "pyparallel.Runner"
        train_dataloader = dict(batch_size=16, on_error="skip", ...)

    ``mmengine.registry.RUNNERS.build(config)`` creates it.
    """

    @staticmethod
    def build_dataloader(
        dataloader: Any, seed: int | None = None, diff_rank_seed: bool = False
    ) -> Any:
        """Build a loader with the dataset, samplers and functions of mmengine.

        Args:
            dataloader: a config as of mmengine's Runner. A loader, also in a
                `PreDataLoader`, is returned as it is.
            seed: the seed of the sampler and of the workers.
            diff_rank_seed: whether each rank has another seed.
        """
        if isinstance(dataloader, PreDataLoader):
            return dataloader
        if not isinstance(dataloader, dict):
            return _Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        config = dict(dataloader)
        own = {name: config.pop(name) for name in _OWN_ARGUMENTS & config.keys()}
        # torch's loader starts its workers at the first iteration, so this one costs
        # nothing.
        built = _Runner.build_dataloader(config, seed, diff_rank_seed)
        others = {n: v for n, v in config.items() if n not in _USED_BY_MMENGINE}
        return DataLoader(
            built.dataset,
            collate_fn=built.collate_fn,
            worker_init_fn=built.worker_init_fn,
            **_batches_of(built),
            **others,
            **own,
        )


def _batches_of(loader: TorchLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a loader that choose the samples of its batches."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    chosen: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
    }
    if not isinstance(loader.dataset, IterableDataset):
        chosen["sampler"] = loader.sampler
    return chosen
