"""The table of roles in docs/frameworks.md: a run on two ranks proves each cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import forked
from tests.support.ranks.torchrun import python
from tests.support.repository.folders import ROOT, SUPPORT

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

ROLES = (
    "moves the batch",
    "sets the epoch",
    "divides the data",
    "saves the loader's state",
    "arguments of the loader that stay",
)


class Evidence:
    """The records of both ranks, see ``framework_roles.py``."""

    def __init__(self, folder: Path) -> None:
        texts = [(folder / f"rank{rank}.json").read_text() for rank in range(2)]
        self.ranks = [json.loads(text) for text in texts]

    def callers(self, run: str, action: str) -> list[str]:
        """Return the libraries whose code did an action, on both ranks."""
        first, second = (rank[run]["callers"].get(action, []) for rank in self.ranks)
        assert first == second
        return list(first)

    def fact(self, run: str, name: str) -> list[Any]:
        return [rank[run]["facts"][name] for rank in self.ranks]

    def is_divided(self, run: str, without: tuple[int, ...] = ()) -> bool:
        """Return True if each epoch has each sample once, apart from a last batch."""
        expected = [i for i in range(16) if i not in without]
        return all(
            sorted(set(found)) == expected and len(found) - len(expected) <= 8
            for found in self.epochs(run)
        )

    def is_shuffled(self, run: str) -> bool:
        """Return True if the second epoch has another order than the first one."""
        first, second = self.epochs(run)
        return first != second

    def epochs(self, run: str) -> list[list[int]]:
        """Return the samples of both ranks in each epoch."""
        ranks = [rank[run]["epochs"] for rank in self.ranks]
        return [[*first, *second] for first, second in zip(*ranks, strict=True)]

    def keeps_all(self, run: str, loader: str) -> bool:
        """Return True if the loader of a run is ours with all of its arguments."""
        return self.fact(run, "changed") == [[], []] and all(
            name.endswith(f".{loader}") and name.startswith("pyparallel.")
            for name in self.fact(run, "loader")
        )


def of_accelerate() -> dict[str, tuple[str, Callable[[Evidence], bool]]]:
    own, prepared = "alone", "prepared"
    return {
        ROLES[0]: (
            "you (`PreDataLoader`), or the prepared loader",
            lambda e: (
                e.callers(own, "to") == []
                and e.callers("PreDataLoader", "to") == ["pyparallel"]
                and e.callers(prepared, "to") == ["accelerate"]
            ),
        ),
        ROLES[1]: (
            "you, or the prepared loader",
            lambda e: (
                e.callers(own, "set_epoch") == ["you"]
                and e.callers(prepared, "set_epoch") == ["accelerate"]
                and e.is_shuffled(own)
                and e.is_shuffled(prepared)
            ),
        ),
        ROLES[2]: (
            "your sampler, or `prepare`",
            lambda e: e.is_divided(own) and e.is_divided(prepared, without=(5,)),
        ),
        ROLES[3]: (
            "you, on each rank",
            lambda e: (
                e.callers(own, "state_dict") == []
                and e.fact(own, "saved") == e.fact(prepared, "saved") == [[], []]
                and e.fact("own state", "continues") == [True, True]
            ),
        ),
        ROLES[4]: (
            "all",
            lambda e: (
                e.keeps_all(prepared, "DataLoader")
                and sorted(e.fact(prepared, "errors")) == [[], [5]]
            ),
        ),
    }


def of_lightning() -> dict[str, tuple[str, Callable[[Evidence], bool]]]:
    runs = "shuffled", "SizeBatchSampler"
    return {
        ROLES[0]: (
            "Lightning",
            lambda e: all(e.callers(run, "to") == ["lightning"] for run in runs),
        ),
        ROLES[1]: (
            "Lightning",
            lambda e: all(
                e.callers(run, "set_epoch") == ["lightning"] and e.is_shuffled(run)
                for run in runs
            ),
        ),
        ROLES[2]: (
            "Lightning, or `SizeBatchSampler`",
            lambda e: all(map(e.is_divided, runs)),
        ),
        ROLES[3]: (
            "Lightning, of the first rank",
            lambda e: (
                all(e.callers(run, "state_dict") == ["lightning"] for run in runs)
                and e.fact("shuffled", "saved") == [True, False]
                and e.fact("SizeBatchSampler", "saved")[0]
            ),
        ),
        ROLES[4]: (
            "all",
            lambda e: all(e.keeps_all(run, "DataLoader") for run in runs),
        ),
    }


def of_transformers() -> dict[str, tuple[str, Callable[[Evidence], bool]]]:
    own = "loader", "PreDataLoader"
    return {
        ROLES[0]: (
            "the Trainer, or `PreDataLoader` ahead of the step",
            lambda e: (
                e.callers("loader", "to") == ["transformers"]
                and e.callers("PreDataLoader", "to") == ["pyparallel"]
            ),
        ),
        ROLES[1]: (
            "you (callback), or a prepared loader",
            lambda e: (
                e.callers("loader", "set_epoch") == []
                and not e.is_shuffled("loader")
                and e.callers("PreDataLoader", "set_epoch") == ["you"]
                and e.is_shuffled("PreDataLoader")
                and e.callers("prepared", "set_epoch") == ["accelerate"]
            ),
        ),
        ROLES[2]: (
            "your sampler, or a prepared loader",
            lambda e: (
                not e.is_divided("undivided", without=(5,))
                and e.is_divided("PreDataLoader", without=(5,))
                and e.is_divided("prepared", without=(5,))
            ),
        ),
        ROLES[3]: (
            "no one: the Trainer skips used batches",
            lambda e: (
                all(e.callers(run, "state_dict") == [] for run in own)
                and all(e.fact(run, "saved") == [[], []] for run in (*own, "prepared"))
            ),
        ),
        ROLES[4]: (
            "all, with the override",
            lambda e: (
                e.keeps_all("loader", "DataLoader")
                and e.keeps_all("PreDataLoader", "PreDataLoader")
                and not any(map(is_ours, e.fact("own loop", "loader")))
            ),
        ),
    }


def of_mmengine() -> dict[str, tuple[str, Callable[[Evidence], bool]]]:
    runs = "Runner", "ours", "ours resumed"
    return {
        ROLES[0]: (
            "the preprocessor",
            lambda e: all(e.callers(run, "to") == ["mmengine"] for run in runs),
        ),
        ROLES[1]: (
            "a hook of the Runner",
            lambda e: all(e.callers(run, "set_epoch") == ["mmengine"] for run in runs),
        ),
        ROLES[2]: (
            "the sampler of the config",
            lambda e: e.is_divided("Runner") and e.is_divided("ours", without=(5,)),
        ),
        ROLES[3]: (
            "no one: runs continue at an epoch",
            lambda e: (
                all(e.callers(run, "state_dict") == [] for run in runs)
                and all(len(rank["ours resumed"]["epochs"]) == 1 for rank in e.ranks)
                and e.is_divided("ours resumed", without=(5,))
            ),
        ),
        ROLES[4]: (
            "all, with [`pyparallel.Runner`](mmengine-runner.md)",
            lambda e: (
                e.keeps_all("ours", "DataLoader")
                and sorted(e.fact("ours resumed", "errors")) == [[], [5]]
                and not any(map(is_ours, e.fact("Runner", "loader")))
            ),
        ),
    }


def of_ray() -> dict[str, tuple[str, Callable[[Evidence], bool]]]:
    run = "SizeBatchSampler"
    return {
        ROLES[0]: ("you", lambda e: e.callers(run, "to") == []),
        ROLES[1]: (
            "`SizeBatchSampler` counts",
            lambda e: (
                e.callers(run, "set_epoch") == []
                and e.fact(run, "counted") == [[0, 1, 2]] * 2
            ),
        ),
        ROLES[2]: ("`SizeBatchSampler`", lambda e: e.is_divided(run)),
        ROLES[3]: (
            "you, in rank 0's checkpoint",
            lambda e: (
                e.callers(run, "state_dict") == ["you"]
                and e.fact(run, "is_of_all") == [True, True]
            ),
        ),
        ROLES[4]: (
            "all: [many-machines.md](many-machines.md#ray-train)",
            lambda e: e.keeps_all(run, "DataLoader"),
        ),
    }


CELLS = {
    "accelerate": of_accelerate(),
    "Lightning": of_lightning(),
    "transformers": of_transformers(),
    "mmengine": of_mmengine(),
    "Ray": of_ray(),
}
#: The imports that both ranks share.
IMPORTS = {
    "accelerate": "import torch._dynamo, accelerate",
    "Lightning": "import torch._dynamo, lightning",
    "transformers": "import torch._dynamo\nfrom transformers import Trainer",
    "mmengine": "import torch._dynamo, mmengine.runner",
}
_found: dict[str, Evidence] = {}


def is_ours(loader: str) -> bool:
    return loader.startswith("pyparallel.")


def evidence(framework: str, folder: Path) -> Evidence:
    """Return the records of a framework. The first call runs it."""
    if framework not in _found:
        if framework == "Ray":
            done = python(SUPPORT / "ranks" / "ray_roles.py", str(folder), limit=450)
            assert done.returncode == 0, done.stderr[-5000:]
        else:
            script = str(SUPPORT / "ranks" / "framework_roles.py")
            job = (folder, script, [framework, str(folder)], 2)
            (ended,) = forked.run(IMPORTS[framework], [job])
            assert ended.codes == [0, 0], ended.err[-5000:]
        _found[framework] = Evidence(folder)
    return _found[framework]


def cell(framework: str, role: str) -> Any:
    marks = [pytest.mark.ray] if framework == "Ray" else []
    return pytest.param(framework, role, id=f"{framework}: {role}", marks=marks)


@pytest.mark.parametrize(
    ("framework", "role"),
    [cell(framework, role) for framework in CELLS for role in ROLES],
)
def test_a_run_proves_a_cell(framework: str, role: str, tmp_path: Path) -> None:
    found = evidence(framework, tmp_path)
    assert CELLS[framework][role][1](found), json.dumps(found.ranks)


def test_the_page_has_these_cells() -> None:
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    section = text.partition("## Roles of a framework")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    head, _, *found = [[it.strip() for it in row.split("|")] for row in rows]
    assert head == ["", *ROLES]
    assert found == [
        [framework, *(cells[role][0] for role in ROLES)]
        for framework, cells in CELLS.items()
    ]
