"""The interpreter of PTX reports every access, and every error of a kernel.

The tests marked ``cuda`` compare the results of its instructions with those of the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.repository.folders import ROOT

FOLDER = ROOT / "tests" / "fakecuda"
BUILD = ROOT / "build" / "ptx"
SOURCES = sorted(FOLDER.glob("ptx*.cpp"))
# Undefined behaviour ends the process.
FLAGS = """
    -std=c++17 -fPIC -shared -Wall -Wextra -Werror
    -fsanitize=undefined,float-cast-overflow -fsanitize-undefined-trap-on-error
""".split()

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ACCESS = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
)

Observer = Callable[[int, int, bool, bytes], None]


class PtxError(Exception):
    """An error of the parser or of a kernel."""


@functools.cache
def library() -> ctypes.CDLL:
    """Load the interpreter, compiled once for each content of its sources."""
    content = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("ptx*.[ch]*")))
    key = hashlib.sha256(content + " ".join(FLAGS).encode()).hexdigest()[:16]
    built = BUILD / f"{key}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        own = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *FLAGS, *SOURCES, "-o", own], check=True)
        own.replace(built)
    loaded = ctypes.CDLL(str(built))
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    loaded.ptx_run.argtypes = [text, pointer, ACCESS, text, ctypes.c_size_t]
    return loaded


ENTRY = """
.version 8.0
.target sm_90
.address_size 64
.entry k(.param .u64 to)
{ .reg .b64 %w<9>; .reg .b32 %r<9>; .reg .b16 %h<2>; .reg .pred %p<2>;
ld.param.u64 %w0, [to];
BODY
}
"""
PREFIX = "k, block (0, 0, 0), thread (0, 0, 0): "


def execute(body: str, to: np.ndarray, observer: Observer | None = None) -> None:
    """Run the instructions in one thread.

    Args:
        body: the instructions.
        to: the memory at %w0.
        observer: called with address, size, write and text of each access.

    Raises:
        PtxError: with the message of the interpreter.
    """
    error = ctypes.create_string_buffer(4096)
    call = ACCESS(observer) if observer else ctypes.cast(None, ACCESS)
    text = ENTRY.replace("BODY", body).encode()
    library().ptx_run(text, to.ctypes.data, call, error, len(error))
    if error.value:
        raise PtxError(error.value.decode())


def error_of(body: str) -> str:
    with pytest.raises(PtxError) as error:
        execute(body, aligned(64))
    return str(error.value)


def aligned(count: int) -> np.ndarray:
    """Return bytes at a multiple of 64."""
    room = np.zeros(count + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:count]


def test_each_access_is_reported_before_it_happens() -> None:
    memory, seen = aligned(64), []
    memory[:16] = range(16)

    def observe(address: int, nbytes: int, write: bool, text: bytes) -> None:
        place = address - memory.ctypes.data
        seen.append((place, nbytes, write, text.decode(), int(memory[48])))

    execute(
        """ld.global.nc.v4.f32 {%r0, %r1, %r2, %r3}, [%w0];
        st.global.wb.v2.u32   [%w0+48],
            {%r3, %r0};
        ld.u8 %r4, [%w0+48];""",
        memory,
        observer=observe,
    )
    assert seen == [
        (0, 16, False, "ld.global.nc.v4.f32 {%r0, %r1, %r2, %r3}, [%w0];", 0),
        (48, 8, True, "st.global.wb.v2.u32 [%w0+48], {%r3, %r0};", 0),
        (48, 1, False, "ld.u8 %r4, [%w0+48];", 12),
    ]
    assert memory[48:56].tolist() == [12, 13, 14, 15, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "ld.global.nc.f32 %r0, [%w0+-2];",
            "the address must be a multiple of 4, but is 0x",
        ),
        (
            "st.global.v4.u32 [%w0+8], {%r0, %r0, %r0, %r0};",
            "the address must be a multiple of 16, but is 0x",
        ),
        ("ld.param.u64 %w1, [to+8];", "8 bytes at 0x8 are outside"),
        ("ld.param.v2.u64 {%w1, %w2}, [to];", "16 bytes at 0x0 are outside"),
        ("mov.u32 %r0, 0; div.u32 %r1, %r0, %r0;", "division by zero"),
    ],
)
def test_errors_name_the_thread_and_the_instruction(body: str, problem: str) -> None:
    found = error_of(body)
    assert found.startswith(PREFIX + problem)
    assert found.endswith(f": {body.rpartition('; ')[2]}")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("foo.b32 %r0, %r1;", "unknown instruction"),
        ("bar.sync 0;", "unknown instruction"),
        ("mul.hi.u32 %r0, %r1, %r2;", "unknown modifier .hi of mul"),
        ("ld.volatile.u32 %r0, [%w0];", "unknown modifier .volatile of ld"),
        ("st.u32 [%w0], %r0;", "st must be st.global"),
        ("add.u32 %r0, %r1;", "add must have 3 operands here, but has 2"),
        ("add.u64 %w0, %w1, %r1;", "%r1 must have 8 bytes, but has 4"),
        (
            "mov.u64 %w0, 99999999999999999999;",
            "99999999999999999999 is no known name and no value of .u64",
        ),
    ],
)
def test_an_instruction_that_is_not_interpreted_is_an_error(
    body: str, problem: str
) -> None:
    assert error_of(body) == f"PTX line 8: {problem}: {body}"
