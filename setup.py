"""Choose a CPU, CUDA or pure-Python build, print the choice, and build it.

Environment: ``PYPARALLEL_BUILD=native|python``; switches ``FORCE_CUDA``, ``DEBUG``,
``FORCE_ONLY_CPU``, ``WERROR``; ``TORCH_CUDA_ARCH_LIST NVCC_FLAGS MAX_JOBS CUDA_HOME
PYPARALLEL_SANITIZE`` (see scripts/sanitizers.py), ``PYPARALLEL_WHEEL_TORCH``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import setuptools
from setuptools import Extension, setup
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
MODULE = "pyparallel.backend._C"
FOLDERS = ("bindings", "cpu", "memory", "ops", "pytree", "transfer")
COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install"}
COMPILING.add("develop")
#: Commands whose metadata equal those of an installation.
INSTALLING = COMPILING | {"dist_info"}
NO_TORCH = """
pyparallel's extension must be built against the torch that will run it, but torch \
cannot be imported by {python} ({error}). Type:

    pip install torch "setuptools>=77" wheel ninja "pybind11>=2.11"
    pip install --no-build-isolation .

Without a compiler, PYPARALLEL_BUILD=python installs the pure Python form.
"""
OLD_SETUPTOOLS = """
pyparallel must be built by setuptools 77 or newer, but {version} is installed. Type:

    pip install "setuptools>=77" wheel ninja "pybind11>=2.11"
"""


class Nvcc(NamedTuple):
    """A CUDA compiler: its executable, its toolkit's folder, its version."""

    path: str
    home: str
    version: str


class Choice(NamedTuple):
    """The kind of build, and the reason for it."""

    kind: str  # "cpu" or "cuda"
    reason: str


def on(env: Mapping[str, str], name: str) -> bool:
    """Return True if a switch is set to anything but 0 or an empty string."""
    return env.get(name, "0") not in ("", "0")


