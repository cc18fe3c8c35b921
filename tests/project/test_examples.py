"""Every example uses public names, is described, and is run as a user runs it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import pyparallel
from tests.support.ranks import elastic_runs, forked
from tests.support.ranks.torchrun import python, torchrun
from tests.support.repository.docs_blocks import all_blocks, blocks
from tests.support.repository.folders import ROOT, SUPPORT, python_path

pytestmark = pytest.mark.one_backend

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("[!_]*.py"))
STRICT = ("-W", "error", "-W", "ignore:[PP004]")  # the host is enough


def needs(*packages: str) -> None:
    for name in packages:
        pytest.importorskip(name, reason=f"the example needs {name}")


def imported_from_the_package(path: Path) -> set[str]:
    """Return dotted names of a file's imports from pyparallel, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "pyparallel"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_uses_public_names_and_is_described(path: Path) -> None:
    modules = {"mmcv", "mmengine", "memory"}
    names = {f"pyparallel.{name}" for name in modules.union(pyparallel.__all__)}
    assert imported_from_the_package(path) - {"pyparallel"} <= names
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert re.search(rf"^\| \[{path.name}\]\(#", readme, re.MULTILINE)


#: The programs of the pages on frameworks and on many machines.
SHORT = "detection fully_sharded mmengine_runner ray_data ray_train resume".split()


@pytest.mark.parametrize("name", SHORT)
def test_a_program_for_a_framework_is_short(name: str) -> None:
    assert (FOLDER / f"{name}.py").read_text("utf-8").count("\n") <= 60


#: Pages that show differences from tutorials: their number, and the programs.
DIFFERENCES = {
    "docs/distributed.md": (1, ["resume"]),
    "docs/frameworks.md": (7, []),
    "docs/language-models.md": (1, []),
    "docs/many-machines.md": (3, ["fully_sharded", "ray_data", "ray_train"]),
    "docs/mmengine-runner.md": (1, ["mmengine_runner"]),
    "docs/sources.md": (4, []),
}


def test_all_pages_with_differences_are_known() -> None:
    assert {it.page for it in all_blocks("diff")} == set(DIFFERENCES)


@pytest.mark.parametrize("page", DIFFERENCES)
def test_a_page_shows_lines_of_its_programs(page: str) -> None:
    number, names = DIFFERENCES[page]
    programs = [it for it in blocks(page) if it.language in ("python", "pycon")]
    texts = [it.text.replace(">>> ", "") for it in programs]
    texts += [(FOLDER / f"{name}.py").read_text("utf-8") for name in names]
    lines = {line.partition("  #")[0].strip() for line in "\n".join(texts).splitlines()}
    found = [it.text for it in blocks(page) if it.language == "diff"]
    assert len(found) == number
    shown = [(line[0], line[1:].strip()) for line in "".join(found).splitlines()]
    assert {sign for sign, _ in shown} <= {"+", "-"}
    assert [line for sign, line in shown if (sign == "+") != (line in lines)] == []


@pytest.mark.slow
def test_kinds_of_characters_are_learned_from_their_names() -> None:
    script = FOLDER / "unicode_names.py"
    done = python(script, "--epochs", "1", "--batch", "256", options=STRICT)
    assert (done.returncode, done.stderr) == (0, "")
    epoch, summary = done.stdout.splitlines()
    (share,) = re.findall(r"^epoch 1: (0\.\d+) of held-out names$", epoch)
    assert float(share) > 0.8  # the most frequent kind has 0.49
    assert re.fullmatch(r"\d{5} names, \d+\.\d s", summary)


