"""Every block of Python in the pages, the README and the docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import pyparallel
import pyparallel.mmcv
from tests.support.ranks.torchrun import python
from tests.support.repository.docs_blocks import all_blocks, run_page
from tests.support.repository.folders import ROOT

pytestmark = [pytest.mark.one_backend, pytest.mark.slow]

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
    "docs/many-machines.md": """
import numpy
import torch
dataset = [{"tokens": torch.ones(2 + i % 7)} for i in range(40)]
numpy.save("sizes.npy", numpy.array([len(x["tokens"]) for x in dataset], "int32"))
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
    "docs/threads.md": """
import torch
dataset, transform, image = range(64), torch.clone, torch.ones(3)
""",
}
#: Pages whose Python another test runs, and that test.
ELSEWHERE = {
    "README.md": "test_python_in_the_readme_prints_the_output_that_it_shows",
    "docs/evaluation.md": "tests/sampler/test_distributed_eval_sampler.py",
    "docs/sources.md": "tests/project/test_docs_sources.py",
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


@pytest.mark.parametrize("page", [page for page in PYTHON if page not in ELSEWHERE])
# With a single rank torch has nothing to shard.
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_python_of_a_page_runs_and_prints_the_shown_output(page: str) -> None:
    languages = ("pycon",) if page in BESIDE_PEERS else ("pycon", "python")
    assert run_page(page, *languages, before=SETUP.get(page, "")) > 0


def test_programs_with_workers_can_be_imported_by_them() -> None:
    programs = [
        block
        for block in all_blocks("python")
        if "import torch" in block.text and "num_workers=" in block.text
    ]
    guard = '\nif __name__ == "__main__":'
    assert len(programs) >= 6
    assert [each.name for each in programs if guard not in each.text] == []


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(pyparallel.__path__, "pyparallel.")
    if not module.name.endswith(("__main__", "._C"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_have_the_shown_results(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_python_in_the_readme_prints_the_output_that_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "block.py"
    for block in blocks:
        script.write_text(block, encoding="utf-8")
        done = python(script, limit=120)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == re.findall("^#> (.*)$", block, re.M)
