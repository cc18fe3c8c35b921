"""Loaders of other frameworks as a base of ours, and our loader in their loops."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyparallel
from tests.support.repository.docs_blocks import blocks

try:
    import fastai.learner
    import ignite.engine
    import lightning
    import litdata
    import monai.data
    import skorch
    import torch_geometric.data
    import torch_geometric.loader
    import torchio
    import transformers
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.utils.checkpoints import Checkpointer
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

# Hypothesis reads attributes of all modules, and these import packages at that.
for _name, _module in list(sys.modules.items()):
    if type(_module).__module__ == "speechbrain.utils.importutils":
        del sys.modules[_name]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks
]


# ------------------------------------------------------------- their class as a base
def scans() -> Any:
    return [{"image": torch.full((1, 4), float(i)), "id": i} for i in range(10)]


def graphs() -> Any:
    edges = torch.tensor([[0, 1], [1, 0]])
    return [
        torch_geometric.data.Data(x=torch.full((2 + i % 3, 2), i), edge_index=edges)
        for i in range(10)
    ]


def subjects() -> Any:
    images = [torch.full((1, 2, 2, 2), float(i)) for i in range(10)]
    return torchio.SubjectsDataset(
        [torchio.Subject(scan=torchio.ScalarImage(tensor=each)) for each in images]
    )


def recordings() -> Any:
    return torch.arange(20.0).reshape(10, 2)


BASES: dict[str, tuple[type, Callable[[], Any]]] = {
    "MONAI": (monai.data.DataLoader, scans),
    "torch_geometric": (torch_geometric.loader.DataLoader, graphs),
    "TorchIO": (torchio.SubjectsLoader, subjects),
    "SpeechBrain": (SaveableDataLoader, recordings),
}


def numbers(batches: Any) -> list[Any]:
    """Return the types and the values of all tensors in batches, as far as they go."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, torch_geometric.data.Data):
            return of(value.to_dict())
        if isinstance(value, dict):
            return {key: of(each) for key, each in value.items()}
        return [of(each) for each in value] if isinstance(value, list) else str(value)

    return [of(batch) for batch in batches]


def make(cls: Any, data: Any, num_workers: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    order = {"shuffle": True, "generator": generator, "num_workers": num_workers}
    return cls(data, batch_size=4, **order)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("framework", BASES)
def test_a_class_of_a_framework_is_combined_with_ours(
    framework: str, num_workers: int
) -> None:
    theirs, samples = BASES[framework]
    data = samples()
    combined = type("Loader", (theirs, pyparallel.DataLoader), {})
    expected, loader = numbers(make(theirs, data, 0)), make(combined, data, num_workers)
    assert len(expected) == 3 and len({str(each) for each in expected}) == 3
    iterator = iter(loader)
    first, state = next(iterator), loader.state_dict()
    assert numbers([first, *iterator]) == expected
    again = make(combined, data, num_workers)
    again.load_state_dict(state)
    assert numbers(again) == expected[1:]
    ahead = pyparallel.PreDataLoader(make(combined, data, num_workers), "cpu")
    assert numbers(ahead) == expected
    assert loader.stats().batches == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_checkpoint_of_speechbrain_continues_in_mid_epoch(
    num_steps: int, num_workers: int, tmp_path: Path
) -> None:
    class Loader(SaveableDataLoader, pyparallel.DataLoader):  # type: ignore[misc]
        """The class of docs/frameworks.md."""

    found = []
    for cls in (SaveableDataLoader, Loader):
        begun, data = make(cls, recordings(), num_workers), recordings()
        batches = iter(begun)
        for _ in range(num_steps):
            next(batches)
        folder = tmp_path / cls.__name__
        Checkpointer(folder, {"loader": begun}).save_checkpoint(end_of_epoch=False)
        resumed = make(cls, data, num_workers)
        Checkpointer(folder, {"loader": resumed}).recover_if_possible()
        found.append([numbers(resumed), len(numbers(resumed))])
    assert found[0] == found[1]
    assert found[0][0] == numbers(make(SaveableDataLoader, data, 0))[num_steps:]


class Damaged(torch.utils.data.Dataset[int]):
    """Numbers without a length, so that a damaged batch is left out."""

    def __getitem__(self, index: int) -> int:
        if index in (0, 1, 5):
            raise ValueError(f"number {index} is damaged")
        return index


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda each: each, pyparallel.PreDataLoader])
def test_a_checkpoint_of_speechbrain_has_the_position_of_the_loop(
    wrap: Any, num_workers: int, tmp_path: Path
) -> None:
    class Loader(SaveableDataLoader, pyparallel.DataLoader):  # type: ignore[misc]
        """The class of docs/frameworks.md."""

    def make() -> Any:
        options: Any = {"num_workers": num_workers, "on_error": "skip"}
        return Loader(Damaged(), batch_sampler=PAIRS, **options)

    whole = [[2, 3], [4], [6, 7], [8, 9]]
    batches = wrap(loader := make())
    for number, batch in enumerate(batches):
        assert batch.tolist() == whole[number]
        folder = tmp_path / str(number)
        Checkpointer(folder, {"loader": loader}).save_checkpoint(end_of_epoch=False)
        resumed = make()
        Checkpointer(folder, {"loader": resumed}).recover_if_possible()
        assert [each.tolist() for each in wrap(resumed)] == whole[number + 1 :]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("repeats", [1, 2])
