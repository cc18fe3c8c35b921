"""setup.py: its choices, its output, and its errors."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyparallel import backend
from pyparallel.core import versions
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


@pytest.fixture(scope="module")
def setup_py():
    spec = importlib.util.spec_from_file_location("pyparallel_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


NO_CUDA = "torch 2.13.0 is built without CUDA"
NO_NVCC = "no nvcc was found (looked at /a/nvcc, /b/nvcc)"
OF_12 = (
    "nvcc is of CUDA 12.4 (/a/nvcc) but torch 2.13.0 is of CUDA 13.0, and their "
    "major versions must be equal"
)


@pytest.mark.parametrize(
    ("env", "torch_cuda", "nvcc", "kind", "reason"),
    [
        ({}, None, None, "cpu", f"{NO_CUDA}; {NO_NVCC}"),
        ({}, "13.0", "13.1", "cuda", ""),
        ({}, "13.0", "12.4", "cpu", OF_12),
        ({"FORCE_CUDA": "0", "FORCE_ONLY_CPU": ""}, "13.0", "13.1", "cuda", ""),
        ({"FORCE_ONLY_CPU": "1"}, "13.0", "13.1", "cpu", ""),
        ({"FORCE_CUDA": "1"}, "13.0", "12.4", "", OF_12),
        ({"FORCE_CUDA": "1"}, None, None, "", f"{NO_CUDA}; and {NO_NVCC}"),
        ({"FORCE_CUDA": "1"}, "13.0", None, "", NO_NVCC),
    ],
)
def test_cuda_is_chosen_when_nvcc_and_torch_agree(
    setup_py, env, torch_cuda, nvcc, kind, reason
):
    found = nvcc and setup_py.Nvcc("/a/nvcc", "/a", nvcc)
    arguments = (env, "2.13.0", torch_cuda, found, ["/a/nvcc", "/b/nvcc"])
    if kind:
        chosen = setup_py.choose(*arguments)
        assert chosen.kind == kind and (not reason or chosen.reason == reason)
        return
    with pytest.raises(SystemExit) as caught:
        setup_py.choose(*arguments)
    assert caught.value.code == (
        f"FORCE_CUDA=1 must build for CUDA, but {reason}. Install the missing part, "
        "point CUDA_HOME at the toolkit, or unset FORCE_CUDA."
    )
    with pytest.raises(SystemExit, match="FORCE_CUDA and FORCE_ONLY_CPU are both set"):
        setup_py.choose({**env, "FORCE_ONLY_CPU": "1"}, "2.13.0", None, None, [])


COMPILED = "sm_75 sm_80 sm_90a sm_120 compute_120"


@pytest.mark.parametrize(
    ("env", "visible", "known", "expected"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, [(7, 5)], "", "8.0;9.0"),
        ({}, [], "", "7.5;8.0;9.0a;12.0+PTX"),
        ({}, [], "sm_75 sm_80 sm_86", "7.5;8.0+PTX"),
        ({}, [(9, 0), (8, 0), (9, 0)], "", "8.0;9.0+PTX"),
        ({}, [(13, 0)], "", "12.0+PTX"),
    ],
)
def test_architectures(setup_py, env, visible, known, expected):
    assert setup_py.arch_list(env, visible, COMPILED, known) == expected
    with pytest.raises(SystemExit, match="Set TORCH_CUDA_ARCH_LIST"):
        setup_py.arch_list({}, [], "", "")


def test_flags_leave_the_language_version_to_torch(setup_py):
    for debug in ("", "1"):
        found = setup_py.flags(
            {"DEBUG": debug, "NVCC_FLAGS": "-lineinfo -Xptxas=-v"}, True
        )
        assert not [flag for each in found.values() for flag in each if "-std" in flag]
        assert found["nvcc"][-2:] == ["-lineinfo", "-Xptxas=-v"]
        assert {"-Wall", "-Wextra", "-fopenmp"} <= set(found["cxx"])
        assert "Werror" not in str(found)
    strict = setup_py.flags({"WERROR": "1"}, True)
    assert "-Werror" in strict["cxx"] and "-Werror=all-warnings" in strict["nvcc"]
    assert {"-O3", "-g0"} <= set(setup_py.flags({}, False)["cxx"])
    assert "nvcc" not in setup_py.flags({}, False)


def test_foreign_headers_are_system_headers(setup_py, tmp_path):
    found = setup_py.system_headers(["/t/include"], None, tmp_path)
    assert found == ["-isystem", "/t/include"]
    wheel = tmp_path / "nvidia" / "cu13" / "include"
    wheel.mkdir(parents=True)
    bare = setup_py.Nvcc("nvcc", str(tmp_path / "bare"), "13.0")
    found = setup_py.system_headers(["/t/include"], bare, tmp_path)
    assert found == ["-isystem", "/t/include", "-isystem", str(wheel)]
    whole = tmp_path / "whole" / "include" / "cusparse.h"
    whole.parent.mkdir(parents=True)
    whole.touch()
    full = setup_py.Nvcc("nvcc", str(tmp_path / "whole"), "13.0")
    assert len(setup_py.system_headers(["/t/include"], full, tmp_path)) == 2


def fake_nvcc(folder: Path, top: str | None) -> str:
    folder.mkdir(parents=True)
    dryrun = f'echo "#$ TOP={top}" >&2' if top else "exit 1"
    script = folder / "nvcc"
    script.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo release 13.0, V13.0.88;; "
        f"*) {dryrun};; esac\n"
    )
    script.chmod(0o755)
    return str(script)


def test_the_toolkit_behind_a_wrapper_is_found(setup_py, tmp_path):
    home = tmp_path / "cuda-13.0"
    (home / "bin").mkdir(parents=True)
    wrapper = fake_nvcc(tmp_path / "usr" / "bin", f"{home}/bin/..")
    found = setup_py.find_nvcc([str(tmp_path / "absent"), wrapper])
    assert found == (wrapper, str(home), "13.0")
    plain = fake_nvcc(tmp_path / "plain" / "bin", None)
    assert setup_py.find_nvcc([plain]) == (plain, str(tmp_path / "plain"), "13.0")
    assert setup_py.find_nvcc([]) is None


def test_the_environment_decides_first_where_nvcc_is_looked_for(setup_py, tmp_path):
    env = {"CUDA_PATH": "/p", "CUDA_HOME": "/h", "PATH": str(tmp_path)}
    assert setup_py.nvcc_candidates(env, tmp_path) == [
        "/h/bin/nvcc",
        "/p/bin/nvcc",
        "/usr/local/cuda/bin/nvcc",
    ]


def test_files_of_editors_are_no_sources(setup_py, tmp_path, monkeypatch):
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    for name in ("ops/pack.cpp", "ops/.#pack.cpp", "cuda/.#pack.cu"):
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    listed = setup_py.sources(True, tmp_path)
    assert not [path for path in listed if path.endswith(".cu")]
    assert (tmp_path / "ops.cpp").read_text() == '#include "ops/pack.cpp"\n'


def test_every_source_of_the_tree_is_compiled(setup_py, tmp_path):
    def compiled(cuda: bool) -> set[str]:
        listed = [ROOT / path for path in setup_py.sources(cuda, tmp_path)]
        own = {str(p.relative_to(ROOT)) for p in listed if p.suffix == ".cu"}
        texts = [p.read_text() for p in listed if p.suffix == ".cpp"]
        included = re.findall(r'#include "(.+)"', "".join(texts))
        return own | {f"csrc/{name}" for name in included}

    present = {str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.c*[pu]")}
    assert compiled(cuda=True) == present
    assert compiled(cuda=False) == {name for name in present if "cuda" not in name}


# ------------------------------------------------------------------ real processes
def build(tmp_path: Path, **env: str):
    command = [sys.executable, "setup.py", "build", "--build-base", str(tmp_path)]
    merged = {k: v for k, v in os.environ.items() if not k.startswith("FORCE_")} | env
    return subprocess.run(
        command, cwd=ROOT, env=merged, capture_output=True, text=True, timeout=120
    )


WITHOUT_TORCH = (
    "\npyparallel's extension must be built against the torch that will run it, but "
    f"torch cannot be imported by {sys.executable} (hidden by a test). Type:\n\n"
    '    pip install torch "setuptools>=77" wheel ninja "pybind11>=2.11"\n'
    "    pip install --no-build-isolation .\n\n"
    "Without a compiler, PYPARALLEL_BUILD=python installs the pure Python form.\n\n"
)


@pytest.mark.parametrize(
    ("torch_py", "form", "end"),
    [
        ("raise ImportError('hidden by a test')", "native", WITHOUT_TORCH),
        ("raise ImportError('hidden by a test')", "", WITHOUT_TORCH),
        (
            "__version__ = '2.7.1+cpu'",
            "native",
            "pyparallel needs torch 2.8 or newer, but torch 2.7.1+cpu is installed. "
            'Type: pip install "torch>=2.8"\n',
        ),
        ("", "pure", "PYPARALLEL_BUILD must be native or python, but is 'pure'.\n"),
    ],
)
def test_a_build_that_cannot_be_is_an_error_before_anything_is_compiled(
    tmp_path, torch_py, form, end
):
    (tmp_path / "torch.py").write_text(torch_py)
    done = build(tmp_path, PYTHONPATH=str(tmp_path), PYPARALLEL_BUILD=form)
    assert done.returncode == 1
    assert done.stderr.endswith(end)


def test_metadata_need_no_torch(setup_py, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('hidden by a test')")
    command = [sys.executable, "setup.py", "--version"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [setup_py.version()], done.stderr


def required(folder: Path, command: str, **env: str) -> list[str]:
    """Return the requirements in the metadata that a command writes."""
    options = ["-q", "egg_info", "--egg-base", str(folder)]
    if command == "dist_info":
        options += ["dist_info", "--output-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "setup.py", *options], cwd=ROOT, env={**os.environ, **env}
    )
    assert done.returncode == 0
    pattern = {"egg_info": "*.egg-info/PKG-INFO", "dist_info": "*.dist-info/METADATA"}
    (path,) = folder.glob(pattern[command])
    found = re.findall(
        r"^Requires-Dist: (torch.*|optree.*|typing.*)$", path.read_text(), re.M
    )
    return [each.partition(";")[0] for each in found if "extra ==" not in each]


def test_a_wheel_with_an_extension_needs_its_torch_and_the_source_a_range(
    setup_py, tmp_path
):
    listed = ["torch>=2.8", "torchish"]
    assert setup_py.narrowed(listed, None) == listed
    for version in ("2.13.0+cpu", "2.13.0a0+git1234", "2.13.1.dev20260101"):
        assert setup_py.narrowed(listed, version) == ["torch==2.13.*", "torchish"]
    major, minor = torch.__version__.split(".")[:2]
    oldest = f"torch>={versions.OLDEST_TORCH}"
    for command, env, needed in (
        ("egg_info", {}, oldest),
        ("dist_info", {}, f"torch=={major}.{minor}.*"),
        ("dist_info", {"PYPARALLEL_BUILD": "python"}, oldest),
    ):
        folder = tmp_path / f"{command}{len(env)}"
        folder.mkdir()
        others = ["optree<1,>=0.13", "typing_extensions<5,>=4.12"]
        assert required(folder, command, **env) == [needed, *others]


@pytest.mark.peers
def test_uv_accepts_the_project_of_the_installation_page(tmp_path):
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (project,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    source = '"../pyparallel"'
    assert source in project
    project = project.replace(source, f'"{ROOT}"')
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    uv = shutil.which("uv", path=os.pathsep.join(folders))
    assert uv is not None
    # Without static metadata, uv refuses to match the torch of the build here.
    done = subprocess.run([uv, "lock"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'name = "pyparallel-torch"' in (tmp_path / "uv.lock").read_text()


# ------------------------------------------------------------------- installed files
@pytest.mark.skipif(backend.name != "native", reason="pure Python runs")
def test_module_stub_and_record_agree():
    from pyparallel.backend import _C

    stubs = Path(backend.__file__).parent.glob("_C*.pyi")
    stub = "\n".join(each.read_text() for each in stubs)
    named = set(re.findall(r"^(?:def|class) (\w+)", stub, re.MULTILINE))
    present = {name for name in vars(_C) if not name.startswith("_")}
    assert named == present
    info = _C.build_info()
    assert info["torch"] == backend.built_for["torch"]
    assert info["cuda"] == (backend.built_for["cuda"] or "")
    assert info["archs"] == backend.built_for["archs"]
    assert info["version"] == backend.built_for["version"]
    assert info["sanitize"] == backend.built_for["sanitize"]
