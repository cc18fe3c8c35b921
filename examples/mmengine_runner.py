"""mmengine's Runner with our wrapper, collate, preprocessor and optimizer.

    torchrun --nproc_per_node=2 examples/mmengine_runner.py [FOLDER]

With the FOLDER of an earlier run, that run continues. `python` starts one process.
"""

import os
import sys
import unicodedata

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

import pyparallel.mmengine


def sample_of(char):
    """Return the name of a character, and whether it is a letter."""
    letters = torch.tensor([list(unicodedata.name(char).encode())])  # (1, length)
    name = pyparallel.DataContainer(letters, stack=True, pad_dims=1)
    return {"name": name, "is_letter": int(char.isalpha())}


class NameReader(BaseModel):
    """Add the scores of the letters of a name."""

    def __init__(self):
        super().__init__(data_preprocessor=dict(type="pyparallel.BaseDataPreprocessor"))
        self.scores = torch.nn.EmbeddingBag(128, 2, mode="sum", padding_idx=0)

    def forward(self, name, is_letter, mode):  # noqa: D102  # mmengine's
        scores = self.scores(name.flatten(1))
        return {"loss": torch.nn.functional.cross_entropy(scores, is_letter)}


if __name__ == "__main__":
    launcher = "pytorch" if "RANK" in os.environ else "none"
    if launcher == "pytorch":
        pyparallel.mmengine.init_dist(launcher)  # mmengine's own one needs a GPU
    chars = [chr(i) for i in range(0x20, 0x3000) if unicodedata.name(chr(i), "")]
    adam = dict(optimizer=dict(type="Adam", lr=0.01), dtype="bfloat16")
    Runner(
        model=dict(type=NameReader),  # made after the seed is set
        work_dir=(sys.argv[1:] or ["mmengine-output"])[0],
        train_dataloader=dict(
            dataset=[sample_of(char) for char in chars],
            sampler=dict(type="DefaultSampler", shuffle=True),
            batch_size=32,
            collate_fn=dict(type="pyparallel.collate", samples_per_gpu=32),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(type="pyparallel.AmpOptimWrapper", **adam),
        cfg=dict(model_wrapper_cfg=dict(type="pyparallel.MMDistributedDataParallel")),
        launcher=launcher,
        randomness=dict(seed=0),
        resume=True,
    ).train()
