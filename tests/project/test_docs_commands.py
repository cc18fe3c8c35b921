"""Commands in the pages: their targets, settings, options and files exist."""

from __future__ import annotations

import re

import pytest
from docs_blocks import SETTING, all_blocks, commands, pages
from repository import ROOT

pytestmark = pytest.mark.one_backend

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


class Step(NamedTuple):
    """A step of CI runs it: this text begins a line of ``.ci/run``."""

    line: str


class In(NamedTuple):
    """A file that runs the command: its path, and a text in it."""

    path: str
    text: str


class Not(NamedTuple):
    """It is not run before each change."""

    reason: str


LONG = "a long run, of hours or of a whole machine; its parts have tests"
ANOTHER = "it sets up another machine, or a folder for one"
#: The beginning of each command, without settings such as MAX_JOBS=1, and its test.
COVERED: dict[str, Step | In | Not] = {
    "make test": In("Makefile", "test: test-native test-python test-core-address"),
    "make test-all": In("Makefile", "test-all: ## all checks of CI"),
    "make test-native": Step("make test-native"),
    "make test-python": Step("make test-python"),
    "make test-core": Step("make test-core"),
    "make lint": Step("make lint"),
    "make demo": Step("make demo"),
    "make docs": Step("make docs"),
    "make fuzz-core": Step("make fuzz-core"),
    "make test-peers": Step("make test-peers"),
    "make cuda-build": Step("make cuda-build"),
    "make wheel": In("tests/project/test_release.py", "check_dist"),
    "make help": In("tests/project/test_docs_commands.py", '"make", "help"'),
    "make fuzz": Not(LONG),
    "make fuzz-corpus": Not(LONG),
    "make soak": Not(LONG),
    "make test-asan": Not(LONG),
    "make test-tsan": Not(LONG),
    "make test-valgrind": Not(LONG),
    "make test-busy": Not(LONG),
    "make mutations": Not(LONG),
    "make bench": In("tests/benchmarks/test_report.py", "run.main("),
    "make bench-loader": In("tests/benchmarks/test_loader.py", "loader.main("),
    "make gpu-check": In("tests/support/gpu_check_runs.py", "gpu_check.py"),
    "make gpu-wheels": Not(ANOTHER),
    "make wheels": Not(LONG),
    "make test-matrix": Not(LONG),
    "make test-newest": Step("make test-newest"),
    "pip install torch": In("scripts/check_sdist", '"$torch"'),
    "pip install setuptools>=77": In("scripts/check_sdist", '"setuptools>=77,<81"'),
    "pip install --no-build-isolation": In(
        "scripts/check_sdist", "-m pip install -q --no-build-isolation"
    ),
    "pip install pyparallel-torch[demo]": In("Makefile", '".[test,lint,demo]"'),
    "pip install accelerate lightning": In("Makefile", '"accelerate>='),
    "pip install mmengine": In("Makefile", "mmengine==0.10.7"),
    "pip install --target": Not(ANOTHER),
    "pyparallel doctor": In("tests/doctor/test_command_line.py", "doctor"),
    "pyparallel profile": In("tests/profiler/test_command.py", "profile"),
    "python -m pyparallel": In(
        "tests/doctor/test_command_line.py", '"-m", "pyparallel"'
    ),
    "python -m benchmarks.loader": In(
        "tests/benchmarks/test_loader.py", "loader.main("
    ),
    "python -m benchmarks.parallel_apply": In(
        "tests/benchmarks/test_parallel_apply.py", "benchmark.main("
    ),
    "python -m benchmarks.sampler": In("tests/benchmarks/test_sampler.py", "main("),
    "python -m benchmarks.gpu": In("tests/benchmarks/test_gpu.py", "gpu.main("),
    "python -m benchmarks.summary": In(
        "tests/benchmarks/test_summary.py", "summary.main("
    ),
    "python -m benchmarks.collate": In(
        "benchmarks/__main__.py", '"-m", "benchmarks.collate"'
    ),
    "python -m benchmarks": In("tests/benchmarks/test_report.py", "run.main("),
    "python train.py": In("tests/transfer/test_debug_variable.py", "PYPARALLEL_DEBUG="),
    "python tests/support/fuzz.py": In("tests/robustness/test_fuzz.py", "fuzz"),
    "python tests/support/soak.py": In("tests/robustness/test_soak.py", "soak"),
    "python examples/ragged_digits.py": In(
        "tests/project/test_examples.py", "ragged_digits"
    ),
    "python examples/unicode_names.py": In(
        "tests/project/test_examples_each.py", "unicode_names"
    ),
    "python examples/mmcv1_install.py": In(
        "tests/project/test_examples_each.py", "mmcv1_install"
    ),
    "python examples/lightning_accelerate.py": In(
        "tests/project/test_examples_peers.py", "lightning_accelerate"
    ),
    "python examples/mmengine_runner.py": In(
        "tests/mmengine/test_runner_example.py", "mmengine_runner"
    ),
    "python examples/parallel_apply.py": In(
        "tests/project/test_examples_parallel.py", "parallel_apply"
    ),
    "python examples/filter_photos.py": In(
        "tests/project/test_examples_parallel.py", "filter_photos"
    ),
    "torchrun --nproc_per_node=2 examples/ragged_digits.py": Step("make demo"),
    "torchrun --nproc_per_node=2 examples/mmengine_runner.py": In(
        "tests/mmengine/test_runner_example.py", "torchrun"
    ),
    "torchrun --standalone": In("tests/support/elastic_runs.py", "distributed.md"),
    "torchrun --nnodes=2": In("tests/parallel/test_two_hosts.py", "distributed.md"),
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": In(
        "tests/support/elastic_runs.py", "distributed.md"
    ),
    "cmake -S . -B build": In("Makefile", '$(CMAKE) -S . -B "build/core-$*"'),
    "cmake --build build/core": In("Makefile", '$(CMAKE) --build "build/core-$*"'),
    "ctest --test-dir build/core": In(
        "Makefile", '$(CTEST) --test-dir "build/core-$*"'
    ),
}
#: The files that must contain the options of our commands.
SOURCES = {
    "benchmarks": "benchmarks",
    "benchmarks.loader": "benchmarks",
    "tests/support/fuzz.py": "tests/support/fuzz.py",
    "tests/support/soak.py": "tests/support/soak.py",
    "examples/": "examples",
}


