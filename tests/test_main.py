"""``python -m pyparallel``: the report, its two forms, and what it notices."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys

import pytest
import torch

import pyparallel
from pyparallel import _backend
from pyparallel import _doctor as main_module


@functools.cache
def run(*arguments: str, path: str = ""):
    env = dict(os.environ)
    if path:
        env["PYTHONPATH"] = os.pathsep.join([path, env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pyparallel", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def lines(output: str) -> dict[str, str]:
    return {line[:16].strip(): line[17:] for line in output.splitlines()}


def test_text_names_versions_backend_and_reason_and_ends_with_the_self_test():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    found = lines(done.stdout)
    assert found["pyparallel"] == pyparallel.__version__
    assert found["torch"] == torch.__version__
    assert found["backend"] == _backend.name
    assert found["reason"] == _backend.reason
    assert done.stdout.splitlines()[-1] == "self-test passed"


def test_json_holds_the_same_report():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(main_module.report())
    assert found["self-test"] == "passed"
    assert found["device types"] == list(_backend.devices)


def test_another_option_is_refused():
    assert run("--jsno").returncode == 2


def test_wrong_results_fail_with_what_was_found(monkeypatch, capsys):
    monkeypatch.setattr(
        pyparallel, "scatter", lambda *_: [{"img": torch.zeros(1), "boxes": []}]
    )
    assert main_module.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "self-test failed: target -1: the images are [0.0]"


def test_an_exception_in_the_self_test_is_its_failure(monkeypatch, capsys):
    def collate(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(pyparallel, "collate", collate)
    assert main_module.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["self-test"] == "RuntimeError: out of order"


def test_the_parallel_port_driver_is_noticed(tmp_path):
    assert main_module.stray_distribution() is None
    info = tmp_path / "pyparallel-0.2.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pyparallel\nVersion: 0.2.2"
    )
    done = run(path=str(tmp_path))
    assert lines(done.stdout)["wrong package"] == (
        "the distribution pyparallel 0.2.2 is installed, which drives parallel ports; "
        "this library is pyparallel-torch. Type: pip uninstall pyparallel"
    )


def test_a_module_older_than_a_source_is_named(tmp_path):
    source, module = tmp_path / "csrc" / "ops" / "pack.cpp", tmp_path / "_C.so"
    source.parent.mkdir(parents=True)
    module.touch()
    assert main_module.older_than_sources(module, tmp_path) is None
    source.touch()
    os.utime(module, (1, 1))
    assert main_module.older_than_sources(None, tmp_path) is None
    assert main_module.older_than_sources(module, tmp_path) == (
        "csrc/ops/pack.cpp is newer. Rebuild: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )
    os.utime(source, (0, 0))
    assert main_module.older_than_sources(module, tmp_path) is None


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("8.0;9.0", (9, 0), True),
        ("8.0;9.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0 9.0", (10, 0), False),
        ("8.0;9.0+PTX", (12, 0), True),
        ("9.0a", (9, 0), True),
        ("10.0a", (10, 3), False),
        ("", (9, 0), False),
        ("Hopper", (9, 0), False),
    ],
)
def test_architectures_cover_gpus_as_cuda_defines_it(archs, capability, runs):
    assert main_module.covered(archs, capability) is runs


def test_a_gpu_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "V100")
    assert main_module.gpus("8.0;9.0") == [
        "cuda:0 V100, capability 7.0, kernels: none (built for 8.0;9.0)"
    ]
    assert main_module.gpus("7.0") == ["cuda:0 V100, capability 7.0, kernels: yes"]
    assert main_module.gpus(None) == ["cuda:0 V100, capability 7.0"]


def test_limits_of_the_machine_stand_in_both_forms():
    shown = lines(run().stdout)
    found = json.loads(run("--json").stdout)
    for name in ("memory left", "/dev/shm left", "open files", "locked memory"):
        assert found[name] and shown[name]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found["open files"].endswith(f" of {soft}, hard limit {hard}")
