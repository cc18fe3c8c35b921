"""Train a little with a framework on each rank, and record which code does what.

    torchrun --nproc_per_node=2 framework_roles.py FRAMEWORK FOLDER

Each rank writes ``FOLDER/rank<n>.json``, with these parts for each run: the library
whose code moved a batch, set an epoch or asked for the state of a loader ("you": this
program), the samples of each epoch, the arguments of the loader that another value
replaced, and the facts that the run itself adds.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import pyparallel.mmengine
from pyparallel import DataLoader, PreDataLoader, SizeBatchSampler
from pyparallel.loader.state_dict import StatefulLoader

LIBRARIES = ("accelerate", "lightning", "transformers", "mmengine", "ray", "pyparallel")
SIZES = [1 + 7 * i % 5 for i in range(16)]
#: The arguments that choose the samples. A framework may replace them.
OF_SAMPLES = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler"}
OF_SAMPLES |= {"drop_last", "generator"}


class Run:
    """The record of one run.

    Attributes:
        callers: by the name of an action, the libraries whose code did it.
        epochs: the samples of the batches of each epoch.
        facts: the findings of the run.
    """

    def __init__(self) -> None:
        self.callers: defaultdict[str, set[str]] = defaultdict(set)
        self.epochs: list[list[int]] = []
        self.facts: dict[str, Any] = {}
        self.states: list[Any] = []
        self.given: Any = None

    def use(self, batch: Any) -> torch.Tensor:
        """Record the samples of a batch."""
        index = batch["index"]
        self.epochs[-1] += index.tolist()
        return index

    def loss(self, model: Any, batch: Any) -> Any:
        return model(self.use(batch)[:, None].float() / 16).square().mean()

    def compare(self, given: Any, used: Any) -> None:
        """Record the arguments of a loader that another value has replaced."""
        used = getattr(used, "base_dataloader", used)
        names = inspect.signature(DataLoader).parameters.keys() - OF_SAMPLES
        changed = [
            n for n in names if getattr(used, n, None) != getattr(given, n, None)
        ]
        self.facts["changed"] = sorted(changed)
        self.facts["loader"] = f"{type(used).__module__}.{type(used).__qualname__}"


RUNS: dict[str, Run] = {}


def begin(name: str) -> Run:
    RUNS[name] = Run()
    return RUNS[name]


def record(action: str) -> None:
    """Record the innermost library that is not torch, or this program."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        if library in LIBRARIES or library == "__main__":
            break
        frame = frame.f_back
    run = list(RUNS.values())[-1]
    run.callers[action].add("you" if library == "__main__" else library)


def watch(cls: Any, name: str) -> None:
    """Record the calls of a method."""
    method = getattr(cls, name)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        record(name)
        result = method(self, *args, **kwargs)
        if name == "state_dict":
            list(RUNS.values())[-1].states.append(result)
        return result

    setattr(cls, name, watched)


class Watched(torch.Tensor):
    """A tensor that has another device until it is moved."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        record("to")
        return self.as_subclass(torch.Tensor)


def merge(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"index": torch.tensor(samples).as_subclass(Watched)}


class Plain:
    """Samples that are their indices. Sample 5 raises an error."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("number 5 is damaged")
        return index


class Numbers(Plain):
    """The same with a method that frameworks call."""

    def set_epoch(self, epoch: int) -> None:
        record("set_epoch")


def make_loader(data: Any = None, **options: Any) -> Any:
    """Return a loader whose own arguments have other values than the default ones."""
    options = {"collate_fn": merge, "on_error": "skip", "max_errors": 9, **options}
    options |= {"sample_seeds": True, "ring_slabs": 5, "snapshot_every_n_steps": 1}
    if "batch_sampler" not in options:
        options["batch_size"] = 2
    return DataLoader(range(16) if data is None else data, **options)


def by_size() -> dict[str, Any]:
    return {"batch_sampler": SizeBatchSampler(SIZES, max_padded=8)}