def typed() -> list[tuple[str, list[str]]]:
    """Return every command of every block with the block's name, without settings."""
    found = []
    for block in all_blocks("sh"):
        for words in commands(block.text):
            while words and SETTING.match(words[0]):
                words = words[1:]
            if words:
                found.append((block.name, words))
    return found


COMMANDS = typed()


def test_targets_of_make_exist_and_so_do_their_settings() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    of_scripts = (ROOT / "scripts/gpu_check.py").read_text(encoding="utf-8")
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z][a-z-]*)[` ]", text))
        assert named <= targets, page
    for name, words in COMMANDS:
        if words[0] != "make":
            continue
        settings = [word for word in words[1:] if SETTING.match(word)]
        assert {word for word in words[1:] if word not in settings} <= targets, name
        for setting in settings:
            assert setting.partition("=")[0] in MAKEFILE + of_scripts, name


def test_options_of_our_programs_exist() -> None:
    checked = 0
    for name, words in COMMANDS:
        program = next((w for w in words if w.startswith(tuple(SOURCES))), None)
        if program is None or words[0] == "ctest":
            continue
        folder = next(SOURCES[each] for each in SOURCES if program.startswith(each))
        files = [ROOT / folder] if "." in folder else (ROOT / folder).glob("*.py")
        source = "".join(path.read_text(encoding="utf-8") for path in files)
        for word in words[words.index(program) + 1 :]:
            if word.startswith("--"):
                option = word.partition("=")[0]
                checked += 1
                assert f'"{option}"' in source, f"{name}: {option}"
    assert checked > 8


def test_files_that_commands_name_exist() -> None:
    for name, words in COMMANDS:
        for word in words:
            if re.fullmatch(
                r"(examples|tests|scripts|benchmarks)/\S+\.(py|json)", word
            ):
                assert (ROOT / word).exists(), f"{name}: {word}"


def test_a_container_is_built_by_the_commands_that_are_tested() -> None:
    (block,) = all_blocks("dockerfile")
    install = "\n".join(
        each.text for each in all_blocks("sh") if each.page == "docs/install.md"
    )
    for line in ("pip install --no-build-isolation", '"setuptools>=77" wheel ninja'):
        assert line in block.text and line in install
    assert "COPY . /src" in block.text
