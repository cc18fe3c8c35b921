"""mmengine's Runner with our wrapper, collate, preprocessor and optimizer, by config.

    torchrun --nproc_per_node=2 examples/mmengine_runner.py [FOLDER]
    python examples/mmengine_runner.py [FOLDER]            # one process

The model learns the kind of a Unicode character from its name, of 3 to 75 letters. With
the FOLDER of an earlier run, that run continues.
"""

import os
import sys
import unicodedata

import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import Runner

from pyparallel import DataContainer

KINDS = "LMNPS"  # letter, mark, number, punctuation, symbol


@DATASETS.register_module()
class CharacterNames(torch.utils.data.Dataset):
    """Every fifth name is held out."""

    def __init__(self, held_out=False):
        chars = [chr(i) for i in range(0x20, 0x3000) if unicodedata.name(chr(i), "")]
        kinds = [(c, KINDS.find(unicodedata.category(c)[0])) for c in chars]
        rows = [(unicodedata.name(c), kind) for c, kind in kinds if kind >= 0]
        self.rows = [row for i, row in enumerate(rows) if (i % 5 == 0) == held_out]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        name, kind = self.rows[index]
        letters = torch.tensor([list(name.encode())])  # (1, length)
        return dict(
            inputs=DataContainer(letters, stack=True, pad_dims=1),
            kinds=DataContainer(torch.tensor(kind), stack=True, pad_dims=None),
            names=DataContainer(name, cpu_only=True),
        )


@MODELS.register_module()
class NameReader(BaseModel):
    """A convolution over five letters, and the maximum over the name."""

    def __init__(self, data_preprocessor):
        super().__init__(data_preprocessor)
        self.letters = torch.nn.Embedding(128, 16, padding_idx=0)
        self.words = torch.nn.Conv1d(16, 32, 5, padding=2)
        self.kind = torch.nn.Linear(32, len(KINDS))

    def forward(self, inputs, kinds, names, mode):  # noqa: D102  # mmengine's
        letters = self.letters(inputs.flatten(1)).transpose(1, 2)
        scores = self.kind(self.words(letters).relu().amax(2))
        if mode == "loss":
            return dict(loss=torch.nn.functional.cross_entropy(scores, kinds))
        return (scores.argmax(1) == kinds).tolist()


@METRICS.register_module()
class Accuracy(BaseMetric):  # noqa: D101  # mmengine's
    def process(self, data_batch, data_samples):  # noqa: D102  # mmengine's
        self.results += data_samples

    def compute_metrics(self, results):  # noqa: D102  # mmengine's
        return dict(accuracy=sum(results) / len(results))


CONFIG = """
custom_imports = dict(imports=["pyparallel.mmengine.join"])  # the group of torchrun
model = dict(
    type="NameReader", data_preprocessor=dict(type="pyparallel.BaseDataPreprocessor"))
model_wrapper_cfg = dict(type="pyparallel.MMDistributedDataParallel")
optim_wrapper = dict(
    type="pyparallel.AmpOptimWrapper", dtype="bfloat16",
    optimizer=dict(type="Adam", lr=0.01), clip_grad=dict(max_norm=1.0))
train_dataloader = dict(
    batch_size=32, dataset=dict(type="CharacterNames"),
    collate_fn=dict(type="pyparallel.collate", samples_per_gpu=32),
    sampler=dict(type="DefaultSampler", shuffle=True))
val_dataloader = dict(
    batch_size=32, dataset=dict(type="CharacterNames", held_out=True),
    collate_fn=dict(type="pyparallel.collate", samples_per_gpu=32),
    sampler=dict(type="DefaultSampler", shuffle=False))
train_cfg, val_cfg = dict(by_epoch=True, max_epochs=2), dict()
val_evaluator, randomness, resume = dict(type="Accuracy"), dict(seed=0), True
"""
if __name__ == "__main__":
    config = Config.fromstring(CONFIG, ".py")
    config.work_dir = (sys.argv[1:] or ["mmengine-output"])[0]
    config.launcher = "pytorch" if "RANK" in os.environ else "none"
    Runner.from_cfg(config).train()
