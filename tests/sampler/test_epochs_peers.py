"""Other libraries set the epoch of the sampler in their own training loops.

A sampler counts passes, so each test resumes with a new sampler: only the library knows
the number of the epoch then.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from pyparallel import DataLoader, SizeBatchSampler

try:
    import lightning
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
    from mmengine.hooks import DistSamplerSeedHook
    from mmengine.runner.loops import _InfiniteDataloaderIterator
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # those of the libraries
]

SIZES = [17 * i % 50 for i in range(23)]
LOADERS = [DataLoader, torch.utils.data.DataLoader]


def loader_of(cls: Any, num_workers: int = 0, **options: Any) -> Any:
    sampler = SizeBatchSampler(SIZES, 4, window=3)
    data: Any = range(len(SIZES))
    return cls(data, batch_sampler=sampler, num_workers=num_workers, **options)


def in_epoch(epoch: int) -> list[list[int]]:
    sampler = SizeBatchSampler(SIZES, 4, window=3)
    sampler.set_epoch(epoch)
    return list(sampler)


def numbers(batches: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).tolist() for batch in batches]


EPOCHS = [in_epoch(epoch) for epoch in range(4)]


# --------------------------------------------------------------------------- Lightning
class Seen(lightning.LightningModule):  # type: ignore[misc]
    """A model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = torch.nn.Linear(1, 1), []  # type: ignore[var-annotated]

    def forward(self, batch: Any) -> Any:
        return batch

    def training_step(self, batch: Any, number: int) -> Any:
        self.batches += numbers([batch])
        return self.net(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(loader: Any, folder: Path, epochs: int, ckpt: Any = None, **saving: Any) -> Any:
    """Train, and return the batches and the path of the last checkpoint."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saved = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, **saving)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved] if saving else [],
        enable_checkpointing=bool(saving),
    )
    model = Seen()
    trainer.fit(model, loader, ckpt_path=ckpt)
    return model.batches, saved.best_model_path


@pytest.mark.parametrize("cls", LOADERS)
def test_lightning_sets_the_epoch_of_a_resumed_run(cls: Any, tmp_path: Path) -> None:
    found, path = fit(loader_of(cls), tmp_path, 2, every_n_epochs=1)
    assert found == EPOCHS[0] + EPOCHS[1]
    found, _ = fit(loader_of(cls), tmp_path, 4, ckpt=path)
    assert found == EPOCHS[2] + EPOCHS[3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_continues_in_mid_epoch(num_workers: int, tmp_path: Path) -> None:
    loader = loader_of(DataLoader, num_workers)
    _, path = fit(loader, tmp_path, 2, every_n_train_steps=8)
    loader = loader_of(DataLoader, num_workers)
    found, _ = fit(loader, tmp_path, 4, ckpt=path)
    assert found == EPOCHS[1][2:] + EPOCHS[2] + EPOCHS[3]


@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
def test_lightning_leaves_out_the_epoch_after_a_checkpoint_at_the_last_batch(
    cls: Any, tmp_path: Path
) -> None:
    """It reads the state of the finished epoch in the next one: docs/frameworks.md."""
    found, path = fit(loader_of(cls), tmp_path, 1, every_n_train_steps=6)
    assert found == EPOCHS[0]
    found, _ = fit(loader_of(cls), tmp_path, 4, ckpt=path)
    assert found == EPOCHS[2] + EPOCHS[3]


def test_lightning_with_workers_needs_the_epoch_of_the_hook(tmp_path: Path) -> None:
    """It makes the iterator before set_epoch(): docs/sampler.md has the solution."""
    _, path = fit(loader_of(DataLoader, 2), tmp_path, 2, every_n_epochs=1)

    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            loader = loader_of(DataLoader, 2)
            progress = self.trainer.fit_loop.epoch_progress
            loader.batch_sampler.set_epoch(progress.current.processed)
            return loader

    found, _ = fit(Data(), tmp_path, 4, ckpt=path)
    assert found == EPOCHS[2] + EPOCHS[3]


def test_predict_of_lightning_names_the_way_out() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError, match=r"give predict\(\) a loader without it\.$"):
        trainer.predict(Seen(), loader_of(DataLoader))


# -------------------------------------------------------------------------- accelerate
@pytest.mark.parametrize("cls", LOADERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_accelerate_sets_the_epoch(cls: Any, num_workers: int) -> None:
    loader = Accelerator(cpu=True).prepare(loader_of(cls, num_workers))
    for epoch in (0, 1):
        assert numbers(loader) == EPOCHS[epoch]
    loader = Accelerator(cpu=True).prepare(loader_of(cls, num_workers))
    loader.set_epoch(2)
    for epoch in (2, 3):
        assert numbers(loader) == EPOCHS[epoch]


def test_accelerate_sets_the_epoch_of_a_sampler_that_it_divides() -> None:
    for rank in range(2):
        loader = loader_of(DataLoader)
        shard = BatchSamplerShard(loader.batch_sampler, 2, rank, even_batches=False)
        divided = DataLoaderShard(range(len(SIZES)), batch_sampler=shard)
        divided.set_epoch(3)
        assert numbers(divided) == EPOCHS[3][rank::2]
        both = SizeBatchSampler(SIZES, 4, num_replicas=2, rank=rank)
        shard = BatchSamplerShard(both, 2, rank, even_batches=False)
        with pytest.raises(ValueError, match=r"^SizeBatchSampler: only one"):
            next(iter(DataLoaderShard(range(len(SIZES)), batch_sampler=shard)))


# ------------------------------------------------------------------------ transformers
class Model(torch.nn.Module):
    """A model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = torch.nn.Linear(1, 1), []  # type: ignore[var-annotated]

    def forward(self, numbers: Any) -> Any:
        self.batches.append(numbers.tolist())
        return {"loss": self.net(torch.ones(1, 1)).sum()}


def collate(samples: list[int]) -> dict[str, Any]:
    return {"numbers": torch.tensor(samples)}


class LoaderTrainer(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(loader_of(DataLoader, collate_fn=collate))


def train(folder: Path, epochs: int, resume: bool) -> Any:
    args = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        save_strategy="epoch",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = LoaderTrainer(Model(), args, train_dataset=range(len(SIZES)))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.batches


def test_transformers_sets_the_epoch(tmp_path: Path) -> None:
    assert train(tmp_path, 2, False) == EPOCHS[0] + EPOCHS[1]
    assert train(tmp_path, 4, True) == EPOCHS[2] + EPOCHS[3]


# ---------------------------------------------------------------------------- mmengine
@pytest.mark.parametrize("cls", LOADERS)
def test_mmengine_sets_the_epoch(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        class train_loop:
            dataloader = loader_of(cls)

        epoch = 2

    DistSamplerSeedHook().before_train_epoch(Runner)
    assert numbers(Runner.train_loop.dataloader) == EPOCHS[2]

    monkeypatch.setattr("mmengine.runner.loops.time.sleep", lambda seconds: None)
    batches = _InfiniteDataloaderIterator(loader_of(cls))
    count = len(EPOCHS[0]) + len(EPOCHS[1])
    assert numbers(next(batches) for _ in range(count)) == EPOCHS[0] + EPOCHS[1]


# ---------------------------------------------------------------------------- composer
def test_composer_passes_the_epochs_before_a_resumed_one() -> None:
    """Its Trainer sets no epoch of a batch sampler, but reads a batch of each epoch.

    It is not installed here, so these are the lines of its
    ``_spin_dataloaders_to_cur_epoch``: one batch of each epoch that has passed.
    """
    loader = loader_of(DataLoader)
    for _ in range(2):
        for _ in loader:
            break
    again = copy.deepcopy(loader)
    assert numbers(loader) == EPOCHS[2] == numbers(again)
