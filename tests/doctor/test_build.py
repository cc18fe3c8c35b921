"""The doctor's report on the extension, its GPUs and the build tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyparallel
from pyparallel import backend
from pyparallel.backend import build_record as records
from pyparallel.doctor import build
from pyparallel.doctor.report import Problem

pytestmark = pytest.mark.one_backend


def test_a_module_older_than_a_source_is_named(tmp_path):
    source, module = tmp_path / "csrc" / "ops" / "pack.cpp", tmp_path / "_C.so"
    source.parent.mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    module.touch()
    assert build.newer_source(module, tmp_path) is None
    source.touch()
    os.utime(module, (1, 1))
    assert build.newer_source(None, tmp_path) is None
    assert build.newer_source(module, tmp_path) == "csrc/ops/pack.cpp"
    os.utime(source, (0, 0))
    (source.parent / ".#pack.cpp").symlink_to("user@host.123")  # a lock of Emacs
    assert build.newer_source(module, tmp_path) is None
    (tmp_path / "csrc" / "launch.cuh").touch()
    assert build.newer_source(module, tmp_path) == "csrc/launch.cuh"
    (tmp_path / "setup.py").unlink()  # csrc is of another package
    assert build.newer_source(module, tmp_path) is None


def test_an_extension_that_was_found_and_is_not_used_is_an_error(monkeypatch, tmp_path):
    module = tmp_path / "_C.so"
    module.touch()
    monkeypatch.setattr(records, "find", lambda _: records.Build(module, {}))
    monkeypatch.setattr(backend, "name", "python")
    monkeypatch.setattr(backend, "reason", "It must fit, but does not.")
    monkeypatch.setattr(backend, "built_for", {"torch": "1.2.3", "sanitize": ""})
    monkeypatch.setattr(backend, "load_error", ImportError("undefined symbol: x"))
    monkeypatch.delenv("PYPARALLEL_BACKEND", raising=False)
    problems: list[Problem] = []
    facts = build.backend(problems)
    assert problems == [Problem("It must fit, but does not.", fails=True)]
    assert facts["load_error"] == "ImportError: undefined symbol: x"
    assert facts["built_for"] == {"torch": "1.2.3"}
    assert facts["present"]["torch"] == torch.__version__
    monkeypatch.setenv("PYPARALLEL_BACKEND", "python")  # then it is not used
    problems.clear()
    build.backend(problems)
    monkeypatch.setattr(records, "find", lambda _: None)
    monkeypatch.setenv("PYPARALLEL_BACKEND", "auto")  # there is no extension to fix
    build.backend(problems)
    assert problems == []


def test_an_extension_for_another_python_is_advice(monkeypatch):
    monkeypatch.setattr(records, "find", lambda _: None)
    monkeypatch.setattr(records, "list_other_pythons", lambda _: ["_C.cpython-27.so"])
    monkeypatch.setattr(backend, "reason", "Only _C.cpython-27.so.")
    monkeypatch.delenv("PYPARALLEL_BACKEND", raising=False)
    problems: list[Problem] = []
    build.backend(problems)
    assert problems == [Problem("Only _C.cpython-27.so.", fails=False)]
    monkeypatch.setenv("PYPARALLEL_BACKEND", "python")
    build.backend(problems)
    assert len(problems) == 1


def test_the_import_error_of_a_required_extension_has_the_reason(tmp_path):
    package = Path(pyparallel.__file__).parent
    (tmp_path / "pyparallel").mkdir()
    for each in package.iterdir():
        if each.name not in ("backend", "__pycache__"):
            (tmp_path / "pyparallel" / each.name).symlink_to(each)
    (tmp_path / "pyparallel" / "backend").mkdir()
    for each in (package / "backend").glob("*.py"):
        (tmp_path / "pyparallel" / "backend" / each.name).write_bytes(each.read_bytes())
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYPARALLEL_BACKEND": "native"}
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel", "doctor", "--quick"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: PYPARALLEL_BACKEND=native must use the extension, but: No "
        "extension is installed. To build one in the source folder: "
        f"{records.REBUILD}"
    )


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
        ("Hopper", (9, 0), None),
        ("Hopper;8.0", (8, 6), True),
    ],
)
def test_architectures_cover_gpus_as_cuda_defines_it(archs, capability, runs):
    assert build.covered(archs, capability) is runs


@pytest.fixture
def two_gpus(monkeypatch):
    """Let torch see a V100 and an H100, and the extension be native."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda i: [(7, 0), (9, 0)][i]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ["V100", "H100"][i])
    monkeypatch.setattr(backend, "name", "native")
    return lambda record: monkeypatch.setattr(backend, "built_for", record)


