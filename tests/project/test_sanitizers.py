"""scripts/sanitizers.py: no report of a sanitizer is lost."""

from __future__ import annotations

import os
import subprocess

import from_scripts
import pytest

pytestmark = pytest.mark.one_backend

sanitizers = from_scripts.load("sanitizers")

# A child that is not waited for decides about nothing, and neither does its output.
SOURCE = """
#include <unistd.h>
#include <climits>
#include <cstdlib>
#include <sys/wait.h>
int main(int argc, char** argv) {
  if (argc < 2) abort();
  if (fork() == 0) {
    int number = INT_MAX - 2;
    number += argc;
    _exit(number == 0);
  }
  wait(nullptr);
  return atoi(argv[1]);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile a program whose child overflows an int if it has two arguments."""
    folder = tmp_path_factory.mktemp("sanitizers")
    source, binary = folder / "source.cpp", folder / "program"
    source.write_text(SOURCE)
    command = ["c++", "-fsanitize=undefined", source, "-o", binary]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no compiler with UndefinedBehaviorSanitizer: {done.stderr}")
    return str(binary)


@pytest.mark.parametrize(
    ("arguments", "code", "reports"),
    [
        (["0"], 0, 0),
        (["3"], 3, 0),
        (["0", "more"], sanitizers.REPORTED, 1),
        (["3", "more"], 3, 1),
        ([], 128 + 6, 0),
    ],
)
def test_a_report_is_shown_and_fails_a_passing_run(
    program: str,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    reports: int,
) -> None:
    variables = {**os.environ, **sanitizers.environment("undefined", ["c++"])}
    assert sanitizers.run("undefined", [program, *arguments], variables) == code
    assert capfd.readouterr().err.count("signed integer overflow") == reports