# ------------------------------------------------------------------------- accelerate
def of_accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes

    def loop(run: Run, batches: Any, sampler: Any = None) -> None:
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        for epoch in range(2):
            run.epochs.append([])
            if sampler is not None:
                sampler.set_epoch(epoch)
            for batch in batches:
                accelerator.backward(run.loss(model, batch))
        accelerator.save_state(folder / "state")
        names = sorted(path.name for path in (folder / "state").iterdir())
        run.facts["saved"] = [n for n in names if n.startswith("dl_")]

    run, sampler = begin("alone"), DistributedSampler(range(16), ranks, rank)
    loop(run, make_loader(sampler=sampler), sampler)
    run = begin("PreDataLoader")
    batches = PreDataLoader(make_loader(sampler=sampler), accelerator.device)
    loop(run, batches, sampler)
    run = begin("own state")
    run.epochs.append([])
    iterator = iter(batches)
    run.use(next(iterator))
    again = PreDataLoader(make_loader(sampler=sampler), "cpu")
    again.load_state_dict(batches.state_dict())
    rests = [[it["index"].tolist() for it in rest] for rest in (iterator, again)]
    run.facts["continues"] = len(rests[0]) > 1 and rests[0] == rests[1]
    run, loader = begin("prepared"), make_loader(Numbers(), shuffle=True)
    prepared = accelerator.prepare(loader)
    loop(run, prepared)
    run.compare(loader, prepared)
    run.facts["errors"] = sorted(error.index for error in loader.sample_errors)


