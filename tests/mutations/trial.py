"""Apply one mutation at a time to a copy of the tree, and run the tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.mutations.entry import CUDA, ROOT, Mutation

NOTICED = ("fails", "hangs", "dies")
_BUILD_SECONDS = 900.0
_PAUSE = 0.02
#: Options of pytest.
PYTEST = ("-q", "-x", "--tb=no", "-p", "no:cacheprovider")


class Outcome(NamedTuple):
    """The outcome of one mutation: fails, hangs, dies, SURVIVED or BROKEN."""

    verdict: str
    by: str = ""  # the test that noticed, or why it is broken
    seconds: float = 0.0


class Done(NamedTuple):
    """How a command ended; without a code it hung."""

    code: int | None
    output: str


def execute(
    command: Sequence[object], root: Path, limit: float, **variables: str
) -> Done:
    """Run a command and its children; stop them after ``limit`` seconds."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=root,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return _done(process.pid, process.poll, limit, output)


def _done(
    leader: int, poll: Callable[[], int | None], limit: float, output: IO[str]
) -> Done:
    """Wait for the leader of a session, then end whatever is left of it."""
    deadline = time.monotonic() + limit
    while (code := poll()) is None and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while poll() is None:
        time.sleep(_PAUSE)
    output.seek(0)
    return Done(code, output.read())


def preload() -> None:
    """Import what takes long, so that `fork_pytest` can be used; nothing of ours."""
    for name in ("pytest", "torch", "torch.distributed", "numpy", "optree"):
        importlib.import_module(name)


def fork_pytest(
    arguments: Sequence[str], root: Path, limit: float, **variables: str
) -> Done:
    """Run pytest in a forked child, which has what `preload` has imported."""
    ended: list[int] = []
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if child == 0:
            _be_pytest(arguments, root, output.fileno(), variables)

        def poll() -> int | None:
            if not ended:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    ended.append(os.waitstatus_to_exitcode(status))
            return ended[0] if ended else None

        return _done(child, poll, limit, output)


def _be_pytest(
    arguments: Sequence[str], root: Path, output: int, variables: dict[str, str]
) -> None:
    code = 3
    try:
        os.setsid()
        os.chdir(root)
        os.environ.update(variables)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ours = {str(ROOT), str(ROOT / "scripts")}
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ours)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        # A spawned process imports the main module of its parent, except pytest's.
        main = types.ModuleType("__main__")
        main.__spec__ = importlib.util.find_spec("pytest.__main__")
        sys.modules["__main__"] = main
        import pytest

        code = int(pytest.main(list(arguments)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _variables(root: Path, backend: str) -> dict[str, str]:
    """Return the environment of tests."""
    return {
        "CI": "true",
        "PYPARALLEL_BACKEND": backend,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(root),
    }


def judge(done: Done, by_pytest: bool) -> Outcome:
    """Return the outcome that the end of a test run means."""
    if done.code is None:
        return Outcome("hangs")
    if done.code == 0:
        return Outcome("SURVIVED")
    if by_pytest and done.code > 1:  # nothing was collected, or it cannot be imported
        return Outcome("BROKEN", done.output[-2000:])
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.output, re.MULTILINE)
    by = found[1] if found else ""
    if "Failed: Timeout" in done.output:
        return Outcome("hangs", by)
    return Outcome("dies" if done.code < 0 else "fails", by)


def problem(mutation: Mutation, root: Path = ROOT) -> str:
    """Return why a mutation cannot be applied; empty if it can."""
    path = root / mutation.file
    if not path.is_file():
        return f"{mutation.file} is not there"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutation.text)) != 1:
        return f"{mutation.file} has its text {count} times"
    if mutation.text == mutation.replacement:
        return "it changes nothing"
    if path.suffix == ".py":
        try:
            compile(mutated(source, mutation), mutation.file, "exec")
        except SyntaxError as error:
            return f"it does not parse: {error}"
    return ""


