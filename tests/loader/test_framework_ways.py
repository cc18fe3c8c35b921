"""The table of frameworks and ways: weights equal those with torch's own loader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

import pyparallel
import pyparallel.mmengine
from pyparallel import PreDataLoader

try:
    import fastai.learner
    import ignite.engine
    import lightning
    import mmengine.runner
    import speechbrain.core
    import transformers
    from accelerate import Accelerator
    from lightning.fabric import Fabric
    from mmengine.model import BaseModel
    from speechbrain.dataio.dataloader import SaveableDataLoader
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks
]

X = torch.linspace(-1, 1, 12)[:, None]
ROWS = torch.utils.data.TensorDataset(X, 3 * X + 1)


def line() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def loss_of(model: Any, batch: Any) -> Any:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


def prepared(prepare: Callable[[Any], Any], loader: Any) -> Any:
    """Return a loader that a framework has prepared, which sets the epoch."""
    if isinstance(loader, PreDataLoader):
        return PreDataLoader(prepare(loader.loader), "cpu")
    return prepare(loader)


def by_accelerate(loader: Any, folder: Path) -> Any:
    accelerator, model = Accelerator(cpu=True), line()
    model, optimizer = accelerator.prepare(model, sgd(model))
    loader = prepared(accelerator.prepare, loader)
    for _ in range(2):
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return model


def by_fabric(loader: Any, folder: Path) -> Any:
    fabric, model = Fabric(accelerator="cpu", devices=1), line()
    model, optimizer = fabric.setup(model, sgd(model))
    loader = prepared(fabric.setup_dataloaders, loader)
    for _ in range(2):
        for batch in loader:
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return model


def by_lightning(loader: Any, folder: Path) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = line()

        def training_step(self, batch: Any, number: int) -> Any:
            return loss_of(self.line, batch)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    return module.line


def by_transformers(loader: Any, folder: Path) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = line()

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": loss_of(self.line, (x, y))}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    model = Model()
    loader.collate_fn = named
    Trainer(model, args, train_dataset=ROWS).train()
    return model.line


def named(rows: list[Any]) -> dict[str, Any]:
    xs, ys = zip(*rows, strict=True)
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


def by_mmengine(loader: Any, folder: Path) -> Any:
    class Model(BaseModel):  # type: ignore[misc]  # mmengine has no types
        def __init__(self) -> None:
            super().__init__()
            self.line = line()

        def forward(self, *batch: Any, mode: str) -> Any:
            return {"loss": loss_of(self.line, batch)}

    is_pre = isinstance(loader, PreDataLoader)
    cls = pyparallel.mmengine.Runner if is_pre else mmengine.runner.Runner
    model = Model()
    cls(
        model,
        str(folder),
        train_dataloader=loader,
        train_cfg={"by_epoch": True, "max_epochs": 2},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        log_level="ERROR",
        experiment_name=folder.name,
    ).train()
    return model.line


def by_speechbrain(loader: Any, folder: Path) -> Any:
    class Brain(speechbrain.core.Brain):  # type: ignore[misc]
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            return self.modules.line(batch[0])

        def compute_objectives(self, found: Any, batch: Any, stage: Any) -> Any:
            return torch.nn.functional.mse_loss(found, batch[1])

    model = line()
    brain = Brain({"line": model}, lambda parameters: torch.optim.SGD(parameters, 0.1))
    brain.fit(range(2), loader, progressbar=False)
    return model


def by_fastai(loader: Any, folder: Path) -> Any:
    loaders = fastai.learner.DataLoaders(loader, TorchLoader(ROWS, 4), device="cpu")
    loss = torch.nn.MSELoss()
    learner = fastai.learner.Learner(loaders, line(), loss_func=loss, lr=0.1)
    with learner.no_logging():
        learner.fit(2)
    return learner.model


def by_ignite(loader: Any, folder: Path) -> Any:
    model = line()
    step = ignite.engine.create_supervised_trainer(
        model, sgd(model), torch.nn.MSELoss(), device="cpu"
    )
    step.run(loader, max_epochs=2)
    return model


def by_torch(loader: Any, folder: Path) -> Any:
    model = line()
    optimizer = sgd(model)
    for _ in range(2):
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


class OfSpeechBrain(SaveableDataLoader, pyparallel.DataLoader):  # type: ignore[misc]
    """The class of docs/frameworks.md."""


FRAMEWORKS: dict[str, Callable[[Any, Path], Any]] = {
    "torch": by_torch,
    "accelerate": by_accelerate,
    "Fabric": by_fabric,
    "Lightning": by_lightning,
    "transformers": by_transformers,
    "mmengine": by_mmengine,
    "SpeechBrain": by_speechbrain,
    "fastai": by_fastai,
    "Ignite": by_ignite,
}


def ours(framework: str) -> Any:
    return OfSpeechBrain if framework == "SpeechBrain" else pyparallel.DataLoader


WAYS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "DataLoader": lambda name, options: ours(name)(ROWS, **options),
    "PreDataLoader": lambda name, options: PreDataLoader(
        ours(name)(ROWS, **options), "cpu"
    ),
}
#: Ways that a framework refuses, and the text that names another way.
REFUSED = {("SpeechBrain", "PreDataLoader"): "give it a pyparallel.DataLoader"}


def options_of(num_workers: int) -> dict[str, Any]:
    # Lightning begins a pass to find out if a loader is iterable. With a generator, the
    # thread of a `PreDataLoader` would draw an order for it.
    sampler = DistributedSampler(ROWS, num_replicas=1, rank=0)
    return {"batch_size": 4, "sampler": sampler, "num_workers": num_workers}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_trains_as_with_its_own_loader(
    framework: str, way: str, num_workers: int, tmp_path: Path
) -> None:
    train = FRAMEWORKS[framework]
    cls = SaveableDataLoader if framework == "SpeechBrain" else TorchLoader
    theirs = train(cls(ROWS, **options_of(num_workers)), tmp_path / "theirs")
    loader = WAYS[way](framework, options_of(num_workers))
    if text := REFUSED.get((framework, way)):
        with pytest.raises(TypeError, match=text):
            train(loader, tmp_path / "ours")
        return
    found = train(loader, tmp_path / "ours")
    assert torch.equal(found.weight, theirs.weight)
    assert torch.equal(found.bias, theirs.bias)
    inner = loader.loader if isinstance(loader, PreDataLoader) else loader
    assert inner.stats().batches >= 6  # Lightning begins a pass more
