"""`SizeBatchSampler` in loaders that mmengine's Runner builds from a config."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.sample_sizes import coco_sizes
from pyparallel import mmengine as ours
from pyparallel.sampler import size_batch_sampler

try:
    from mmengine.dataset import DefaultSampler
    from mmengine.hooks import DistSamplerSeedHook
    from mmengine.registry import DATASETS
    from mmengine.runner import Runner
except ImportError as error:
    pytest.skip(f"needs mmengine: {error}", allow_module_level=True)

pytestmark = pytest.mark.peers

#: Heights and widths of photographs before they are resized.
PHOTOS = [(480, 640), (640, 480), (960, 1280), (427, 640), (640, 427)]


class Photos:
    """A dataset with the interface of mmdet's."""

    def __init__(self, number: int = 200) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> int:
        return index

    def get_data_info(self, index: int) -> dict[str, Any]:
        height, width = PHOTOS[index % 5]
        return {"height": height, "width": width, "img_id": index}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with ours.installed():
        DATASETS.register_module(module=Photos, name="Photos", force=True)
        yield


def loader_of(batch_size: int = 8, **options: Any) -> Any:
    config = {
        "batch_size": batch_size,
        "num_workers": 0,
        "dataset": {"type": "Photos"},
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "batch_sampler": {"type": "pyparallel.SizeBatchSampler", **options},
        "collate_fn": {"type": "pseudo_collate"},
    }
    return Runner.build_dataloader(copy.deepcopy(config), seed=3)


def batches_of(loader: Any) -> list[list[int]]:
    return [list(batch) for batch in loader]


def test_the_runner_builds_it_with_the_seed_of_the_sampler() -> None:
    loader = loader_of(scale=(1333, 800))
    expected = size_batch_sampler.SizeBatchSampler(
        loader.batch_sampler.sizes, 8, seed=3, num_replicas=1, rank=0
    )
    found = batches_of(loader)
    assert found == list(expected)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(200))


def test_images_are_measured_as_the_pipeline_resizes_them() -> None:
    # The sizes of mmcv's rescale_size for the same photographs.
    assert loader_of(scale=(1333, 800)).batch_sampler.sizes[:5].tolist() == [
        [800, 1067],
        [1067, 800],
        [800, 1067],
        [800, 1199],
        [1199, 800],
    ]
    assert loader_of().batch_sampler.sizes[2].tolist() == [960, 1280]


def test_sizes_of_another_scale_are_not_taken_from_a_cache(tmp_path: Path) -> None:
    cache = str(tmp_path / "sizes.npz")
    written, read = (loader_of(scale=(1333, 800), cache=cache) for _ in range(2))
    assert (
        batches_of(written)
        == batches_of(read)
        == batches_of(loader_of(scale=(1333, 800)))
    )
    message = (
        f"SizeBatchSampler: cache={cache!r} must have the sizes of this data set, but "
        "has [800, 1067] for sample 0, and sizes(0) is [480, 640]. Delete the file, or "
        "use another path."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loader_of(scale=(640, 480), cache=cache)


def test_the_hook_of_the_runner_sets_the_epoch() -> None:
    class Loop:
        dataloader = loader_of()

    class FakeRunner:
        train_loop, epoch = Loop, 1

    first = batches_of(Loop.dataloader)
    DistSamplerSeedHook().before_train_epoch(FakeRunner)
    assert Loop.dataloader.batch_sampler.epoch == 1
    second = batches_of(Loop.dataloader)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))  # noqa: RUF017


def test_another_number_of_sizes_is_an_error() -> None:
    message = (
        "SizeBatchSampler: the sampler must be for the 200 samples of the loader's "
        "dataset, but is for 199. Make the sampler for this dataset."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        loader_of(sizes=[1] * 199)


def test_the_group_may_be_made_after_the_sampler() -> None:
    made, given = loader_of(), loader_of(num_replicas=1, rank=0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # type: ignore[no-untyped-call]
    try:
        assert batches_of(made) == batches_of(loader_of(num_replicas=2, rank=1))
        assert (len(made), len(batches_of(given))) == (13, 25)
        # The numbers of mmengine's own sampler are kept if they are others.
        made.batch_sampler.sampler.set_epoch(1)
        sampler = DefaultSampler(Photos())
        sampler.world_size, sampler.rank = 4, 3
        kept = ours.SizeBatchSampler(sampler, 8)
        assert (kept.num_replicas, kept.rank) == (4, 3)
    finally:
        dist.destroy_process_group()


def test_a_budget_keeps_the_batch_size_as_limit() -> None:
    sizes = coco_sizes(200).tolist()
    budget = 4 * 1333 * 1333
    loader = loader_of(batch_size=5, sizes=sizes, max_padded=budget)
    found = batches_of(loader)
    assert max(map(len, found)) == 5
    for batch in found:
        height, width = (max(sizes[i][dim] for i in batch) for dim in range(2))
        assert height * width * len(batch) <= budget
    totals = batches_of(loader_of(batch_size=5, sizes=sizes, max_total=20_000))
    assert max(map(len, totals)) == 5
    assert all(sum(map(sum, (sizes[i] for i in b))) <= 20_000 for b in totals)


def test_errors_name_the_missing_part() -> None:
    class Sampler:
        dataset = [1, 2]  # noqa: RUF012

    for sampler, message in (
        ([1], "sampler must have a dataset, but is list. Use DefaultSampler of "
         "mmengine."),
        (Sampler(), "sizes must be set for a dataset without get_data_info, but is "
         "None (list). Set sizes=[(height, width), ...]."),
    ):  # fmt: skip
        found = re.escape(f"mmengine.SizeBatchSampler: {message}")
        with pytest.raises(TypeError, match=f"^{found}$"):
            ours.SizeBatchSampler(sampler, 2)