def test_the_class_of_monai_that_reads_ahead_refuses_its_state(
    repeats: int, num_workers: int
) -> None:
    class Loader(monai.data.ThreadDataLoader, pyparallel.DataLoader):  # type: ignore[misc]
        """Its batches are read in a thread of MONAI."""

    loader = Loader(list(range(8)), 1, repeats=repeats, num_workers=num_workers)
    batches = iter(loader)
    found = [next(batches)]
    text = (
        r"ThreadDataLoader\.__iter__ reads batches in another thread\. Use pyparallel"
    )
    with pytest.raises(RuntimeError, match=text):
        loader.state_dict()
    found += batches
    assert [int(batch) for batch in found] == [i // repeats for i in range(8 * repeats)]
    again = Loader(list(range(8)), num_workers=num_workers)
    again.load_state_dict(loader.state_dict())  # between two epochs
    assert [int(batch) for batch in again] == list(range(8))


@pytest.mark.parametrize("theirs", [StatefulDataLoader, litdata.StreamingDataLoader])
def test_a_class_with_iterators_of_its_own_is_no_base_of_ours(theirs: type) -> None:
    text = f"but {theirs.__name__} makes iterators of its own. Use one of the two"
    with pytest.raises(TypeError, match=text):
        type("Loader", (theirs, pyparallel.DataLoader), {})


#: The beginning of programs for packages of make test-peers in a folder of their own.
OTHER_FOLDER = """
import sys
import torch
import pyparallel

sys.path.insert(0, sys.argv[1])
# torchvision of PyPI is compiled for CUDA's torch. Its Python code asks for these two.
compiled = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    compiled.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
"""
TIMM = """
from timm.data.loader import MultiEpochsDataLoader

class Loader(MultiEpochsDataLoader, pyparallel.DataLoader):
    pass

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        if index == 4:
            raise ValueError("row 4 is damaged")
        return index

def make(cls, rows, **options):
    generator = torch.Generator().manual_seed(1)
    workers = {"num_workers": count, "persistent_workers": count > 0}
    return cls(rows, 2, shuffle=True, generator=generator, **workers, **options)

def numbers(loader):
    return [batch.tolist() for batch in loader]

def check():
    theirs, ours = [make(cls, range(9)) for cls in (MultiEpochsDataLoader, Loader)]
    for _ in range(3):
        assert numbers(ours) == numbers(theirs)
        assert len(ours) == 5
        next(iter(ours)), next(iter(theirs))
        try:
            ours.state_dict()
        except RuntimeError as error:
            print(error)
    assert ours.stats().batches == 18
    skipped = make(Loader, Rows(), on_error="skip")
    for _ in range(2):
        rows = sum(numbers(skipped), [])
        assert len(rows) >= 8 and 4 not in rows

if __name__ == "__main__":
    for count in (0, 2):
        check()
"""


TORCHVISION = """
from torchvision.transforms import v2

IMAGE = (torch.arange(3 * 16 * 16) % 256).to(torch.uint8).view(3, 16, 16)
TRANSFORMS = {
    "flip": v2.RandomHorizontalFlip(),
    "crop": v2.RandomResizedCrop(8),
    "jitter": v2.ColorJitter(0.5, 0.5),
    "rotation": v2.RandomRotation(45),
    "erasing": v2.RandomErasing(1.0),
    "noise": v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise()]),
    "choice": v2.RandomChoice([v2.RandomInvert(), v2.RandomPosterize(2)]),
    "policy": v2.RandAugment(),
}

class Images(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 12
    def __getitem__(self, index):
        with OwnGenerator():
            return self.transform(IMAGE)

def images(transform, method, count):
    loader = pyparallel.DataLoader(
        Images(transform), 3, num_workers=count, worker_method=method,
        sample_seeds=True, generator=torch.Generator().manual_seed(1))
    return torch.cat(list(loader))

if __name__ == "__main__":
    for name, transform in TRANSFORMS.items():
        before = torch.get_rng_state()
        expected = images(transform, "multiprocessing", 0)
        for method, count in [("multiprocessing", 2), ("thread", 1), ("thread", 3)]:
            assert images(transform, method, count).equal(expected), (name, method)
        assert len(expected.unique(dim=0)) > 1, name
        assert torch.get_rng_state().equal(before), name
        print(name)
"""


def run_other_folder(program: str, path: Path) -> str:
    """Run a program that uses packages in the folder of timm; return its output."""
    folder = Path(sys.prefix) / "timm"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}: make test-peers installs it")
    path.write_text(OTHER_FOLDER + program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path, folder],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_class_of_timm_with_one_iterator_for_all_epochs(tmp_path: Path) -> None:
    text = "MultiEpochsDataLoader.__iter__ reads one iterator in several epochs"
    assert run_other_folder(TIMM, tmp_path / "program.py").count(text) == 2 * 3