def version() -> str:
    """Read the version from its one source."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]


def versions() -> dict[str, Any]:
    """Return the names that pyparallel/core/versions.py defines."""
    return runpy.run_path(str(ROOT / "pyparallel" / "core" / "versions.py"))


def narrowed(requirements: list[str], torch_version: str | None) -> list[str]:
    """Return the dependencies of the sources, or of an extension for one torch."""
    if torch_version is None:
        return requirements
    major, minor = versions()["series"](torch_version)
    others = [each for each in requirements if not re.match(r"torch\b(?!-)", each)]
    return [f"torch=={major}.{minor}.*", *others]


class Metadata(egg_info):
    """Write the dependencies of the extension that is built."""

    def run(self) -> None:
        """Write the metadata."""
        if INSTALLING.intersection(sys.argv):
            listed = list(self.distribution.install_requires)
            pinned = narrowed(listed, installed_torch())
            self.distribution.install_requires = pinned
            self.distribution.metadata.install_requires = pinned
        super().run()


def installed_torch() -> str | None:
    """Return the version of the torch for the build, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def local_version(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that add the torch of a published wheel to its version."""
    torch = env.get("PYPARALLEL_WHEEL_TORCH")
    return {"egg_info": {"tag_build": f"+torch{torch}"}} if torch else {}


def nvcc_candidates(env: Mapping[str, str], site: Path) -> list[str]:
    """List the possible paths of nvcc, in search order."""
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    paths = [*(f"{home}/bin/nvcc" for home in homes)]
    paths += filter(None, [shutil.which("nvcc", path=env.get("PATH"))])
    wheels = sorted(site.glob("nvidia/*/bin/nvcc"))
    return [*paths, "/usr/local/cuda/bin/nvcc", *map(str, wheels)]


def find_nvcc(candidates: list[str]) -> Nvcc | None:
    """Return the first nvcc that runs; its output names the toolkit's folder."""
    for path in filter(shutil.which, candidates):
        command = [path, "--dryrun", "-x", "cu", "-c", os.devnull]
        dryrun = subprocess.run(command, capture_output=True, text=True)
        about = subprocess.run([path, "--version"], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
        release = re.search(r"release (\d+\.\d+)", about.stdout)
        if release:
            home = top[1].strip() if top else str(Path(path).resolve().parents[1])
            return Nvcc(path, os.path.realpath(home), release[1])
    return None


def choose(
    env: Mapping[str, str],
    torch_version: str,
    torch_cuda: str | None,
    nvcc: Nvcc | None,
    looked: list[str],
) -> Choice:
    """Choose CPU or CUDA. ``FORCE_CUDA=1`` selects CUDA or raises an error."""
    forced = on(env, "FORCE_CUDA")
    if forced and on(env, "FORCE_ONLY_CPU"):
        raise SystemExit("FORCE_CUDA and FORCE_ONLY_CPU are both set. Unset one.")
    if on(env, "FORCE_ONLY_CPU"):
        return Choice("cpu", "FORCE_ONLY_CPU is set")
    missing = []
    if torch_cuda is None:
        missing.append(f"torch {torch_version} is built without CUDA")
    if nvcc is None:
        missing.append(f"no nvcc was found (looked at {', '.join(looked)})")
    elif torch_cuda and nvcc.version.split(".")[0] != torch_cuda.split(".")[0]:
        missing.append(
            f"nvcc is of CUDA {nvcc.version} ({nvcc.path}) but torch {torch_version} "
            f"is of CUDA {torch_cuda}, and their major versions must be equal"
        )
    if not missing:
        return Choice("cuda", "FORCE_CUDA is set" if forced else "nvcc and torch agree")
    if forced:
        raise SystemExit(
            f"FORCE_CUDA=1 must build for CUDA, but {'; and '.join(missing)}. Install "
            "the missing part, point CUDA_HOME at the toolkit, or unset FORCE_CUDA."
        )
    return Choice("cpu", "; ".join(missing))


def arch_list(
    env: Mapping[str, str], visible: list[tuple[int, int]], compiled: str, known: str
) -> str:
    """Choose TORCH_CUDA_ARCH_LIST: its value, the visible GPUs, or torch's own.

    ``visible`` are compute capabilities of the GPUs here, ``compiled`` are torch's own
    architectures (``"sm_80 sm_90"``), ``known`` are nvcc's; empty if unknown.
    """
    if env.get("TORCH_CUDA_ARCH_LIST"):
        return env["TORCH_CUDA_ARCH_LIST"]
    codes = [code for code in compiled.split() if code.startswith("sm_")]
    codes = [code for code in codes if not known or code in known.split()]
    having = [re.fullmatch(r"sm_(\d+)(\d)([a-z]?)", code) for code in codes]
    archs = [f"{m[1]}.{m[2]}{m[3]}" for m in having if m]
    if visible:
        newest = max(((int(m[1]), int(m[2])) for m in having if m), default=(99, 0))
        archs = [f"{a}.{b}" for a, b in sorted({min(c, newest) for c in visible})]
    if not archs:
        raise SystemExit("No GPU architecture is known. Set TORCH_CUDA_ARCH_LIST.")
    return ";".join(archs) + "+PTX"


def default_jobs(meminfo: Path, cores: int) -> int:
    """Return the number of parallel compilers: one per core and per 3 GB of memory."""
    text = meminfo.read_text() if meminfo.exists() else ""
    free = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return max(1, min(cores, int(free[1]) // 3_000_000 if free else cores))


def sanitizers(env: Mapping[str, str], cuda: bool) -> list[str]:
    """Return the flags for ``PYPARALLEL_SANITIZE``."""
    known = runpy.run_path(str(ROOT / "scripts" / "sanitizers.py"))
    return known["flags"](env, cuda)


def flags(env: Mapping[str, str], cuda: bool) -> dict[str, list[str]]:
    """Return the compilers' flags, without -std, which torch adds."""
    # A newer compiler may print more warnings: these must not stop an installation.
    strict = ["-Wall", "-Wextra", *(["-Werror"] if on(env, "WERROR") else [])]
    usual = ["-O0", "-g"] if on(env, "DEBUG") else ["-O3", "-g0"]
    level = sanitizers(env, cuda) or usual
    device = [f"-Xcompiler={','.join(strict)}"]
    device += ["-Werror=all-warnings"] if on(env, "WERROR") else []
    device += env.get("NVCC_FLAGS", "").split()
    found = {"cxx": [*level, "-fopenmp", *strict], "nvcc": [level[0], *device]}
    return found if cuda else {"cxx": found["cxx"]}


def sources(cuda: bool, folder: Path) -> list[str]:
    """List the files to compile: the kernels, and one file per folder of C++ files.

    The latter are written into ``folder``. Each includes the files of a folder of csrc,
    so that the compiler reads torch's headers once per folder: they take most of its
    time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The kernels come first, because they take longest.
    kernels = sorted((ROOT / "csrc" / "cuda").glob("[!.]*.cu")) if cuda else []
    listed = [str(path.relative_to(ROOT)) for path in kernels]
    for name in (*FOLDERS, *(["cuda"] if cuda else [])):
        files = sorted((ROOT / "csrc" / name).glob("[!.]*.cpp"))
        text = "".join(f'#include "{name}/{file.name}"\n' for file in files)
        path = folder / f"{name}.cpp"
        # An unchanged file is not compiled again.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        listed.append(str(path))
    return listed


def system_headers(dirs: list[str], nvcc: Nvcc | None, site: Path) -> list[str]:
    """Return flags that turn off our warnings in headers of other projects.

    torch's headers include those of cuSPARSE and others. A minimal toolkit lacks them,
    but torch's wheels contain them.
    """
    if nvcc and not Path(nvcc.home, "include", "cusparse.h").exists():
        dirs = [*dirs, *map(str, sorted(site.glob("nvidia/*/include")))]
    return [flag for folder in dirs for flag in ("-isystem", folder)]


def print_table(record: Mapping[str, Any]) -> None:
    """Print the choices, one per line."""
    rows = [f"  {name:<10} {value or '-'}" for name, value in record.items()]
    print("pyparallel is built as follows:", *rows, sep="\n", flush=True)


def compiler() -> str:
    """Return the first line of the C++ compiler's version text."""
    command = [*os.environ.get("CXX", "c++").split(), "--version"]
    try:
        return subprocess.check_output(command, text=True).splitlines()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"A C++ compiler must be there, but {command[0]} cannot run ({error}). "
            "Install g++, or set PYPARALLEL_BUILD=python for the pure Python form."
        ) from error


def native() -> dict[str, Any]:
    """Return the arguments of ``setup`` for a package with an extension."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(NO_TORCH.format(python=sys.executable, error=error)) from None
    if (refusal := versions()["too_old"](torch.__version__)) is not None:
        raise SystemExit(refusal)
    site, env = Path(torch.__file__).parents[1], os.environ
    looked = nvcc_candidates(env, site)
    nvcc = None if on(env, "FORCE_ONLY_CPU") else find_nvcc(looked)
    choice = choose(env, torch.__version__, torch.version.cuda, nvcc, looked)
    cuda, archs = choice.kind == "cuda", ""
    if cuda and nvcc:
        known = subprocess.run([nvcc.path, "--list-gpu-code"], capture_output=True)
        gpus = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        compiled = torch._C._cuda_getArchFlags() or ""
        archs = arch_list(env, list(gpus), compiled, known.stdout.decode())
        os.environ.update(CUDA_HOME=nvcc.home, TORCH_CUDA_ARCH_LIST=archs)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("MAX_JOBS", f"{default_jobs(Path('/proc/meminfo'), cores)}")
    record = {
        "version": version(),
        "kind": choice.kind,
        "reason": choice.reason,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "archs": archs,
        "nvcc": f"{nvcc.version} ({nvcc.home})" if cuda and nvcc else None,
        "compiler": compiler(),
        "sanitize": env.get("PYPARALLEL_SANITIZE", ""),
        "python": platform.python_version(),
    }
    print_table({**record, "jobs": os.environ["MAX_JOBS"]})
    return arguments(record, nvcc if cuda else None, site)


def arguments(record: dict[str, Any], nvcc: Nvcc | None, site: Path) -> dict[str, Any]:
    """Return the extension and the command that builds it and writes its record."""
    # Imported after CUDA_HOME is set, because this module reads it once.
    from torch.utils import cpp_extension

    class Build(cpp_extension.BuildExtension):
        """Write a record of the build's torch and CUDA beside the module."""

        def run(self) -> None:
            super().run()
            built = Path(self.get_ext_fullpath(MODULE))
            text = json.dumps(record, indent=2) + "\n"
            built.with_suffix(".json").write_text(text, encoding="utf-8")

    # Builds for different versions of torch share no object file.
    base = f"build/{record['kind']}{record['sanitize']}-torch{record['torch']}"
    names = ("version", "torch", "cuda", "archs", "sanitize")
    macros = [(f"PP_BUILD_{k.upper()}", f'"{record[k] or ""}"') for k in names]
    own, usual = str(ROOT / "csrc"), [] if on(os.environ, "DEBUG") else ["-s"]
    link = sanitizers(os.environ, nvcc is not None) or usual
    # A compiler may link libstdc++ statically. If that copy were visible, it would mix
    # with the one of torch, and streams would lose text or crash.
    link = ["-fopenmp", "-Wl,--exclude-libs,ALL", *link]
    make = cpp_extension.CUDAExtension if nvcc else cpp_extension.CppExtension
    extension: Extension = make(
        MODULE,
        sources(nvcc is not None, Path(base, "sources")),
        include_dirs=[own],
        define_macros=macros,
        extra_link_args=link,
    )
    foreign = [folder for folder in extension.include_dirs if folder != own]
    headers = system_headers(foreign, nvcc, site)
    extension.include_dirs = [own]
    extension.extra_compile_args = {
        tool: [*ours, *headers] for tool, ours in flags(os.environ, bool(nvcc)).items()
    }
    options, commands = {"build": {"build_base": base}}, {"build_ext": Build}
    return {"ext_modules": [extension], "cmdclass": commands, "options": options}


def main() -> None:
    """Build the package; commands that only read metadata do not need torch."""
    wanted = os.environ.get("PYPARALLEL_BUILD") or "native"
    if wanted not in ("native", "python"):
        found = repr(wanted)
        raise SystemExit(f"PYPARALLEL_BUILD must be native or python, but is {found}.")
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise SystemExit(OLD_SETUPTOOLS.format(version=setuptools.__version__))
    if wanted == "python":
        print_table({"kind": "python", "reason": "PYPARALLEL_BUILD=python"})
        setup(options={"build": {"build_base": "build/python"}})
    else:
        built = native() if COMPILING.intersection(sys.argv) else {}
        options = {**built.pop("options", {}), **local_version(os.environ)}
        commands = {**built.pop("cmdclass", {}), "egg_info": Metadata}
        setup(options=options, cmdclass=commands, **built)


if __name__ == "__main__":
    main()
