"""``pyparallel doctor``: the report, its two forms, and its problems."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import sysconfig
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import pyparallel
from pyparallel import backend
from pyparallel.doctor import command as doctor
from pyparallel.doctor import machine, packages, self_test
from pyparallel.doctor import report as report_module
from pyparallel.doctor.report import Problem
from pyparallel.doctor.self_test import Failure
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

DOCS = ROOT / "docs"
#: What `docs/doctor.md` promises.
KEYS = {
    "versions": "pyparallel path python free_threaded gil_enabled executable torch "
    "optree peers wrong_distribution supported",
    "backend": "name requested reason load_error device_types debug built_for present "
    "newer_source",
    "gpus": None,
    "toolchain": "cxx nvcc ninja environment",
    "mmcv_parallel": "owner path",
    "machine": "cores load start_method memory shared_memory file_descriptors "
    "locked_memory",
    "self_test": "one_process refused_batch",
}


def report(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of the doctor in this process."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        code = doctor.main([*arguments, "--quick"])
    return code, shown.getvalue()


def found():
    code, shown = report("--json")
    facts = json.loads(shown)
    assert code == int(not facts["ok"])
    assert facts["ok"] is not any(problem["fails"] for problem in facts["problems"])
    return facts


@pytest.fixture
def new_problems(monkeypatch):
    """Return a function that finds problems, except those of this machine's limits."""
    # Free memory and the load change from one report to the next.
    monkeypatch.setattr(machine, "_shortages", lambda *_: {})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    usual = found()["problems"]
    return lambda facts: [each for each in facts["problems"] if each not in usual]


@pytest.fixture
def others(monkeypatch, tmp_path):
    """Install a distribution by its name and version, for this process."""

    def install(name: str, version: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


@pytest.mark.parametrize(
    ("configured", "in_sys", "expected"),
    [
        (None, None, (False, True)),  # Python 3.12 and older
        (0, True, (False, True)),
        (1, True, (True, True)),  # an import has enabled the GIL
        (1, False, (True, False)),
    ],
)
def test_the_doctor_names_a_free_threaded_python(
    monkeypatch, configured, in_sys, expected
):
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", configured)
    if in_sys is None:
        monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    else:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: in_sys, raising=False)
    versions = found()["versions"]
    assert (versions["free_threaded"], versions["gil_enabled"]) == expected


# --------------------------------------------------------------------- the two forms
def test_json_has_the_keys_that_are_documented():
    facts = found()
    assert list(facts) == ["schema", *KEYS, "problems", "ok"]
    for name, keys in KEYS.items():
        assert keys is None or list(facts[name]) == keys.split()
    assert list(facts["machine"]["file_descriptors"]) == (
        ["open", "limit", "hard_limit", "enough_for_workers", "judgement"]
    )
    assert facts["self_test"]["one_process"].keys() == (
        {"passed", "took_seconds", "error"}
    )
    assert facts["versions"]["path"] == str(Path(pyparallel.__file__).parent)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["backend"]["device_types"] == list(backend.devices)
    assert facts["machine"]["cores"]["allowed"] == len(os.sched_getaffinity(0))
    text = (DOCS / "doctor.md").read_text(encoding="utf-8")
    inner = [key for part in facts["machine"].values() for key in part]
    listed = [*facts, *" ".join(filter(None, KEYS.values())).split(), *inner]
    missing = [key for key in listed if f"`{key}`" not in text]
    assert not missing, "docs/doctor.md must have every key"


def test_text_has_the_same_sections_and_ends_with_the_problems():
    code, shown = report()
    assert code == 0, shown
    heads = [line for line in shown.splitlines() if line[:1].strip()]
    names = [name.replace("_", " ") for name in KEYS]
    assert heads[:-1] == [*names, "what to do"]
    assert heads[-1].startswith("ok: 0 errors, ")
    assert f"\n  name               {backend.name}\n" in shown
    assert re.search(r"\n  one process        passed yes, took \d+\.\d+ s", shown)


