"""Every block of Python in the pages runs; all other blocks are listed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from docs_blocks import all_blocks, run_page

import pyparallel.mmcv

pytestmark = pytest.mark.one_backend

#: Code by page that runs before each Python block of the page.
SETUP = {
    "docs/mmengine-wrappers.md": """
import functools
import os
import torch
from torch import nn
from pyparallel.mmengine import *
from pyparallel.mmengine import fully_sharded_distributed
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

class TransformerBlock(nn.Linear):
    pass

class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.block = TransformerBlock(1, 1)
    def forward(self, inputs, mode):
        return dict(loss=self.block(inputs))

class Gan(BaseModel):
    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(2, 1)
    def forward(self, inputs, mode):
        return None
    def train_step(self, data, wrappers):
        with wrappers["critic"].optim_context(self.critic):
            loss = self.critic(data["inputs"]).sum()
        wrappers["critic"].update_params(loss)
        return dict(loss=loss)

# Without a GPU the wrapper needs a device for the shards.
MMFullyShardedDataParallel = functools.partial(
    fully_sharded_distributed.MMFullyShardedDataParallel, device_id="cpu")
model, gan = Net(), Gan()
critic = torch.optim.SGD(gan.critic.parameters(), lr=0.1)
optim_wrapper_dict = OptimWrapperDict(critic=OptimWrapper(critic))
""",
    "docs/profile-command.md": """
import sys
sys.argv = ["train.py", "--pictures", "16", "--blurs", "1"]
""",
    "docs/sampler.md": """
import torch
class Photos(torch.utils.data.Dataset):
    infos = [{"height": 3 + i % 7, "width": 9 - i % 5} for i in range(40)]
    def __len__(self):
        return len(self.infos)
    def __getitem__(self, i):
        return i
dataset, num_epochs, step = Photos(), 2, lambda batch: None
""",
}
#: Pages whose Python another test runs, and that test.
ELSEWHERE = {
    "README.md": "tests/project/test_docs.py",
    "docs/evaluation.md": "tests/sampler/test_distributed_eval_sampler.py",
}
#: Pages whose sessions run here, and the test with the peers that runs the rest.
BESIDE_PEERS = {"docs/frameworks.md": "tests/project/test_docs_differential.py"}
PYTHON = sorted({block.page for block in all_blocks("python", "pycon")})


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["page"])
    with mock.patch.dict(os.environ):
        yield
    pyparallel.mmcv.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PYTHON if page not in ELSEWHERE])
# With a single rank torch has nothing to shard.
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_python_of_a_page_runs_and_prints_the_shown_output(page: str) -> None:
    languages = ("pycon",) if page in BESIDE_PEERS else ("pycon", "python")
    assert run_page(page, *languages, before=SETUP.get(page, "")) > 0
