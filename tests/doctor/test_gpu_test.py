"""``pyparallel doctor --gpu``: its checks, its record, and the warning without one."""

from __future__ import annotations

import io
import json
import re
import warnings
from contextlib import redirect_stdout

import pytest
import torch

import pyparallel
from pyparallel import backend
from pyparallel.core import errors
from pyparallel.doctor import command as doctor
from pyparallel.doctor import gpu_test
from pyparallel.transfer import gpu_record

FIRST, SECOND = (torch.device("cuda", i) for i in range(2))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Keep the record of a test in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pyparallel"


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are two GPUs and an extension for them."""

    def name(device):
        return "GPU B" if device in (1, SECOND) else "GPU A"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend, "transfers", ("cuda",))
    monkeypatch.setattr(gpu_record, "_seen", set())
    monkeypatch.setattr(errors, "_warned", set())


def shown():
    """Return the exit code and the report of ``pyparallel doctor --gpu --json``."""
    written = io.StringIO()
    with redirect_stdout(written):
        code = doctor.main(["--json", "--gpu"])
    return code, json.loads(written.getvalue())


# -------------------------------------------------------------------------- the record
@pytest.mark.one_backend
def test_a_success_counts_for_its_gpu_torch_and_build(gpus, folder, monkeypatch):
    assert gpu_record.passed_on(FIRST) is None
    gpu_record.write(FIRST, passed=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", gpu_record.passed_on(FIRST))
    assert gpu_record.passed_on(SECOND) is None
    gpu_record.write(SECOND, passed=True)
    assert gpu_record.passed_on(FIRST) == gpu_record.passed_on(SECOND)
    gpu_record.write(FIRST, passed=False)
    assert gpu_record.passed_on(FIRST) is None and gpu_record.passed_on(SECOND)
    assert [each.name for each in folder.iterdir()] == ["gpus.json"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        assert gpu_record.passed_on(SECOND) is None
    with monkeypatch.context() as patch:
        patch.setattr(gpu_record, "_build", lambda: "another")
        assert gpu_record.passed_on(SECOND) is None
    assert gpu_record.passed_on(SECOND) is not None


@pytest.mark.one_backend
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"GPU A": 3}', "\xff"])
def test_a_damaged_record_is_an_empty_one(gpus, folder, text):
    folder.mkdir()
    (folder / "gpus.json").write_bytes(text.encode("latin-1"))
    assert gpu_record.passed_on(FIRST) is None
    gpu_record.write(FIRST, passed=True)
    assert gpu_record.passed_on(FIRST) is not None


@pytest.mark.one_backend
def test_an_untested_gpu_is_one_warning(gpus, monkeypatch):
    expected = (
        "[PP005] pyparallel's CUDA code is experimental, and must pass its self-test "
        "on cuda:0, but the test has not passed there with this build. Run it once: "
        "pyparallel doctor --gpu"
    )
    with pytest.warns(UserWarning) as caught:
        gpu_record.warn_if_untested(FIRST)
        gpu_record.warn_if_untested(FIRST)
        gpu_record.warn_if_untested(SECOND)
    assert [str(each.message) for each in caught] == [expected]
    monkeypatch.setattr(gpu_record, "_seen", set())
    monkeypatch.setattr(errors, "_warned", set())
    gpu_record.write(FIRST, passed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu_record.warn_if_untested(FIRST)
        gpu_record.warn_if_untested(torch.device("cpu"))
        monkeypatch.setattr(backend, "transfers", ())
        gpu_record.warn_if_untested(SECOND)


# ------------------------------------------------------------------------- the command
@pytest.mark.one_backend
def test_without_a_gpu_the_command_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, found = shown()
    assert code == 1 and found["gpu_test"] == []
    assert found["problems"][-1]["text"] == (
        "--gpu must find a GPU and an extension with CUDA, but did not: the other "
        "sections have the reason."
    )


@pytest.mark.one_backend
def test_a_record_that_cannot_be_written_is_advice(gpus, folder, monkeypatch):
    folder.touch()  # a file in the place of the folder
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu_test, "test", lambda device: (["padding"], []))
    code, found = shown()
    assert code == 0
    assert [each["recorded_in"] for each in found["gpu_test"]] == [None, None]
    assert "The result for cuda:0 should be recorded, but cannot be: " in str(found)


#: Each check, and a function whose results it compares.
CHECKED = {
    "padding": (pyparallel, "pad_stack"),
    "images": (pyparallel.ImagePreprocessor, "__call__"),
    "packed copies": (pyparallel, "to_host"),
    "large copies": (pyparallel, "scatter"),
    "copies during steps": (pyparallel.PreDataLoader, "__iter__"),
    "pinned rings": (pyparallel.PreDataLoader, "__iter__"),
}


@pytest.fixture
def small(monkeypatch):
    """Let the checks take a second on the fake runtime, which interprets kernels."""
    monkeypatch.setattr(gpu_test, "_WIDTHS", (1, 33))
    monkeypatch.setattr(gpu_test, "_DTYPES", (torch.bool, torch.float32))
    monkeypatch.setattr(gpu_test, "_TALLEST", 20)
    monkeypatch.setattr(gpu_test, "_STEP_LENGTH", 2)


@pytest.mark.cuda
@pytest.mark.usefixtures("small")
def test_a_gpu_that_works_passes_all_checks():
    code, found = shown()
    assert code == 0, found
    (result,) = found["gpu_test"][:1]
    assert result["passed"] and result["checks"] == list(CHECKED)
    assert gpu_record.passed_on(FIRST) is not None
    assert found["gpus"][0]["tested"] == gpu_record.passed_on(FIRST)
    assert found["problems"] == []


@pytest.mark.cuda
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("check", CHECKED)
def test_a_check_finds_a_wrong_value(check, monkeypatch):
    owner, name = CHECKED[check]
    original = getattr(owner, name)

    def damaged(*arguments, **options):
        return spoiled(original(*arguments, **options))

    monkeypatch.setattr(owner, name, damaged)
    gpu_record.write(FIRST, passed=True)
    code, found = shown()
    assert code == 1 and check not in found["gpu_test"][0]["checks"]
    assert f"must pass, but failed: {check}: ValueError: " in str(found["problems"])
    assert gpu_record.passed_on(FIRST) is None


def spoiled(result):
    """Change the last value of a batch, or of each batch of an iterator."""
    if isinstance(result, torch.Tensor):
        if result.numel():
            result.view(-1)[-1] = 0 if result.view(-1)[-1] else 1
        return result
    if isinstance(result, pyparallel.Padded):
        spoiled(result.data)
    elif isinstance(result, dict):
        spoiled(list(result.values()))
    elif isinstance(result, list | tuple):
        for each in result:
            spoiled(each)
    else:
        return map(spoiled, result)
    return result