def test_text_gives_every_value_its_unit():
    values = {
        "none": None,
        "copied_nbytes": 67_108_864,
        "memcpy_gb_per_s": 8.25,
        "took_seconds": 1.26,
        "path": "/a",
        "flag": False,
        "parts": {"left_nbytes": 1500, "gone": None, "limit": 64, "of_group": 1.5},
        "list": ["a", "b"],
        "lines": "one\ntwo",
    }
    assert report_module.section("band_width", values) == (
        "band width\n"
        "  none               -\n"
        "  copied             67.1 MB\n"
        "  memcpy             8.2 GB/s\n"
        "  took               1.3 s\n"
        "  path               /a\n"
        "  flag               no\n"
        "  parts              left 1.5 KB, limit 64, of group 1.5\n"
        "  list               a; b\n"
        "  lines              one\n"
        "                     two"
    )
    assert report_module.section("gpus", []) == "gpus\n  none"
    assert report_module.section("gpus", [{"a": 1}]) == "gpus\n  0                  a 1"


def test_errors_come_before_advice_and_are_counted():
    advice, error = (
        Problem("Raise the limit. " * 6 + "End.", False),
        Problem("Mend it.", True),
    )
    assert report_module.what_to_do([advice, error]) == (
        "what to do\n"
        "  error: Mend it.\n"
        "  advice: Raise the limit. Raise the limit. Raise the limit. Raise the limit."
        " Raise the\n"
        "    limit. Raise the limit. End.\n"
        "\n"
        "failed: 1 error, 1 piece of advice"
    )
    assert report_module.what_to_do([]).endswith("\n\nok: 0 errors, 0 pieces of advice")


@pytest.mark.parametrize("code", [None, 0, 801])
def test_a_refused_batch_of_copies_is_advice(monkeypatch, new_problems, code):
    monkeypatch.setattr(self_test, "refused_batch", lambda: code)
    facts = found()
    assert facts["self_test"]["refused_batch"] == code
    problems = new_problems(facts)
    assert len(problems) == bool(code)
    for problem in problems:
        assert not problem["fails"] and "refused with error 801" in problem["text"]


def broken_driver():
    raise RuntimeError("the driver is too old")


def test_problems_are_errors_and_the_rest_is_reported(
    monkeypatch, others, new_problems
):
    monkeypatch.setattr(torch.cuda, "device_count", broken_driver)
    wrong = [{"img": torch.zeros(1), "boxes": []}]
    monkeypatch.setattr(pyparallel, "scatter", lambda *_: wrong)
    assert found()["versions"]["wrong_distribution"] is None
    others("pyparallel", "0.2.2")
    facts = found()
    assert facts["gpus"] == {"error": "RuntimeError: the driver is too old"}
    assert facts["versions"]["wrong_distribution"] == "0.2.2"
    error = "target -1: the images are [0.0]"
    assert facts["self_test"]["one_process"]["error"] == error
    problems = new_problems(facts)
    assert all(problem["fails"] for problem in problems)
    assert {problem["text"] for problem in problems} == {
        "The doctor must be able to check the gpus, but got RuntimeError: the driver "
        "is too old",
        "The distribution pyparallel must not be installed, but version 0.2.2 is: it "
        "drives parallel ports, and this library is pyparallel-torch. Run: pip "
        "uninstall pyparallel",
        f"The self-test in one process must pass, but failed: {error}",
    }


def test_mmcv_parallel_of_a_real_folder(tmp_path, monkeypatch, others):
    monkeypatch.setattr(packages, "_MMCV", ("mmcv-test",))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mmcv", raising=False)
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert packages.mmcv_parallel([])["owner"] is None  # as in mmcv 2.x
    (tmp_path / "mmcv" / "parallel").mkdir()
    path = str(tmp_path / "mmcv" / "parallel")
    assert packages.mmcv_parallel([]) == {"owner": "unknown", "path": path}
    others("mmcv-test", "1.7.2")
    assert packages.mmcv_parallel([]) == {"owner": "mmcv-test 1.7.2", "path": path}


def test_mmcv_parallel_is_ours_after_install(monkeypatch):
    functions = ModuleType("pyparallel.mmcv._functions")
    functions.__file__ = "/here.py"
    monkeypatch.setitem(sys.modules, "mmcv.parallel._functions", functions)
    expected = {"owner": "pyparallel", "path": "/here.py"}
    assert found()["mmcv_parallel"] == expected
    functions.__name__ = "mmcv.parallel._functions"
    assert found()["mmcv_parallel"]["owner"] != "pyparallel"


def test_two_distributions_of_mmcv_are_advice(others, monkeypatch, new_problems):
    monkeypatch.setattr(packages, "_MMCV", ("mmcv-test", "mmcv-test-full"))
    others("mmcv-test", "2.1.0")
    assert new_problems(found()) == []
    others("mmcv-test-full", "1.7.2")
    facts = found()
    assert facts["ok"]
    assert [problem["text"] for problem in new_problems(facts)] == [
        "One distribution must own the package mmcv, but there are 2: mmcv-test 2.1.0, "
        "mmcv-test-full 1.7.2. The last one to be installed has overwritten files of "
        "the others. Uninstall all of them, then install one."
    ]


