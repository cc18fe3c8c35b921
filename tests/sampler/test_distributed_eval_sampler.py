"""DistributedEvalSampler gives each sample to exactly one rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyparallel import DistributedEvalSampler
from tests.support.ranks.torchrun import torchrun
from tests.support.repository.docs_blocks import blocks

pytestmark = pytest.mark.one_backend

#: The two programs of the page.
PROGRAM, IN_STEP = (
    block.text for block in blocks("docs/evaluation.md") if block.language == "python"
)


@given(length=st.integers(0, 40), num_ranks=st.integers(1, 7), pad=st.booleans())
def test_each_sample_is_on_one_rank(length: int, num_ranks: int, pad: bool) -> None:
    samplers = [
        DistributedEvalSampler(range(length), num_ranks, rank, pad=pad)
        for rank in range(num_ranks)
    ]
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(each) for each in found]
    valid = [
        each[: sampler.num_valid] for each, sampler in zip(found, samplers, strict=True)
    ]
    assert sorted(i for each in valid for i in each) == list(range(length))
    restored = [-1] * length
    for rank, each in enumerate(valid):
        restored[rank::num_ranks] = each
    assert restored == list(range(length))
    sizes = {len(each) for each in found}
    assert max(sizes) - min(sizes) <= (0 if pad else 1)
    extra = [
        len(each) - sampler.num_valid
        for each, sampler in zip(found, samplers, strict=True)
    ]
    assert set(extra) <= ({0, 1} if pad else {0})
    assert all(0 <= i < length for each in found for i in each)


#: Arguments by the message of their error.
REFUSED: dict[str, dict[str, Any]] = {
    "rank must be less than num_replicas=2, but is 2. Ranks count from 0.": {
        "num_replicas": 2,
        "rank": 2,
    },
    "num_replicas must be an integer of 1 or more, but is 0.": {"num_replicas": 0},
    "pad must be True or False, but is 1 (int).": {"pad": 1},
}


def test_wrong_arguments_are_refused() -> None:
    for message, arguments in REFUSED.items():
        text = re.escape(f"DistributedEvalSampler: {message}")
        with pytest.raises((TypeError, ValueError), match=f"^{text}$"):
            DistributedEvalSampler(range(4), **arguments)


def run(script: Path, text: str) -> list[str]:
    script.write_text(text, encoding="utf-8")
    done = torchrun(script, processes=2, limit=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_program_prints_the_same_for_two_ranks(tmp_path: Path) -> None:
    expected = re.findall("^#> (.*)$", PROGRAM, re.MULTILINE)
    assert len(expected) == 2
    assert run(tmp_path / "evaluate.py", PROGRAM) == expected


#: Evaluate 17 samples on 2 ranks: 2 batches of 8 on rank 0, 1 on rank 1.
UNEVEN = """
class Points(Points):
    def __len__(self):
        return 17

def evaluate_joined(model, data):
    sampler = DistributedEvalSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad(), model.join(), model.no_sync():
        for points, labels in loader:
            correct = (model(points).argmax(1) == labels).sum()
            counts += torch.stack([correct, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return counts.tolist()

class Reduced(torch.nn.Linear):
    def forward(self, points):
        world = torch.ones(())
        dist.all_reduce(world)
        return super().forward(points) * world

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    ).eval()
    reduced = Reduced(16, 2)
    reduced.load_state_dict(model.module[1].state_dict())
    found = [
        evaluate(model, Points())[0],
        evaluate_joined(model, Points()),
        evaluate_in_step(model, Points()),
        evaluate_in_step(reduced, Points()),
    ]
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()
"""


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_batches(tmp_path: Path) -> None:
    definitions = PROGRAM.partition('if __name__ == "__main__":')[0] + IN_STEP
    (printed,) = run(tmp_path / "uneven.py", definitions + UNEVEN)
    found = eval(printed)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    with torch.no_grad():
        points = torch.stack([torch.randn(16, generator=seeded(i)) for i in range(17)])
        labels = (points.sum(1) > 0).long()
        correct, plain = (
            int((net(points).argmax(1) == labels).sum())
            for net in (model.eval(), model[1])
        )
    assert found == [[correct, 17], [correct, 17], [correct, 17], [plain, 17]]
