"""Our loaders and samplers beside torchdata, Lightning and accelerate."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
import torch.utils.data

from pyparallel import DataLoader, PreDataLoader, SizeBatcher, SizeBatchSampler
from tests.support.loader import resumed

try:
    import lightning
    from accelerate.data_loader import (
        BatchSamplerShard,
        prepare_data_loader,
        skip_first_batches,
    )
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.data import _update_dataloader
    from torchdata.stateful_dataloader import Stateful, StatefulDataLoader
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.mark.parametrize("ask_for_more", [False, True])
def test_the_epoch_after_the_last_batch_is_equal(ask_for_more: bool) -> None:
    found = []
    for cls in (DataLoader, StatefulDataLoader):
        loader = cls(resumed.Numbers(6), 2)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert not ask_for_more or next(batches, None) is None
        state = loader.state_dict()
        loader = cls(resumed.Numbers(6), 2)
        loader.load_state_dict(state)
        found.append([len(list(loader)) for _ in range(2)])
    assert found[0] == found[1] == ([3, 3] if ask_for_more else [0, 3])


def test_a_loader_is_stateful_as_torchdata_has_it() -> None:
    assert isinstance(DataLoader(resumed.Numbers(2)), Stateful)


SIZES = [17 * i % 50 for i in range(101)]


class Stream(torch.utils.data.IterableDataset[int]):
    """`SIZES`, divided between the workers."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from SIZES[info.id :: info.num_workers] if info else SIZES


def map_style(num_workers: int) -> Any:
    sampler = SizeBatchSampler(SIZES, 4, window=5)
    return StatefulDataLoader(SIZES, batch_sampler=sampler, num_workers=num_workers)


def stream(num_workers: int) -> Any:
    batcher = SizeBatcher(Stream(), int, 4, window=5)
    return StatefulDataLoader(batcher, batch_size=None, num_workers=num_workers)


@pytest.mark.parametrize("loader_of", [map_style, stream])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 25])
def test_the_next_batch_follows(
    num_steps: int, num_workers: int, loader_of: Any
) -> None:
    loader = loader_of(num_workers)
    batches = iter(loader)
    for _ in range(num_steps):
        next(batches)
    again = loader_of(num_workers)
    again.load_state_dict(loader.state_dict())
    rest = [torch.as_tensor(batch).tolist() for batch in again]
    assert rest == [torch.as_tensor(batch).tolist() for batch in batches]
    assert len(rest) == 26 - num_steps


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Lightning with a strategy for several ranks, whose loaders get new samplers."""
    environment = dict(os.environ)
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    yield fabric
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


def test_lightning_keeps_the_sampler_on_request(fabric: Fabric) -> None:
    sampler = SizeBatchSampler(SIZES, 4, num_replicas=2, rank=1)
    loader = DataLoader(range(len(SIZES)), batch_sampler=sampler)
    kept = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    expected = list(SizeBatchSampler(SIZES, 4, num_replicas=2, rank=1))
    assert [batch.tolist() for batch in kept] == expected
    with pytest.raises(TypeError, match="set use_distributed_sampler=False of its Tr"):
        fabric.setup_dataloaders(loader)


def test_accelerate_divides_the_batches_of_one_rank() -> None:
    # So prepare() divides the plan of several ranks once more.
    samplers = [SizeBatchSampler(SIZES, 4, drop_last=True) for _ in range(3)]
    parts = [list(BatchSamplerShard(samplers[rank], 2, rank)) for rank in range(2)]
    batches = list(samplers[2])
    assert parts == [batches[0:24:2], batches[1:24:2]]


class Damaged(torch.utils.data.Dataset[float]):
    """Numbers. The first and a later one raise."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        if index in (0, 9):
            raise ValueError(f"number {index} is damaged")
        return float(index)


def numbers(loader: Any) -> list[list[float]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:.*is damaged:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_accelerate_keeps_the_arguments_of_a_loader(num_workers: int) -> None:
    options: Any = dict(num_workers=num_workers, on_error="skip")

    def prepared(**others: Any) -> Any:
        loader = DataLoader(Damaged(), 4, **options)
        return loader, prepare_data_loader(loader, **others)

    loader, copy = prepared()
    whole = [[1, 2, 3], [4, 5, 6, 7], [8, 10, 11], [12, 13, 14, 15]]
    states = [copy.state_dict() for _ in copy]
    assert loader.stats().batches == copy.stats().batches == 4
    assert [error.index for error in loader.sample_errors] == [0, 9]
    # accelerate adds an entry of its own to each state.
    again = prepared()[1]
    again.load_state_dict(states[1])
    assert numbers(again) == whole[2:]
    assert numbers(skip_first_batches(copy, 3)) == whole[3:]
    ranks = [prepared(num_processes=2, process_index=rank)[1] for rank in range(2)]
    assert [numbers(rank) for rank in ranks] == [whole[::2], whole[1::2]]
    assert numbers(PreDataLoader(prepared()[1])) == whole
    with pytest.raises(RuntimeError, match=r"StatefulDataLoader cannot keep on_error="):
        prepared(use_stateful_dataloader=True)


@pytest.mark.parametrize("make", [lambda loader: loader, prepare_data_loader])
def test_accelerate_skips_no_batches_of_a_stream_after_a_state(make: Any) -> None:
    first = iter(loader := DataLoader(Stream(), 4))
    next(first), next(first)
    state, rest = loader.state_dict(), numbers(first)
    loader = make(DataLoader(Stream(), 4))
    assert numbers(skip_first_batches(loader, 2)) == rest
    loader = make(DataLoader(Stream(), 4))
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="skip_first_batches of accelerate leaves o"):
        numbers(skip_first_batches(loader, 2))
    assert numbers(loader) == rest


