"""Ray Data reads and transforms samples of different lengths: `python ray_data.py`."""

import ray.data
import torch

from pyparallel import Collate, Concat, DataLoader, Pad, SizeBatcher


def tokens_of(row):
    """Return a sample of a text, as Ray runs it on any node."""
    codes = torch.tensor(list(row["item"].encode()), dtype=torch.int32)
    return {"tokens": codes.numpy(), "words": [len(w) for w in row["item"].split()]}


class Rows(torch.utils.data.IterableDataset):
    """The rows of Ray Data, or of a rank's `ray.train.get_dataset_shard`."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        for block in self.source.iter_batches(batch_size=64, batch_format="pyarrow"):
            for row in block.to_pylist():
                yield {name: torch.tensor(values) for name, values in row.items()}


def size_of(row):
    """Return the dimension that is padded."""
    return len(row["tokens"])


if __name__ == "__main__":
    ray.init("local")
    texts = [
        " ".join("data"[: i % 4 + 1] for i in range(n % 13 + 1)) for n in range(99)
    ]
    data = ray.data.from_items(texts).map(tokens_of)
    stream = SizeBatcher(Rows(data), size_of, max_padded=400)
    merge = Collate({"tokens": Pad(), "words": Concat()})
    for batch in DataLoader(stream, batch_size=None, collate_fn=merge):
        print(tuple(batch["tokens"].shape), batch["words"].offsets[-1].item())