def test_the_recipe_for_transforms_of_torchvision(tmp_path: Path) -> None:
    texts = [block.text for block in blocks("docs/threads.md")]
    (text,) = [each for each in texts if "class OwnGenerator" in each]
    recipe = text.partition("with OwnGenerator():")[0]
    program = f"from pyparallel import sample_random\n{recipe}{TORCHVISION}"
    assert len(run_other_folder(program, tmp_path / "program.py").split()) == 8


# --------------------------------------------------------------- our loader in a loop
X = torch.linspace(-1, 1, 12)[:, None]
ROWS = torch.utils.data.TensorDataset(X, 3 * X + 1)


def by_fastai(loader: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    loaders = fastai.learner.DataLoaders(loader, loader, device="cpu")
    loss = torch.nn.MSELoss()
    learner = fastai.learner.Learner(loaders, model, loss_func=loss, lr=0.1)
    with learner.no_logging():
        learner.fit(2)
    return model


def by_ignite(loader: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = ignite.engine.create_supervised_trainer(
        model, optimizer, torch.nn.MSELoss(), device="cpu"
    )
    step.run(loader, max_epochs=2)
    return model


class Line(lightning.LightningModule):  # type: ignore[misc]
    """A line, for Lightning and for transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return {"loss": (self.line(x) - y).square().mean()}

    def training_step(self, batch: Any) -> Any:
        return self(*batch)["loss"]

    def validation_step(self, batch: Any) -> None:
        self(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def by_lightning(loader: Any) -> Any:
    """Begin a pass too many, and draw from the generator for each validation."""
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    shared = {"generator": loader.generator}
    trainer.fit(model, loader, torch.utils.data.DataLoader(ROWS, 4, **shared))
    return model.line


def by_transformers(loader: Any) -> Any:
    """Train for a number of steps, in groups of two: no pass is asked for its end."""

    class Training(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

        def get_batch_samples(self, batches: Any, *others: Any) -> Any:
            named = ({"x": x, "y": y} for x, y in batches)
            return super().get_batch_samples(named, *others)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=3,
            learning_rate=0.1,
            gradient_accumulation_steps=2,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        model = Line()
        Training(model, arguments, train_dataset=ROWS).train()
    return model.line


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("train", [by_fastai, by_ignite, by_lightning, by_transformers])
def test_a_loop_trains_as_with_its_own_loader(train: Any, num_workers: int) -> None:
    def weights(cls: Any, wrap: Callable[[Any], Any] = lambda each: each) -> Any:
        torch.manual_seed(0)
        return train(wrap(make(cls, ROWS, num_workers))).weight

    own = torch.utils.data.DataLoader
    expected = weights(own)
    assert torch.equal(weights(pyparallel.DataLoader), expected)
    if train is not by_fastai:  # it makes another loader from the arguments
        for cls in (pyparallel.DataLoader, own):
            assert torch.equal(weights(cls, pyparallel.PreDataLoader), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skorch_makes_our_loader(num_workers: int) -> None:
    def weights(cls: Any) -> Any:
        torch.manual_seed(0)
        net = skorch.NeuralNetRegressor(
            torch.nn.Linear,
            module__in_features=1,
            module__out_features=1,
            max_epochs=2,
            batch_size=4,
            train_split=None,
            verbose=0,
            iterator_train=cls,
            iterator_train__shuffle=True,
            iterator_train__num_workers=num_workers,
        )
        return net.fit(X, ROWS.tensors[1]).module_.weight

    assert torch.equal(
        weights(pyparallel.DataLoader), weights(torch.utils.data.DataLoader)
    )
