"""SizeBatchSampler for configs of mmengine's Runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import BatchTypeError, type_name
from ..sampler import size_batch_sampler
from ..sampler.ranks import Ranks
from ._upstream import provides

_WHERE = "mmengine.SizeBatchSampler:"


@provides("DATA_SAMPLERS")
class SizeBatchSampler(size_batch_sampler.SizeBatchSampler):
    """``pyparallel.SizeBatchSampler`` with the arguments of a ``batch_sampler`` config.

    The Runner builds it with the ``sampler`` and the ``batch_size`` of the loader. It
    takes the dataset, the ranks, the seed and ``shuffle`` of that sampler, but not its
    order. So it replaces mmdet's ``AspectRatioBatchSampler``, which has the same two
    arguments::

        train_dataloader = dict(
            batch_size=16,
            sampler=dict(type="DefaultSampler", shuffle=True),
            batch_sampler=dict(type="pyparallel.SizeBatchSampler", scale=(1333, 800)))

    Args:
        sampler: a sampler of mmengine, such as ``DefaultSampler``.
        batch_size: the number of samples of a batch, or the largest number with
            ``max_padded`` or ``max_total``.
        sizes: as of ``pyparallel.SizeBatchSampler``: an array, or a function of an
            index. None: ``height`` and ``width`` of the dataset's ``get_data_info``.
        scale: the size within which the pipeline resizes images and keeps their ratio,
            as ``scale`` of mmcv's ``Resize``. Only for ``sizes=None``.
        max_padded: as of ``pyparallel.SizeBatchSampler``.
        max_total: as of ``pyparallel.SizeBatchSampler``.
        **options: other arguments of ``pyparallel.SizeBatchSampler``.

    Raises:
        TypeError: the sampler has no dataset, or an argument has the wrong type.
        ValueError: an argument has an impossible value, or the dataset has another
            number of samples than ``sizes``.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        *,
        sizes: Any = None,
        scale: tuple[int, int] | None = None,
        max_padded: int | None = None,
        max_total: int | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(sampler, "dataset"):
            raise BatchTypeError(
                f"{_WHERE} sampler must have a dataset, but is {type_name(sampler)}. "
                "Use DefaultSampler of mmengine."
            )
        dataset = sampler.dataset
        if sizes is None:
            sizes = _image_sizes(dataset, scale)
        if callable(sizes):
            options.setdefault("num_samples", len(dataset))
        options |= {"max_padded": max_padded, "max_total": max_total}
        has_budget = max_padded is not None or max_total is not None
        options["max_batch_size" if has_budget else "batch_size"] = batch_size
        names = {"seed": "seed", "shuffle": "shuffle"}
        ranks = getattr(sampler, "world_size", None), getattr(sampler, "rank", None)
        if ranks != Ranks(_WHERE, None, None).peek():
            # Else look them up at the first use: the group may be made later.
            names |= {"num_replicas": "world_size", "rank": "rank"}
        for name, attribute in names.items():
            if (value := getattr(sampler, attribute, None)) is not None:
                options.setdefault(name, value)
        super().__init__(sizes, **options)
        self.check_loader(sampler)


def _image_sizes(
    dataset: Any, scale: tuple[int, int] | None
) -> Callable[[int], tuple[int, int]]:
    """Return a function that returns the height and width of an image by its index."""
    if not hasattr(dataset, "get_data_info"):
        raise BatchTypeError(
            f"{_WHERE} sizes must be set for a dataset without get_data_info, but is "
            f"None ({type_name(dataset)}). Set sizes=[(height, width), ...]."
        )

    def size_of(index: int) -> tuple[int, int]:
        info = dataset.get_data_info(index)
        height, width = int(info["height"]), int(info["width"])
        if scale is None:
            return height, width
        factor = min(max(scale) / max(height, width), min(scale) / min(height, width))
        return int(height * factor + 0.5), int(width * factor + 0.5)

    return size_of