@pytest.mark.slow
def test_a_stopped_run_continues_in_mid_epoch(tmp_path: Path) -> None:
    needs("PIL")
    script = FOLDER / "detection.py"

    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    jobs = [  # an epoch has 8 steps
        (tmp_path, str(script), [str(tmp_path / "stopped"), steps], 2)
        for steps in ("13", "24")
    ]
    stopped = []
    for ended in forked.run("import torch._dynamo, pyparallel", jobs):
        assert (ended.codes, ended.err) == ([0, 0], "")
        stopped += ended.out.splitlines()
    done = torchrun(script, str(tmp_path / "whole"), "24")
    assert (done.returncode, done.stderr) == (0, "")
    assert stopped == done.stdout.splitlines()
    lines = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in stopped]
    losses = {int(line[1]): float(line[2]) for line in lines if line}
    assert list(losses) == list(range(1, 25))
    epochs = [sum(losses[8 * epoch + i] for i in range(1, 9)) for epoch in range(3)]
    assert epochs[2] < 0.7 * epochs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "ranks"),
    [
        # After 16 the ranks have agreed to go on, so they stop after the next step.
        (["SIGTERM:late:1:16", "SIGTERM:rank:0:21"], [2, 2, 2]),
        (["SIGTERM:rank:1:3", "SIGUSR1:rank:0:15"], [1, 2, 3]),
    ],
)
def test_a_sharded_run_continues_after_signals(
    tmp_path: Path, faults: list[str], ranks: list[int]
) -> None:
    def run(processes: int) -> list[int]:
        script = SUPPORT / "ranks" / "sharded_job.py"
        arguments = str(tmp_path / "stopped"), "2", *faults
        done = torchrun(script, *arguments, processes=processes)
        assert done.returncode == 0, done.stderr
        return indices(done.stdout)

    def indices(text: str) -> list[int]:
        return [int(index) for index in re.findall(r"uses (\d+)\.", text)]

    (tmp_path / "stopped").mkdir()
    used = [run(processes) for processes in ranks]
    counts = Counter(index for each in used for index in each)
    assert set(counts) == set(range(200)) and min(counts.values()) == 2
    # A last step that has too few batches for all ranks repeats some, in each part.
    num_repeated = (2 + len(faults)) * (max(ranks) - 1)
    assert sum(counts.values()) <= 400 + num_repeated * 25
    assert all(used)
    if ranks == [2, 2, 2]:
        expected, text = elastic_runs.unstopped(tmp_path / "whole")
        assert counts == Counter(indices(text))
        found = torch.load(tmp_path / "stopped" / "trained.pt")
        assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_code_of_mmcv_1_trains_without_mmcv() -> None:
    needs("sklearn")
    if importlib.util.find_spec("mmcv"):
        pytest.skip("mmcv is installed: see test_mmcv_1_trains_with_its_runner")
    done = python(FOLDER / "mmcv1_install.py", options=STRICT)
    assert (done.returncode, done.stderr) == (0, "")
    (off,) = re.findall(
        r"^trained by a loop: (\d\.\d\d) digits off, on average$", done.stdout
    )
    assert float(off) < 1  # of one to eight; always four and a half: two


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu", "cpu"]], ids=len)
def test_eight_images_become_eight_rows_of_scores(devices: list[str]) -> None:
    script = FOLDER / "parallel_apply.py"
    done = python(script, "--devices", *devices, options=("-W", "error"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "(8, 3, 32, 32) -> (8, 10) on cpu",
        "equal to one call on the whole batch; 4 of 4 gradients",
    ]


@pytest.mark.slow
def test_photographs_are_filtered_on_any_number_of_threads(tmp_path: Path) -> None:
    needs("PIL", "sklearn")
    found = []
    for threads in ("1", "2"):
        out = tmp_path / threads
        arguments = ("edges", "--out", str(out), "--threads", threads)
        script = FOLDER / "filter_photos.py"
        done = python(script, *arguments, options=("-W", "error"))
        assert (done.returncode, done.stderr) == (0, "")
        paths = [out / "china-edges.png", out / "flower-edges.png"]
        assert done.stdout.splitlines() == [str(path) for path in paths]
        found.append([path.read_bytes() for path in paths])
    assert found[0] == found[1] and min(map(len, found[0])) > 10_000


# ---------------------------------------------------------------------- the digits
DIGITS = FOLDER / "ragged_digits.py"


@pytest.mark.slow
def test_a_short_run_trains_and_leaves_its_report(tmp_path: Path) -> None:
    needs("sklearn", "matplotlib", "tqdm")
    sizes = ["--scenes", "64", "--val-scenes", "10", "--epochs", "1", "--workers", "1"]
    out = tmp_path / "new" / "out"
    done = python(DIGITS, *sizes, "--min-f1", "1.1", "--out", str(out))
    assert done.returncode == 1 and "below --min-f1 1.1" in done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert 0 <= summary["f1"] <= 1 and summary["processes"] == 1
    for picture in ("training.png", "predictions.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "layout is composed" in done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_missing_packages_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('no module sklearn')\n")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    done = python(DIGITS, "--help")
    assert done.returncode == 1
    assert "pip install 'pyparallel-torch[demo]'" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------- mmcv 1.x, accelerate, Lightning
@pytest.mark.also_peers
@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_the_same_model_is_trained_by_others(trainer: str) -> None:
    pytest.importorskip(trainer)
    script = FOLDER / "lightning_accelerate.py"
    done = python(script, trainer, "--every", "4", "--batch", "64")
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    (share,) = re.findall(rf"^{trainer}: (0\.\d+) of held-out names$", last)
    assert float(share) > 0.8  # the most frequent kind has 0.49


@pytest.mark.also_peers
def test_mmcv_1_trains_with_its_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("sklearn")
    if importlib.util.find_spec("mmcv") is None:
        pytest.skip("mmcv is not installed")
    if importlib.util.find_spec("torchvision") is None:
        # mmcv.runner imports it for the names of its pretrained models only.
        (tmp_path / "torchvision.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = python(FOLDER / "mmcv1_install.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (off,) = re.findall(r"^trained by mmcv.runner: (\d\.\d\d) digits off", done.stdout)
    assert float(off) < 1