# -------------------------------------------------------------------------- Lightning
def of_lightning(folder: Path) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.line, self.run = torch.nn.Linear(1, 1), run

        def on_train_epoch_start(self) -> None:
            self.run.epochs.append([])

        def training_step(self, batch: Any, number: int) -> Any:
            return self.run.loss(self.line, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(name: str, loader: Any, **options: Any) -> None:
        run = begin(name)
        saved = lightning.pytorch.callbacks.ModelCheckpoint(
            folder / name, every_n_train_steps=3, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            strategy="ddp",
            devices=int(os.environ["WORLD_SIZE"]),
            callbacks=[saved],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(Model(run), loader)
        run.compare(loader, trainer.train_dataloader)
        dist.barrier()
        path = next((folder / name).glob("*step=3.ckpt"))
        fit_loop = torch.load(path, weights_only=False)["loops"]["fit_loop"]
        (state,) = fit_loop["state_dict"]["combined_loader"]
        run.facts["saved"] = state in run.states

    fit("shuffled", make_loader(shuffle=True))
    options = {"use_distributed_sampler": False}
    fit("SizeBatchSampler", make_loader(**by_size()), **options)


# ----------------------------------------------------------------------- transformers
def of_transformers(folder: Path) -> None:
    import transformers
    from accelerate.data_loader import SeedableRandomSampler

    watch(SeedableRandomSampler, "set_epoch")

    class Model(torch.nn.Module):
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.line, self.run = torch.nn.Linear(1, 1), run

        def forward(self, index: Any) -> Any:
            return {"loss": self.run.loss(self.line, {"index": index})}

    class Begin(transformers.TrainerCallback):
        def __init__(self, run: Run, sampler: Any = None) -> None:
            self.run, self.sampler = run, sampler

        def on_epoch_begin(self, args: Any, state: Any, *_: Any, **others: Any) -> None:
            self.run.epochs.append([])
            self.run.compare(self.run.given, others["train_dataloader"])
            if self.sampler is not None:
                self.sampler.set_epoch(int(state.epoch))

    def train(
        name: str, make: Callable[[Any], Any] | None, sampler: Any = None
    ) -> None:
        run = begin(name)

        class Trainer(transformers.Trainer):
            def get_train_dataloader(self) -> Any:
                loader = super().get_train_dataloader() if make is None else make(self)
                run.given = loader
                return loader

        args = transformers.TrainingArguments(
            str(folder / name),
            per_device_train_batch_size=2,
            num_train_epochs=2,
            save_steps=3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        data: Any = Numbers() if name == "prepared" else Plain()
        callbacks, kwargs = [Begin(run, sampler)], {"data_collator": merge}
        if make is None:
            data = range(16)
        Trainer(
            Model(run), args, train_dataset=data, callbacks=callbacks, **kwargs
        ).train()
        names = [path.name for path in (folder / name).glob("*/*")]
        run.facts["saved"] = sorted(n for n in names if "loader" in n or "dl_" in n)

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sampler = DistributedSampler(Plain(), ranks, rank)
    train("own loop", None)
    train("loader", lambda it: make_loader(Plain(), sampler=sampler))
    train("undivided", lambda it: make_loader(Plain()))
    train(
        "PreDataLoader",
        lambda it: PreDataLoader(make_loader(Plain(), sampler=sampler), it.args.device),
        sampler,
    )
    train(
        "prepared",
        lambda it: it.accelerator.prepare(make_loader(Numbers(), shuffle=True)),
    )


# --------------------------------------------------------------------------- mmengine
def of_mmengine(folder: Path) -> None:
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel

    pyparallel.mmengine.init_dist("pytorch")
    from mmengine.dataset import DefaultSampler

    watch(DefaultSampler, "set_epoch")

    class Model(BaseModel):  # type: ignore[misc]  # mmengine has no types
        def __init__(self, run: Run) -> None:
            super().__init__()
            self.line, self.run = torch.nn.Linear(1, 1), run

        def forward(self, index: Any, mode: str) -> Any:
            return {"loss": self.run.loss(self.line, {"index": index})}

    class Begin(Hook):  # type: ignore[misc]  # mmengine has no types
        def __init__(self, run: Run) -> None:
            self.run = run

        def before_train_epoch(self, runner: Any) -> None:
            self.run.epochs.append([])

    own = {"on_error": "skip", "max_errors": 9, "sample_seeds": True, "ring_slabs": 5}
    own["snapshot_every_n_steps"] = 1

    def train(name: str, cls: Any, epochs: int = 2, resume: bool = False) -> None:
        run = begin(name)
        config = {
            "dataset": Plain() if cls is pyparallel.mmengine.Runner else range(16),
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "batch_size": 2,
            "collate_fn": merge,
        }
        if cls is pyparallel.mmengine.Runner:
            config |= own
        runner = cls(
            Model(run),
            str(folder / name.removesuffix(" resumed")),
            train_dataloader=config,
            train_cfg={"by_epoch": True, "max_epochs": epochs},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
            custom_hooks=[Begin(run)],
            randomness={"seed": 0},
            launcher="pytorch",
            log_level="ERROR",
            experiment_name=name,
            resume=resume,
            cfg={"model_wrapper_cfg": {"type": "pyparallel.MMDistributedDataParallel"}},
        )
        runner.train()
        used = runner.train_dataloader
        run.facts["loader"] = f"{type(used).__module__}.{type(used).__qualname__}"
        if cls is pyparallel.mmengine.Runner:
            changed = [n for n, value in own.items() if getattr(used, n) != value]
            run.facts["changed"] = changed
            run.facts["errors"] = sorted(error.index for error in used.sample_errors)

    from mmengine.runner import Runner

    train("Runner", Runner)
    train("ours", pyparallel.mmengine.Runner, epochs=1)
    train("ours resumed", pyparallel.mmengine.Runner, resume=True)


OF_FRAMEWORK = {
    "accelerate": of_accelerate,
    "Lightning": of_lightning,
    "transformers": of_transformers,
    "mmengine": of_mmengine,
}


def write(folder: Path, rank: int) -> None:
    """Write the record of this rank."""
    found = {
        name: {
            "callers": {it: sorted(names) for it, names in run.callers.items()},
            "epochs": run.epochs,
            "facts": run.facts,
        }
        for name, run in RUNS.items()
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def watch_all() -> None:
    watch(DistributedSampler, "set_epoch")
    watch(SizeBatchSampler, "set_epoch")
    watch(StatefulLoader, "state_dict")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    watch_all()
    OF_FRAMEWORK[sys.argv[1]](Path(sys.argv[2]))
    write(Path(sys.argv[2]), int(os.environ["RANK"]))
    if dist.is_initialized():
        dist.destroy_process_group()
