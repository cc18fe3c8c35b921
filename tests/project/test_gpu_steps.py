"""The commands of scripts/gpu_check.py, recorded by a fake interpreter."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_check_runs import ONE_GPU, TITLE, TOOL, Check, rows
from repository import ROOT

pytestmark = pytest.mark.one_backend

FILES = " ".join(
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").glob("**/test_*.py"))
    if re.search(r"mark\.cuda\b", path.read_text(encoding="utf-8"))
)
RUN = "-m pytest -q -p pytest_timeout -p _hypothesis_pytestplugin"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_every_step_runs_and_has_a_row(check: Check) -> None:
    done = check.run(GPU_BENCH_ARGS="--rounds 7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(done.stdout) == [
        TITLE,
        "build      passed # s  build is fine",
        "selftest   passed # s  selftest is fine",
        "tests      passed # s  tests is fine",
        "bench      passed # s  bench is fine",
        "memcheck   passed # s  memcheck is fine",
        "initcheck  passed # s  initcheck is fine",
        "ncu        passed # s  ncu is fine",
        ONE_GPU,
    ]
    assert rows((check.out / "summary.txt").read_text()) == rows(done.stdout)
    jobs = min(os.cpu_count() or 1, 16)
    sanitizer = (
        "compute-sanitizer --tool {} --error-exitcode 86 --target-processes "
        "application-only --print-limit 20"
    )
    under = "SANITIZED={} PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYPARALLEL_MMENGINE=off "
    under += f"{RUN} --timeout 0 -m cuda and kernel {FILES}"
    assert check.calls == [
        f"FORCE_CUDA=1 WERROR=0 MAX_JOBS={jobs} setup.py -q build_ext --inplace",
        "-m pyparallel",
        f"PYPARALLEL_NO_SKIP=1 PYPARALLEL_MMENGINE=off {RUN} "
        "--timeout 60 -o faulthandler_timeout=45 -o junit_family=xunit1 "
        "--maxfail=50 --durations=5 --tb=short "
        f"--junitxml {check.out}/tests.xml -m cuda and not two_gpus {FILES}",
        f"-m benchmarks.gpu --out {check.out} --json {check.out}/gpu.json "
        "--total-seconds 380 --commit abc --rounds 7",
        sanitizer.format("memcheck")
        + " --report-api-errors no --kernel-name kns=run_body",
        under.format("memcheck"),
        sanitizer.format("initcheck"),
        under.format("initcheck"),
        "ncu --target-processes application-only --clock-control none --csv --log-file "
        f"{check.out}/ncu.csv --kernel-name regex:run_body --section SpeedOfLight "
        "--section MemoryWorkloadAnalysis --section Occupancy --section LaunchStats",
        "-m benchmarks.kernels",
    ]
    log = (check.out / "gpu-check.log").read_text()
    assert "=== initcheck (at most 120 s)\ninitcheck is fine\n" in log
    assert log.rstrip().endswith(ONE_GPU)


STAGES = {
    "1": ["build", "selftest", "tests"],
    "2": ["build", "bench"],
    "3": ["build", "memcheck", "initcheck", "ncu"],
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_its_steps(check: Check, stage: str) -> None:
    check.probed["gpus"] = ["A GPU"] * 2
    done = check.run(GPU_STAGE=stage, MAX_JOBS="3")
    fine = [f"{step:<10} passed # s  {step} is fine" for step in STAGES[stage]]
    assert rows(done.stdout) == [TITLE.replace("1 x", "2 x"), *fine]
    assert rows((check.out / f"summary-{stage}.txt").read_text()) == rows(done.stdout)
    assert (check.out / f"gpu-check-{stage}.log").exists()
    assert check.calls[0].startswith("FORCE_CUDA=1 WERROR=0 MAX_JOBS=3 setup.py ")
    if stage == "1":
        assert f" -m cuda {FILES}" in check.calls[2]


def test_the_last_stage_repeats_red_tests_one_by_one(check: Check) -> None:
    """The report is of real tests: the ids of all red ones are needed."""
    folder = check.folder / "tests"
    folder.mkdir()
    (folder / "test_red.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a b', 'c.d'])\n"
        "def test_two(x): assert x == 'a b'\n"
        "class TestClass:\n"
        "    def test_method(self): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): assert 0\n"
        "def test_fixture(broken): pass\n"
        "def test_skipped(): pytest.skip()\n"
    )
    (folder / "test_broken.py").write_text("import no_such_module\n")
    (check.folder / "pytest.ini").touch()
    report = check.folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-o", "junit_family=xunit1", "--junitxml", str(report), "tests"]
    subprocess.run(command, cwd=check.folder, capture_output=True, timeout=100)
    red = ["tests/test_broken.py", "tests/test_red.py::test_two[c.d]"]
    red += ["tests/test_red.py::TestClass::test_method"]
    red += ["tests/test_red.py::test_fixture"]
    done = check.run(GPU_STAGE="4", GPU_JUNIT=str(report), FAILING=red[1])
    assert done.returncode == 1
    assert rows(done.stdout)[1:3] == [
        "build      passed # s  build is fine",
        f"retest     FAILED # s  1 of 4 commands failed: {red[3]} is fine",
    ]
    repeat = f"PYPARALLEL_NO_SKIP=1 PYPARALLEL_MMENGINE=off {RUN} "
    repeat += "--timeout 60 -o faulthandler_timeout=45 "
    assert check.calls[1:] == [repeat + test for test in red]
    report.write_text("<testsuites/>")
    done = check.run(GPU_STEPS="retest", GPU_JUNIT=str(report))
    assert done.returncode == 0
    row = f"retest     skipped # s  no test failed in {report}"
    assert rows(done.stdout)[1] == row
    done = check.run(GPU_STEPS="retest")
    assert done.returncode == 1
    assert rows(done.stdout)[1] == (
        f"retest     FAILED # s  {check.out}/tests.xml must be the report of the step "
        "tests, but does not exist. Set GPU_JUNIT to the tests.xml of stage 1."
    )


@pytest.mark.parametrize("where", ["python", "PATH", "CUDA_HOME", "nowhere"])
def test_programs_of_cuda_are_looked_for(check: Check, where: str) -> None:
    check.probed["bins"] = []
    settings = {"GPU_STEPS": "initcheck ncu"}
    for name in ("compute-sanitizer", "ncu"):
        if where == "python":
            check.program(name, TOOL)
        elif where == "PATH":
            check.program(f"bin/{name}", TOOL)
            settings["PATH"] = f"{check.folder}/bin:/usr/bin:/bin"
        elif where == "CUDA_HOME":
            check.program(f"cuda/bin/{name}", TOOL)
    done = check.run(**settings)
    found = rows(done.stdout)[1:3]
    if where != "nowhere":
        assert done.returncode == 0
        assert found == [
            "initcheck  passed # s  initcheck is fine",
            "ncu        passed # s  ncu is fine",
        ]
        return
    assert done.returncode == 1
    assert found == [
        "initcheck  FAILED # s  compute-sanitizer must be in PATH, in CUDA_HOME/bin or "
        f"in a wheel, but is not there. Install it: {check.folder}/python -m pip "
        "install nvidia-cuda-sanitizer-api",
        "ncu        skipped # s  ncu is not in PATH, in CUDA_HOME/bin or in a wheel",
    ]


@pytest.mark.parametrize("online", [True, False])
def test_wheels_come_first_and_then_an_index(check: Check, online: bool) -> None:
    (check.folder / "missing").write_text("optree pytest_timeout\n")
    (check.folder / "w").mkdir()
    for name in ("b.whl", "a.whl", "no-wheel"):
        (check.folder / "w" / name).touch()
    settings = {"ONLINE": "1", "BAD_WHEELS": "1"} if online else {}
    done = check.run(GPU_STEPS="selftest", **settings)
    pip = "-m pip install -q --upgrade --no-compile --disable-pip-version-check "
    pip += f"--target {check.folder}/tree/build/site-3.12.3"
    assert check.calls[:2] == [
        f"{pip} --no-index --no-deps {check.folder}/w/a.whl {check.folder}/w/b.whl",
        f"{pip} --retries 0 --timeout 5 optree pytest-timeout",
    ]
    if online:
        assert done.returncode == 0
        assert check.calls[2:] == ["-m pyparallel"]
        return
    assert done.returncode == 1
    assert done.stderr == (
        f"{check.folder}/python must be able to import hypothesis optree psutil pytest "
        "pytest_timeout numpy pybind11 ninja setuptools, but lacks: optree "
        f"pytest_timeout. Fill {check.folder}/w by `make gpu-wheels`, or install them "
        "elsewhere with pip install --target and put that on PYTHONPATH.\n"
    )


def test_a_copied_tree_keeps_its_build_and_no_source_that_is_gone(check: Check) -> None:
    tree = check.folder / "tree"
    kept = ["build/lib/object.o", "pyparallel/backend/_C.cpython-312.so"]
    gone = ["pyparallel/gone.py", "gone/deep/gone.py", "tests/__pycache__/gone.pyc"]
    for name in kept + gone:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    assert check.run(GPU_STEPS="selftest").returncode == 0
    assert all((tree / name).is_file() for name in kept)
    assert not any((tree / name).exists() for name in gone)
    assert not (tree / "gone").exists()
    times = [(folder / "README.md").stat().st_mtime for folder in (tree, ROOT)]
    assert int(times[0]) == int(times[1])


def test_the_profiled_program_runs_all_kernels_on_odd_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    kernels = importlib.import_module("benchmarks.kernels")
    host, num, side = torch.device("cpu"), 9, 96
    batch, samples = kernels.pad_copy(host, num, side)
    for row, sample in zip(batch, samples, strict=True):
        height, width = sample.shape[1:]
        pad = (0, side - width, 0, side - height)
        assert row.equal(torch.nn.functional.pad(sample, pad))
    assert {sample.shape[2] % 2 for sample in samples} == {0, 1}
    slab, leaves = kernels.pack(host, num, side)
    gaps = slab.numel() - sum(leaf.numel() for leaf in leaves)
    assert 0 < gaps < 64 * len(leaves) and slab[: leaves[0].numel()].equal(leaves[0])
    assert int(slab.long().sum()) == sum(int(leaf.long().sum()) for leaf in leaves)
    batch, images = kernels.image_batch(host, num, side)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (kernels.MEAN, kernels.STD))
    for row, image in zip(batch, images, strict=True):
        height, width = image.shape[1:]
        assert row[:, :height, :width].equal((image - mean) / std)
        assert row.count_nonzero() == row[:, :height, :width].count_nonzero()
    assert kernels.main(["--device", "cpu", "--num", "2", "--side", "64"]) == 0
    assert (
        capsys.readouterr().out == "pad_copy: 0 MiB\npack: 0 MiB\nimage_batch: 0 MiB\n"
    )
