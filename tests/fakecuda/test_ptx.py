"""The interpreter of PTX reports every access, and every error of a kernel.

The tests marked ``cuda`` compare the results of its instructions with those of the CPU.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

FOLDER = ROOT / "tests" / "fakecuda"
BUILD = ROOT / "build" / "ptx"
SOURCES = sorted(FOLDER.glob("ptx*.cpp"))
# Undefined behaviour ends the process.
FLAGS = """
    -std=c++17 -O1 -fPIC -Wall -Wextra -Werror -fsanitize=undefined,float-cast-overflow
    -fsanitize-undefined-trap-on-error
""".split()

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ACCESS = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
)

HEADER = """
.version 8.0
.target sm_90
.address_size 64
"""


class PtxError(Exception):
    """An error of the parser or of a kernel."""


@functools.cache
def library_path() -> Path:
    """Return the interpreter, compiled once for each content of its sources."""
    content = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("ptx*.[ch]*")))
    key = hashlib.sha256(content + " ".join(FLAGS).encode()).hexdigest()[:16]
    built = BUILD / f"{key}.so"
    if not built.exists():
        _compile(built)
    return built


@functools.cache
def library() -> ctypes.CDLL:
    """Load the interpreter."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.ptx_run.restype = ctypes.c_uint64
    text, pointer = ctypes.c_char_p, ctypes.c_void_p
    loaded.ptx_run.argtypes = [
        *(text, text, pointer, pointer),
        *(ACCESS, text, ctypes.c_size_t),
    ]
    return loaded


def _compile(built: Path) -> None:
    own = BUILD / f"{built.stem}.{os.getpid()}"
    own.mkdir(parents=True)

    def compiled(source: Path) -> Path:
        made = own / f"{source.stem}.o"
        subprocess.run(["g++", *FLAGS, "-c", source, "-o", made], check=True)
        return made

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    subprocess.run(["g++", "-shared", *objects, "-o", own / "ptx.so"], check=True)
    os.replace(own / "ptx.so", built)
    shutil.rmtree(own)


def run(
    text: str,
    name: str,
    arguments: Sequence[np.ndarray | np.generic],
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (1, 1, 1),
    observer: Callable[[int, int, bool, bytes], None] | None = None,
) -> int:
    """Run a kernel and return the number of instructions executed.

    Args:
        text: of a module.
        name: of a kernel.
        arguments: a parameter each: arrays as their addresses, scalars as values.
        grid: in blocks.
        block: in threads.
        observer: called with address, size, write and text of each access.

    Raises:
        PtxError: with the message of the interpreter.
    """
    values = [
        np.uint64(each.ctypes.data) if isinstance(each, np.ndarray) else each
        for each in arguments
    ]
    boxes = [np.array([value]) for value in values]
    pointers = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
    size = (ctypes.c_uint * 6)(*grid, *block)
    error = ctypes.create_string_buffer(4096)
    call = ACCESS(observer) if observer else ctypes.cast(None, ACCESS)
    count = library().ptx_run(
        text.encode(), name.encode(), size, pointers, call, error, len(error)
    )
    if error.value:
        raise PtxError(error.value.decode())
    return int(count)


ENTRY = (
    HEADER
    + """
.entry k(.param .u64 to)
{ .reg .b64 %w<9>; .reg .b32 %r<9>; .reg .b16 %h<2>; .reg .pred %p<2>;
ld.param.u64 %w0, [to];
BODY
}
"""
)
PREFIX = "k, block (0, 0, 0), thread (0, 0, 0): "


def execute(body: str, to: np.ndarray, threads: int = 1, **options: object) -> int:
    text = ENTRY.replace("BODY", body)
    return run(text, "k", [to], (1, 1, 1), (threads, 1, 1), **options)


def error_of(body: str, to: np.ndarray | None = None) -> str:
    memory = np.zeros(64, np.uint8) if to is None else to
    with pytest.raises(PtxError) as error:
        execute(body, memory)
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
    ("instruction", "nbytes", "offset"),
    [
        ("ld.global.nc.f32 %r0, [%w0+-2];", 4, -2),
        ("st.global.v4.u32 [%w0+8], {%r0, %r0, %r0, %r0};", 16, 8),
    ],
)
def test_misaligned_accesses_are_errors(
    instruction: str, nbytes: int, offset: int
) -> None:
    memory = aligned(64)
    assert error_of(instruction, memory) == (
        f"{PREFIX}the address must be a multiple of {nbytes}, but is "
        f"{memory.ctypes.data + offset:#x}: {instruction}"
    )


def test_a_block_has_a_limit_of_threads() -> None:
    text = HEADER + ".entry k() .maxntid 8, 2, 1 .minnctapersm 1 { ret; }"
    assert run(text, "k", [], (1, 1, 1), (16, 1, 1)) == 16
    with pytest.raises(PtxError) as error:
        run(text, "k", [], (1, 1, 1), (17, 1, 1))
    assert str(error.value) == "k: a block must have at most 16 threads, but has 17"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
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
        ("fma.rz.f32 %r0, %r1, %r2, %r3;", "unknown instruction"),
        ("mul.hi.u32 %r0, %r1, %r2;", "unknown modifier .hi of mul"),
        ("ld.volatile.u32 %r0, [%w0];", "unknown modifier .volatile of ld"),
        ("st.u32 [%w0], %r0;", "st must be st.global"),
        ("cvt.f32.u32 %r0, %r1;", "unknown type .f32 of cvt"),
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
    assert error_of(body) == f"PTX line 9: {problem}: {body}"
