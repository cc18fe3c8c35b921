"""``pyparallel`` and ``python -m pyparallel``: the choice of the command."""

from __future__ import annotations

import errno
import importlib
import io
import os
import subprocess
import sys
import types
from importlib import metadata

import pytest

import pyparallel
from pyparallel import __main__ as command_line
from tests.support.processes import interpreters
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend


@pytest.fixture
def commands(monkeypatch):
    """Give the command line two commands that record their arguments."""
    given: list[tuple[str, list[str]]] = []
    table = {}
    for name, code in {"doctor": 0, "other": 3}.items():
        module = types.ModuleType(f"pyparallel._fake_{name}")

        def run_it(argv, name=name, code=code):
            given.append((name, argv))
            return code

        module.main = run_it  # type: ignore[attr-defined]  # a module of the test
        monkeypatch.setitem(sys.modules, module.__name__, module)
        table[name] = command_line.Command(f"_fake_{name}", f"what {name} does")
    monkeypatch.setattr(command_line, "COMMANDS", table)
    return given


@pytest.mark.parametrize(
    ("arguments", "command", "rest"),
    [
        ([], "doctor", []),
        (["--json"], "doctor", ["--json"]),
        (["doctor", "--help"], "doctor", ["--help"]),
        (["other", "--", "python", "x.py", "--help"], "other", None),
        (["other", "doctor"], "other", ["doctor"]),
    ],
)
def test_a_command_gets_the_rest_of_the_line(commands, arguments, command, rest):
    code = command_line.main(arguments)
    assert commands == [(command, arguments[1:] if rest is None else rest)]
    assert code == {"doctor": 0, "other": 3}[command]


def test_help_lists_the_commands_and_runs_none(commands, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--help"])
    assert ended.value.code == 0 and commands == []
    shown = capsys.readouterr().out
    assert "  doctor  what doctor does\n  other   what other does\n" in shown


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_has_a_main_and_a_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pyparallel {name}")
    module = importlib.import_module(f"pyparallel.{command_line.COMMANDS[name].module}")
    assert callable(module.main)


#: As pip writes it, and as ``python -m pyparallel``.
SCRIPT = "from pyparallel.__main__ import main\nsys.exit(main())"
MODULE = "runpy.run_module('pyparallel', run_name='__main__')"


def test_the_script_that_is_installed_is_the_same_command_line():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.scripts]\n")[2].partition("\n[")[0]
    assert section.strip() == 'pyparallel = "pyparallel.__main__:main"'
    entry = metadata.EntryPoint(
        "pyparallel", "pyparallel.__main__:main", "console_scripts"
    )
    assert entry.load() is command_line.main
    imports = "import runpy, sys, pyparallel\nsys.argv[1:] = ['--version']"
    done = interpreters.run(imports, [SCRIPT, MODULE])
    assert done == [(0, f"pyparallel {pyparallel.__version__}\n", "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_closed_stream_is_no_traceback(number: int) -> None:
    shell = ("sh", "-c", f'exec "$0" "$@" {number}>&-', sys.executable)
    done = subprocess.run(
        [*shell, "-m", "pyparallel", "--quick"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    (*_, last) = done.stdout.splitlines() or [""]
    assert last.partition(":")[0] in ([""] if number == 1 else ["ok", "failed"])


def test_characters_that_a_terminal_lacks_are_escaped(commands, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    fake = sys.modules["pyparallel._fake_other"]
    fake.main = lambda argv: print("/home/caf\xe9/\udce9") or 0  # as of a folder
    assert command_line.main(["other"]) == 0
    assert out.buffer.getvalue() == b"/home/caf\\xe9/\\udce9\n"


def test_an_error_of_another_file_is_raised(commands):
    def fail(argv):
        raise OSError(errno.ENOSPC, "of shared memory")

    sys.modules["pyparallel._fake_other"].main = fail  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="of shared memory"):
        command_line.main(["other"])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--quick"], ["--version"]])
def test_a_full_disk_is_no_traceback(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pyparallel", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # --version waits in the buffer
            text=True,
            timeout=120,
        )
    found = "pyparallel: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, found)


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel", "--quick"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
