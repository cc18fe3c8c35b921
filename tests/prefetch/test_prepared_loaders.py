"""Loaders that another library has prepared or made, inside a `PreDataLoader`.

Each case compares it with the loop over the prepared loader itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyparallel import DataLoader, PreDataLoader
from tests.support.ranks.torchrun import torchrun

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.state import AcceleratorState, GradientState
    from ignite.distributed import auto_dataloader
    from lightning.fabric import Fabric
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # those of the libraries
]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Accumulate the gradients of three batches."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=3)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def itself(loader: Any) -> Any:
    return loader


def loader_of(num_workers: int = 0, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    options = {"shuffle": True, "generator": generator, **options}
    return DataLoader(range(10), 3, num_workers=num_workers, **options)


Step = tuple[list[int], bool, int, bool, Any]


def steps(accelerator: Accelerator, batches: Any, epochs: int = 2) -> list[Step]:
    """Return the findings of a loop in each step, and after each epoch."""
    facts, found = accelerator.gradient_state, []
    for _ in range(epochs):
        for batch in batches:
            time.sleep(0.02)  # a thread is far ahead by now
            with accelerator.accumulate():
                found.append(
                    (
                        batch.tolist(),
                        facts.end_of_dataloader,
                        facts.remainder,
                        accelerator.sync_gradients,
                        batches.state_dict(),
                    )
                )
        found.append(
            ([], facts.end_of_dataloader, facts.remainder, facts.in_dataloader, None)
        )
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_finds_the_end_of_an_epoch_at_its_last_batch(
    accelerator: Accelerator, num_workers: int
) -> None:
    found = [
        steps(accelerator, wrap(accelerator.prepare(loader_of(num_workers))))
        for wrap in (itself, PreDataLoader)
    ]
    assert found[0] == found[1]
    assert [step[1] for step in found[1]] == 2 * [False, False, False, True, False]
    # The third batch, and the last one.
    assert [step[3] for step in found[1]] == 2 * [False, False, True, True, False]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_state_of_a_prepared_loader_continues(
    accelerator: Accelerator, number: int, num_workers: int
) -> None:
    whole = steps(accelerator, PreDataLoader(accelerator.prepare(loader_of())))
    for wrap in (itself, PreDataLoader):
        again = wrap(accelerator.prepare(loader_of(num_workers)))
        again.load_state_dict(whole[number][4])
        found = [batch.tolist() for batch in again]
        # At the last batch accelerate has the state of the next epoch.
        rest = whole[number + 1 : 4] or whole[5:9]
        assert found == [batch for batch, *_ in rest]


def test_a_loop_that_is_left_and_an_evaluation_change_no_end(
    accelerator: Accelerator,
) -> None:
    train, held_out = (
        PreDataLoader(accelerator.prepare(loader_of())) for _ in range(2)
    )
    state, ends = accelerator.gradient_state, []
    for _ in train:
        ends.append(state.end_of_dataloader)
        for number, _ in enumerate(held_out):
            time.sleep(0.01)
            assert state.end_of_dataloader is (number == 3)
        assert state.active_dataloader is not None
        for _ in held_out:
            break
        assert state.end_of_dataloader is ends[-1]
    assert ends == [False, False, False, True]
    assert not state.in_dataloader
    # Without a thread the loader itself tells it again.
    list(train)
    inner = train.loader
    assert type(inner.gradient_state) is GradientState
    assert [state.end_of_dataloader for _ in inner] == ends


#: Runs on two ranks: results of 10 samples, with and without a thread.
GATHERED = """
import json
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from pyparallel import DataLoader, PreDataLoader

