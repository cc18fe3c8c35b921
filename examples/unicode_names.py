"""Learn the kind of a Unicode character from its name, in ten seconds.

    python examples/unicode_names.py

A worker batches names of similar lengths, 2 to 88 letters, pads them to the longest,
and prepares the next batch while the model trains. Every tenth name is held out.
"""

import functools
import time
import unicodedata
from argparse import ArgumentParser
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel import DataContainer, DataLoader, MMDataParallel, PreDataLoader, collate

KINDS = ("Lo", "So", "Ll", "Mn", "Lu", "Sm", "No", "Nd")  # general categories
ALIKE = ("CJK", "HANGUL SYLLABLE", "TANGUT", "NUSHU", "KHITAN")  # and a number
Sample = dict[str, DataContainer]


def samples() -> list[Sample]:
    """Return the name of every character as numbers, and its kind."""
    found: list[Sample] = []
    for char in map(chr, range(0x110000)):
        name, kind = unicodedata.name(char, ""), unicodedata.category(char)
        if name and kind in KINDS and not name.startswith(ALIKE):
            letters = torch.tensor([list(name.encode())])  # (1, length)
            number = torch.tensor(KINDS.index(kind))
            sample = {"letters": DataContainer(letters, stack=True, pad_dims=1)}
            sample["kind"] = DataContainer(number, stack=True, pad_dims=None)
            found.append(sample)
    return found


def of_like_sizes(names: list[Sample], batch: int) -> list[Sample]:
    """Return batches of names with similar lengths, in random order."""
    names = sorted(names, key=lambda name: name["letters"].size(1))
    starts = (torch.randperm(len(names) // batch) * batch).tolist()
    order = [name for start in starts for name in names[start : start + batch]]
    return order + names[len(order) :]


class Reader(nn.Module):
    """A convolution over five letters, and the maximum over the name."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 16, padding_idx=0)
        self.words = nn.Conv1d(16, 64, 5, padding=2)
        self.kind = nn.Linear(64, len(KINDS))

    def forward(self, letters: Tensor, kind: Tensor) -> Tensor:
        """Return scores ``(n, 8)`` of names ``(n, 1, longest)``."""
        words = self.words(self.letters(letters.squeeze(1)).mT)
        return self.kind(words.relu().amax(2))

    def train_step(self, data: dict[str, Tensor], optimizer: Any) -> dict[str, Any]:
        """Return the loss of a batch of tensors."""
        return {"loss": nn.functional.cross_entropy(self(**data), data["kind"])}

    def val_step(self, data: dict[str, Tensor], optimizer: Any) -> Tensor:
        """Return the number of correct kinds."""
        return (self(**data).argmax(1) == data["kind"]).sum()


def main() -> None:
    """Train, then print the accuracy on held-out names."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    start, names = time.perf_counter(), samples()
    torch.manual_seed(0)
    merge = functools.partial(collate, samples_per_gpu=args.batch)
    options: Any = {"batch_size": args.batch, "num_workers": 1, "collate_fn": merge}
    rest = [name for i, name in enumerate(names) if i % 10]
    train: Any = DataLoader(of_like_sizes(rest, args.batch), **options)
    held_out: Any = DataLoader(of_like_sizes(names[::10], args.batch), **options)
    model = MMDataParallel(Reader(), device_ids=[0])  # the host if there is no GPU
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for epoch in range(args.epochs):
        for data in PreDataLoader(train):
            loss = model.train_step(data, optimizer)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(int(model.val_step(data, None)) for data in held_out)
        print(f"epoch {epoch + 1}: {right / len(names[::10]):.3f} of held-out names")
    print(f"{len(names)} names, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