def test_a_gpu_without_kernels_is_an_error_with_a_command(two_gpus, monkeypatch):
    monkeypatch.setattr(backend, "devices", ("cpu", "cuda"))
    two_gpus({"archs": "8.0;9.0"})
    problems: list[Problem] = []
    kept = ("device", "name", "capability", "kernels", "tested")
    assert [tuple(gpu[key] for key in kept) for gpu in build.gpus(problems)] == [
        ("cuda:0", "V100", "7.0", False, None),
        ("cuda:1", "H100", "9.0", True, None),
    ]
    assert problems == [
        Problem(
            "The extension must have kernels for every visible GPU, but has none for "
            "cuda:0 (7.0): it was built for 8.0;9.0. Rebuild it in the source folder: "
            f"TORCH_CUDA_ARCH_LIST='7.0;9.0' {records.REBUILD}",
            True,
        )
    ]
    two_gpus({"archs": "7.0+PTX"})
    assert [gpu["kernels"] for gpu in build.gpus(problems)] == [True, True]
    assert len(problems) == 1


def test_a_cpu_build_on_a_machine_with_a_gpu_is_advice(two_gpus, monkeypatch):
    monkeypatch.setattr(backend, "devices", ("cpu",))
    two_gpus({"archs": "", "reason": "no nvcc was found"})
    problems: list[Problem] = []
    assert [gpu["kernels"] for gpu in build.gpus(problems)] == [None, None]
    assert problems == [
        Problem(
            "The extension should be built for CUDA where a GPU is visible, but was "
            "built for the CPU only (no nvcc was found): torch operators replace its "
            "kernels, which is slower. Rebuild it in the source folder, with nvcc: "
            f"FORCE_CUDA=1 {records.REBUILD}",
            False,
        )
    ]


# ------------------------------------------------------------------- the toolchain
def program(path: Path, text: str, code: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_programs_are_found_where_a_build_finds_them(tmp_path, monkeypatch):
    compiler = program(tmp_path / "bin" / "clang++", "clang version 19")
    nvcc = program(tmp_path / "cuda" / "bin" / "nvcc", "nvcc: release 12.4, V12.4.1")
    program(tmp_path / "bin" / "ninja", "no such option", code=1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CXX", "clang++ -O1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    problems: list[Problem] = []
    facts = build.toolchain(problems)
    assert facts["cxx"] == {"version": "clang version 19", "path": compiler}
    assert facts["nvcc"] == {"version": "12.4", "path": nvcc}
    assert facts["ninja"] is None
    assert facts["environment"]["CXX"] == "clang++ -O1"
    assert problems == [
        Problem(
            "nvcc should have the major version of torch's CUDA 13.0 to build for "
            f"GPUs, but {nvcc} has version 12.4. Set CUDA_HOME to another toolkit.",
            False,
        )
    ]


def test_the_compiler_of_a_launcher_and_the_nvcc_of_wheels_are_found(
    tmp_path, monkeypatch
):
    ccache = program(tmp_path / "bin" / "ccache", "")
    Path(ccache).write_text('#!/bin/sh\necho "version of $1"\n')
    nvcc = program(tmp_path / "nvidia" / "cu13" / "bin" / "nvcc", "release 13.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CXX", "ccache g++")
    monkeypatch.setenv("FORCE_CUDA", "1")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = build.toolchain([])
    assert facts["cxx"] == {"version": "version of g++", "path": ccache}
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert facts["nvcc"] == {"version": "13.0", "path": nvcc}
    assert facts["environment"]["FORCE_CUDA"] == "1"
    monkeypatch.setenv("CXX", " ")
    assert build.toolchain([])["cxx"] is None


def test_a_program_that_answers_late_is_there(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "c++"
    program(path, "")
    path.write_text(f"#!{sys.executable} -S\nimport signal\nsignal.pause()\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    program(nvcc, "")
    nvcc.write_bytes(path.read_bytes())
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend, "name", "python")
    monkeypatch.setattr(backend, "built_for", {})
    problems: list[Problem] = []
    facts = build.toolchain(problems)
    assert facts["cxx"] == {"version": "no answer in 0.1 s", "path": str(path)}
    assert facts["nvcc"] == {"version": "no answer in 0.1 s", "path": str(nvcc)}
    assert problems == [], "it is neither missing nor of another version"


def test_no_compiler_matters_only_where_there_is_no_extension(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)
    for name, record, texts in (
        ("native", {"torch": "2"}, []),
        (
            "python",
            {},
            [
                "A C++ compiler should be available to build the extension, but c++ is "
                "not on PATH, so the slower Python backend is used. Install one "
                "(Debian: apt-get install g++), or set CXX."
            ],
        ),
    ):
        monkeypatch.setattr(backend, "name", name)
        monkeypatch.setattr(backend, "built_for", record)
        problems: list[Problem] = []
        assert build.toolchain(problems)["cxx"] is None
        assert [problem.text for problem in problems] == texts