def mutated(source: str, mutation: Mutation) -> str:
    """Return a source without the protection."""
    return source.replace(mutation.text, mutation.replacement)


class Tree:
    """A copy of the tree.

    Args:
        root: where it is.
        cmake: what builds C++ tests.
        forks: whether `preload` was called, so that Python tests need not import it.
    """

    def __init__(self, root: Path, cmake: str = "cmake", forks: bool = False) -> None:
        self.root, self._cmake, self._forks = root, cmake, forks
        self._tried = root / "build" / "mutated"  # files that ever were

    def fill(self) -> None:
        """Copy the sources, and the extension, which is not among them."""
        subprocess.run([ROOT / "scripts" / "copy_tree", self.root], check=True)
        self._copy_extension()
        # Object files of these sources may lack a protection, even if a later run
        # compiled nothing, because this copy restores the old times of the sources.
        for file in self._files_tried():
            (self.root / file).touch()

    def _copy_extension(self) -> None:
        backend = Path("pyparallel", "backend")
        for suffix in ("so", "json"):
            for path in (ROOT / backend).glob(f"_C.*.{suffix}"):
                shutil.copy2(path, self.root / backend)

    def _files_tried(self) -> set[str]:
        if not self._tried.exists():
            return set()
        return set(self._tried.read_text(encoding="utf-8").splitlines())

    def pytest(self, tests: Iterable[str], backend: str, limit: float) -> Outcome:
        """Run Python tests to the first that fails."""
        arguments, variables = [*PYTEST, *tests], _variables(self.root, backend)
        if self._forks:
            done = fork_pytest(arguments, self.root, limit, **variables)
        else:
            command = [sys.executable, "-m", "pytest", *arguments]
            done = execute(command, self.root, limit, **variables)
        return judge(done, by_pytest=True)

    def build_extension(self) -> str:
        """Compile the changed sources of the extension; return the error text."""
        return self._build(sys.executable, FORCE_ONLY_CPU="1")

    def _build(self, python: str, **variables: str) -> str:
        done = execute(
            [python, "setup.py", "-q", "build_ext", "--inplace"],
            self.root,
            _BUILD_SECONDS,
            PATH=f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **variables,
        )
        return "" if done.code == 0 else done.output[-2000:]

    def ctest(self, tests: Iterable[str], sanitize: str, limit: float) -> Outcome:
        """Compile C++ tests and run them."""
        build = self.root / "build" / f"mutations-{sanitize or 'plain'}"
        commands: list[list[object]] = []
        if not (build / "CMakeCache.txt").exists():
            options = [f"-DPP_SANITIZE={sanitize}", "-DCMAKE_BUILD_TYPE="]
            options += ["-DCMAKE_CXX_FLAGS=-O1"]
            if shutil.which("ninja"):
                options += ["-G", "Ninja"]
            commands.append([self._cmake, "-S", ".", "-B", build, *options])
        for path in dict.fromkeys(test.split("::")[0] for test in tests):
            name = Path(path).stem
            commands.append([self._cmake, "--build", build, "-j2", "--target", name])
            while commands:
                done = execute(commands.pop(0), self.root, _BUILD_SECONDS)
                if done.code != 0:
                    return Outcome("BROKEN", done.output[-2000:])
            corpus = f"tests/csrc/fuzz/corpus/{name.removeprefix('fuzz_')}"
            arguments = [corpus, "2000"] if name.startswith("fuzz_") else []
            variables = {"TSAN_OPTIONS": "die_after_fork=0"}
            done = execute([build / name, *arguments], self.root, limit, **variables)
            outcome = judge(done, by_pytest=False)
            if outcome.verdict != "SURVIVED":
                return outcome._replace(by=path)
        return Outcome("SURVIVED")

    def test(self, mutation: Mutation, tests: Iterable[str] = ()) -> Outcome:
        """Run the tests of a mutation, or others of their kind, on the current tree."""
        chosen = list(tests or mutation.tests)
        if mutation.is_native_test:
            return self.ctest(chosen, mutation.sanitize, mutation.limit)
        if mutation.needs_extension and (wrong := self.build_extension()):
            return Outcome("BROKEN", wrong)
        return self.pytest(chosen, mutation.backend, mutation.limit)

    def attempt(self, mutation: Mutation) -> Outcome:
        """Take the protection out, test, and put it back."""
        path, started = self.root / mutation.file, time.monotonic()
        source = path.read_text(encoding="utf-8")
        if mutation.file not in self._files_tried():
            self._tried.parent.mkdir(exist_ok=True)
            with self._tried.open("a", encoding="utf-8") as tried:
                tried.write(f"{mutation.file}\n")
        path.write_text(mutated(source, mutation), encoding="utf-8")
        try:
            outcome = self.test(mutation)
        finally:
            path.write_text(source, encoding="utf-8")
        return outcome._replace(seconds=round(time.monotonic() - started, 1))


