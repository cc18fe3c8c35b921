"""The names of `unicode_names.py`, trained by accelerate, and by Lightning.

    pip install accelerate lightning
    python examples/lightning_accelerate.py accelerate
    python examples/lightning_accelerate.py lightning

accelerate calls the ``.to`` of objects in a batch, which DataContainers have. Lightning
has a hook. `scatter` returns the tensors; those on the device are not copied again.
"""

import functools
from argparse import ArgumentParser
from typing import Any

import torch
from unicode_names import Reader, of_like_sizes, samples

from pyparallel import DataLoader, collate, scatter


def loaders(batch: int, every: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of every n-th name: for training and for validation."""
    names: Any = samples()[::every]
    merge = functools.partial(collate, samples_per_gpu=batch)
    options: Any = {"batch_size": batch, "collate_fn": merge}
    rest = [name for i, name in enumerate(names) if i % 10]
    train: Any = DataLoader(of_like_sizes(rest, batch), **options)
    held_out: Any = DataLoader(of_like_sizes(names[::10], batch), **options)
    return train, held_out


def by_accelerate(args: Any) -> float:
    """Train; return the accuracy on held-out names."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, (train, held_out) = Reader(), loaders(args.batch, args.every)
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    parts = accelerator.prepare(model, optimizer, train, held_out)
    model, optimizer, train, held_out = parts
    for batch in train:
        data = scatter(batch, [accelerator.device])[0]
        loss = torch.nn.functional.cross_entropy(model(**data), data["kind"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    right = []
    for batch in held_out:
        data = scatter(batch, [accelerator.device])[0]
        found = model(**data).argmax(1) == data["kind"]
        right.append(accelerator.gather_for_metrics(found))
    return torch.cat(right).float().mean().item()


def by_lightning(args: Any) -> float:
    """Train; return the accuracy on held-out names."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def transfer_batch_to_device(self, batch: Any, device: Any, _: int) -> Any:
            """Send the batch in one copy; Lightning would call ``.to`` of each part."""
            return scatter(batch, [device])[0]

        def training_step(self, data: dict[str, torch.Tensor]) -> Any:
            return self.reader.train_step(data, None)["loss"]

        def validation_step(self, data: dict[str, torch.Tensor]) -> None:
            right = self.reader.val_step(data, None) / len(data["kind"])
            self.log("right", right, batch_size=len(data["kind"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 4e-3)

    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=1, enable_progress_bar=False, **quiet)
    trainer.fit(Module(), *loaders(args.batch, args.every))
    return float(trainer.callback_metrics["right"])


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trainer", choices=["accelerate", "lightning"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=1, help="use every n-th name")
    args = parser.parse_args()
    torch.manual_seed(0)
    train = {"accelerate": by_accelerate, "lightning": by_lightning}[args.trainer]
    print(f"{args.trainer}: {train(args):.3f} of held-out names")