# ----------------------------------------------------------- a busy machine
@pytest.fixture
def in_two(monkeypatch):
    """Let the test in two processes give a result at a load, on two cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def result(failure, *loads, seconds=28.0):
        given = iter(loads)
        monkeypatch.setattr(os, "getloadavg", lambda: (next(given), 99.0, 99.0))
        started = []
        monkeypatch.setattr(
            self_test, "two_processes", lambda s: started.append(s) or failure
        )
        problems: list[Problem] = []
        facts = doctor._in_two_processes(problems, seconds)
        assert facts.pop("took_seconds") >= 0 and set(started) <= {seconds}
        return facts, problems, bool(started)

    return result


SLOW = "two processes must finish within 28 s, but rank 0 was joining the group."
LATE = Failure(SLOW, ["a line"], ("joining the group",))
INCONCLUSIVE = (
    "The self-test in two processes should be in time, but is inconclusive: {} The "
    "load is {} on 2 cores. Run the doctor again when the machine is idle."
)


STILL_IMPORTED = LATE._replace(late=("joining the group", "importing pyparallel"))
ENDED = Failure("rank 1 ended.", [])
FAILED = "The self-test in two processes must pass, but failed: {}"


@pytest.mark.parametrize(
    ("failure", "loads", "seconds", "passed", "text"),
    [
        (None, (18.0, 18.0), 28.0, True, ""),
        (LATE, (18.04, 19.0), 28.0, None, INCONCLUSIVE.format(SLOW, "18.0")),
        # The load after the test, without our own two processes.
        (LATE, (0.5, 4.25), 28.0, None, INCONCLUSIVE.format(SLOW, "2.2")),
        (LATE, (0.5, 4.0), 28.0, False, FAILED.format(SLOW)),
        (STILL_IMPORTED, (0.5, 0.5), 28.0, None, INCONCLUSIVE.format(SLOW, "0.5")),
        (ENDED, (18.0, 18.0), 28.0, False, FAILED.format("rank 1 ended.")),
        (
            None,
            (18.0, 18.0),
            2.9,  # too short to start two processes
            None,
            INCONCLUSIVE.format("no time was left for it.", "18.0"),
        ),
    ],
)
def test_only_a_late_answer_of_a_busy_machine_is_no_error(
    in_two, failure, loads, seconds, passed, text
):
    facts, problems, started = in_two(failure, *loads, seconds=seconds)
    assert facts["passed"] is passed and started is (seconds == 28.0)
    assert problems == ([Problem(text, passed is False)] if text else [])
    if failure:
        assert (facts["error"], facts["output"]) == (failure.text, failure.output)


def test_the_command_ends_within_the_documented_time(monkeypatch):
    given, sections = [], doctor.sections
    clock = SimpleNamespace(monotonic=lambda: 1000.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(doctor, "time", clock)
    monkeypatch.setattr(
        doctor, "_in_two_processes", lambda _, s: given.append(s) or {"passed": True}
    )

    def only_the_test(quick, deadline):
        return {"self_test": sections(False, deadline)["self_test"]}

    monkeypatch.setattr(doctor, "sections", only_the_test)
    for age in (2.0, 25.0):  # seconds that the import of torch took
        monkeypatch.setattr(doctor, "_age", lambda age=age: age)
        report()
    assert given == [28.0, 40.0 - 25.0 - 3.0]
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert "Its limit is 40 seconds" in page and "After 28\nseconds" in page


def test_every_part_of_the_batch_is_compared(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(pyparallel, "collate")
        assert (self_test.one_process() or "").startswith("AttributeError: ")
    good = pyparallel.scatter
    changes = {
        "boxes": ([torch.zeros(0, 2)], "the boxes are [tensor([], size=(0, 2))]"),
        "meta": ([{"index": 1}], "the metadata are [{'index': 1}]"),
        "points": (SimpleNamespace(offsets=torch.tensor([7])), "the points are"),
    }
    for key, (value, text) in changes.items():
        monkeypatch.setattr(
            pyparallel,
            "scatter",
            lambda *given, key=key, value=value: [{**good(*given)[0], key: value}],
        )
        assert (self_test.one_process() or "").startswith(f"target -1: {text}")