def test_lightning_keeps_the_arguments_of_a_loader(fabric: Fabric) -> None:
    options: Any = dict(max_errors=3, sample_seeds=True, ring_slabs=2)
    loader = DataLoader(Damaged(), 4, on_error="skip", **options)
    sampler = torch.utils.data.DistributedSampler(loader.dataset, 2, 0)
    copy = _update_dataloader(loader, sampler)
    assert type(copy) is DataLoader and copy.sampler is sampler
    names = [name for name in dir(loader) if name in options or name == "on_error"]
    assert [getattr(copy, it) for it in names] == [getattr(loader, it) for it in names]


class Augmented:
    """Samples whose transform draws random numbers."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        image = np.full((8, 8, 3), index / 10, np.float32)
        return np.asarray(self.transform(image))


def noise(library: str) -> tuple[Any, Any]:
    """Return a transform, and the method of its ``Compose`` that the page prints."""
    if library == "albumentations":
        albumentations = pytest.importorskip(library)
        noise = albumentations.GaussNoise(std_range=(0.1, 0.2), p=1)
        compose: Any = albumentations.Compose([noise])

        def transform(image: Any) -> Any:
            return compose(image=image)["image"]

        return transform, compose.set_random_seed
    transforms = pytest.importorskip("monai.transforms")
    compose = transforms.Compose([transforms.RandGaussianNoise(prob=1)])
    return compose, compose.set_random_state


@pytest.mark.parametrize("library", ["albumentations", "monai"])
def test_transforms_with_generators_of_their_own_are_seeded(library: str) -> None:
    def make(num_workers: int) -> DataLoader[Any]:
        transform, method = noise(library)
        torch.manual_seed(0)
        return DataLoader(
            Augmented(transform), 2, num_workers=num_workers, sample_seeds=method
        )

    def read(loader: DataLoader[Any]) -> list[Any]:
        return [batch.tolist() for batch in loader]

    expected = read(make(0))
    samples = [sample for batch in expected for sample in batch]
    assert all(a != b for a, b in itertools.pairwise(samples))
    assert read(make(0)) == read(make(2)) == expected
    batches = iter(begun := make(2))
    assert next(batches).tolist() == expected[0]
    resumed_loader = make(0)
    resumed_loader.load_state_dict(begun.state_dict())
    assert read(resumed_loader) == expected[1:]


class Model(lightning.LightningModule):
    """A line, which records the batches of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return self.line(batch.float()[:, None]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", [False, True])
def test_lightning_trains_with_workers(persistent: bool, tmp_path: Path) -> None:
    loader = DataLoader(range(6), 2, num_workers=2, persistent_workers=persistent)
    model = Model()
    lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(model, loader)
    assert model.seen == [[0, 1], [2, 3], [4, 5]] * 2


@pytest.mark.filterwarnings("ignore")
def test_transformers_trains_with_workers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    seen = []

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(x[:, 0].tolist())
            return {"loss": self.line(x).sum()}

    rows = [{"x": torch.tensor([float(i)])} for i in range(6)]

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(rows, 2, num_workers=2)
            return self.accelerator.prepare(loader)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=Line(), args=arguments, train_dataset=rows).train()
    assert seen == [[0, 1], [2, 3], [4, 5]] * 2


@pytest.mark.filterwarnings("ignore")
def test_thread_workers_of_monai_are_refused_with_our_class_and_ours_work() -> None:
    data = pytest.importorskip("monai.data")

    class Mixed(data.ThreadDataLoader, DataLoader[Any]):  # type: ignore[misc]
        """Its class, which calls ours instead of torch's."""

    def mixed(**options: Any) -> Any:
        return Mixed(range(6), batch_size=2, num_workers=2, **options)

    with pytest.raises(TypeError, match=r"of .*\._ProcessThread\. Remove multiproc"):
        mixed(use_thread_workers=True)
    batches = [each.tolist() for each in mixed(worker_method="thread")]
    assert batches == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.filterwarnings("ignore")
def test_monai_reads_with_its_own_class_in_ours() -> None:
    data = pytest.importorskip("monai.data")
    images = data.CacheDataset(
        [{"image": data.MetaTensor(torch.full((1, 99, 99), i))} for i in range(4)],
        transform=lambda row: row,
        num_workers=0,
        progress=False,
    )
    loader = DataLoader(images, 2, num_workers=2, collate_fn=data.list_data_collate)
    batches = [batch["image"] for batch in data.ThreadBuffer(loader)]
    assert [type(batch) for batch in batches] == [data.MetaTensor] * 2
    assert [batch.unique().tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert (loader.stats().ring_hits, loader.stats().ring_misses) == (2, 0)


def test_fabric_takes_the_loader_inside_a_pre_data_loader(fabric: Fabric) -> None:
    loader = DataLoader(list(range(8)), 4)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently"):
        fabric.setup_dataloaders(PreDataLoader(loader, fabric.device))
    inner = fabric.setup_dataloaders(loader, move_to_device=False)
    for batches in (inner, loader):
        found = [each.tolist() for each in PreDataLoader(batches, fabric.device)]
        assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