class CudaTree(Tree):
    """A copy of the tree with kernels, whose tests run on the fake CUDA runtime.

    It stays in ``build``, because the first build takes long. ``make cuda-tools`` makes
    the environment, the runtime, and the test tools, which are not in the environment.
    """

    def __init__(self) -> None:
        super().__init__(ROOT / "build" / "cuda-mutations")
        self._python = str(ROOT / ".venv-cuda" / "bin" / "python")
        self._tools = ROOT / "build" / "cuda-tools"

    def _copy_extension(self) -> None:
        """Keep the extension of the last run, which is compiled again."""

    def pytest(self, tests: Iterable[str], backend: str, limit: float) -> Outcome:
        """Run tests marked ``cuda`` to the first that fails."""
        runtime = ROOT / "build" / "fakecuda" / "env.sh"
        script = f'. {runtime} && exec "$0" -m pytest "$@"'
        variables = _variables(self.root, "native")
        variables["PYTHONPATH"] += f"{os.pathsep}{self._tools}"
        done = execute(
            ["bash", "-c", script, self._python, *PYTEST, *tests],
            self.root,
            limit,
            **variables,
        )
        return judge(done, by_pytest=True)

    def build_extension(self) -> str:
        """Compile the changed sources of the extension; return the error text."""
        return self._build(
            self._python,
            FORCE_CUDA="1",
            TORCH_CUDA_ARCH_LIST="9.0",
            PYTHONPATH=str(self._tools),
        )


def kind_of(mutation: Mutation) -> tuple[Any, ...]:
    """Return a key that is equal for mutations whose tests can run together."""
    return (
        mutation.backend == CUDA,  # last: these have a tree of their own
        mutation.needs_extension,  # then: each changes the extension
        mutation.is_native_test,
        mutation.sanitize,
        mutation.backend,
    )


def run(
    tree: Tree, mutations: Iterable[Mutation], say: Callable[[str], None] = print
) -> dict[str, Outcome]:
    """Try mutations one at a time, after their tests have passed without any.

    Raises:
        RuntimeError: a test fails on the tree as it is.
    """
    outcomes = {}
    for _, group in groupby(sorted(mutations, key=kind_of), kind_of):
        alike = list(group)
        if alike[0].backend == CUDA:
            tree = CudaTree()
            tree.fill()
        tests = dict.fromkeys(test for each in alike for test in each.tests)
        limit = max(each.limit for each in alike) * len(alike)
        before = tree.test(alike[0]._replace(limit=limit), tests)
        if before.verdict != "SURVIVED":
            raise RuntimeError(f"without any mutation: {before}")
        for mutation in alike:
            outcome = tree.attempt(mutation)
            outcomes[mutation.name] = outcome
            word = "noticed" if outcome.verdict in NOTICED else outcome.verdict
            told = "" if outcome.verdict == "BROKEN" else ", ".join(outcome[:2])
            say(f"{word:<9}{outcome.seconds:6.1f} s  {mutation.name}: {told}")
    return outcomes