if __name__ == "__main__":
    accelerator, found = Accelerator(cpu=True), []
    for wrap in (lambda loader: loader, PreDataLoader):
        for shuffle in (False, True):
            torch.manual_seed(0)
            loader = DataLoader(range(10), 3, shuffle=shuffle, num_workers=1)
            for batch in wrap(accelerator.prepare(loader)):
                found.append(accelerator.gather_for_metrics(batch).tolist())
    if accelerator.is_main_process:
        print(json.dumps(found))
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    batches = PreDataLoader(accelerator.prepare(DataLoader(range(10), 3)))
    try:
        next(iter(batches))
    except ValueError as error:
        print(error)
"""


def test_results_are_gathered_once_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "gathered.py"
    script.write_text(GATHERED, encoding="utf-8")
    done = torchrun(script)
    assert done.returncode == 0, done.stderr[-3000:]
    texts = [line for line in done.stdout.splitlines() if line.startswith("[")]
    batches = json.loads(texts[0])
    assert len(batches) == 8 and batches[:4] == batches[4:]
    first, second = ([*a, *b] for a, b in (batches[:2], batches[2:4]))
    assert first == [*range(10)] == sorted(second)
    assert done.stdout.count("with 2 ranks, each rank must read its own batches") == 2
    assert "DataLoaderConfiguration(dispatch_batches=False)." in done.stdout


def test_batches_that_one_process_sends_are_the_same(accelerator: Accelerator) -> None:
    """With one rank they are sent nowhere."""
    loaders = [DataLoaderDispatcher(range(10), batch_size=3) for _ in range(2)]
    found = [
        [(batch.tolist(), accelerator.gradient_state.end_of_dataloader) for batch in it]
        for it in (loaders[0], PreDataLoader(loaders[1]))
    ]
    assert len(found[0]) == 4 and found[0] == found[1]


# ------------------------------------------------------------------ other libraries
def of_fabric(loader: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


def of_ignite(loader: Any) -> Any:
    options = {"batch_size": 3, "sampler": loader.sampler}
    return auto_dataloader(loader.dataset, **options)


@pytest.mark.parametrize("prepare", [of_fabric, of_ignite])
def test_a_loader_of_fabric_or_ignite_has_the_same_batches(
    prepare: Callable[[Any], Any],
) -> None:
    found = []
    for wrap in (itself, PreDataLoader):
        batches = wrap(prepare(loader_of()))
        found.append([[batch.tolist() for batch in batches] for _ in range(2)])
        assert len(batches) == 4
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_the_state_of_a_loader_of_fabric_is_that_of_the_loader_inside() -> None:
    batches = PreDataLoader(of_fabric(loader_of()))
    with pytest.raises(AttributeError, match="without another library's wrapper"):
        batches.state_dict()
    own = PreDataLoader(loader_of(), "cpu")
    iterator = iter(own)
    next(iterator)
    again = PreDataLoader(loader_of(), "cpu")
    again.load_state_dict(own.state_dict())
    rest = [batch.tolist() for batch in iterator]
    assert [batch.tolist() for batch in again] == rest and len(rest) == 3


class Line(torch.nn.Module):
    """A model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, numbers: torch.Tensor) -> Any:
        self.seen.append(numbers.tolist())
        return {"loss": self.line(numbers[:, None].float()).square().mean()}


def train_by_transformers(folder: Path, wrap: Any) -> tuple[Any, Any]:
    class WrappingTrainer(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return wrap(super().get_train_dataloader())

    def merge(samples: list[int]) -> Any:
        return {"numbers": torch.tensor(samples)}

    torch.manual_seed(0)
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        num_train_epochs=2,
        gradient_accumulation_steps=3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    data: Any = list(range(10))
    model = Line()
    WrappingTrainer(model, args, train_dataset=data, data_collator=merge).train()
    return model.seen, model.line.weight


def test_the_loader_of_a_trainer_of_transformers_trains_equally(
    tmp_path: Path,
) -> None:
    seen, weight = train_by_transformers(tmp_path, itself)
    found, found_weight = train_by_transformers(tmp_path, PreDataLoader)
    assert len(seen) == 8 and found == seen
    assert torch.equal(found_weight, weight)
    assert not dist.is_initialized()
