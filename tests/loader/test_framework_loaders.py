"""Loaders of other frameworks as a base of ours, and our loader in their loops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyparallel

try:
    import fastai.learner
    import ignite.engine
    import monai.data
    import skorch
    import torch_geometric.data
    import torch_geometric.loader
    import torchio
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.utils.checkpoints import Checkpointer
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


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("train", [by_fastai, by_ignite])
def test_a_loop_trains_as_with_its_own_loader(train: Any, num_workers: int) -> None:
    def weights(cls: Any, wrap: Callable[[Any], Any] = lambda each: each) -> Any:
        torch.manual_seed(0)
        return train(wrap(make(cls, ROWS, num_workers))).weight

    own = torch.utils.data.DataLoader
    expected = weights(own)
    assert torch.equal(weights(pyparallel.DataLoader), expected)
    if train is by_ignite:
        found = weights(pyparallel.DataLoader, pyparallel.PreDataLoader)
        assert torch.equal(found, expected)


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
