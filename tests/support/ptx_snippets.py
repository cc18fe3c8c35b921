"""Instructions of PTX in the interpreter of ``tests/fakecuda``, on numpy arrays."""

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

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ACCESS = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
)

HEADER = """
.version 8.0
.target sm_90
.address_size 64
"""
# Registers of the operands of an instruction.
KERNEL = """
.entry snippet({parameters})
{{
    .reg .b64 %address<{count}>;
    .reg .b64 %at<1>;
    .reg .b32 %index<1>;
    .reg .b32 %x<2>;
    .reg .b64 %w<1>;
    .reg .pred %p<4>;
    {registers}
    mov.u32 %index0, %ctaid.x;
    shl.b32 %index0, %index0, 6;
    mov.u32 %x0, %tid.x;
    add.u32 %index0, %index0, %x0;
    ld.param.u64 %at0, [size];
    cvt.u64.u32 %w0, %index0;
    setp.ge.u64 %p0, %w0, %at0;
    @%p0 ret;
    {loads}
    {body}
    {store}
}}
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


def _bits(dtype: np.dtype) -> int:
    return max(8 * dtype.itemsize, 16)


def evaluate(body: str, *inputs: np.ndarray, out: type | str) -> np.ndarray:
    """Return the destination of ``body`` for each item of the inputs.

    ``body`` computes %d0 from %a0, %b0, %c0 and %e0. It can use the registers %x0 and
    %x1 of 32 bits, %w0 of 64, and the predicates %p0 to %p3.
    """
    inputs = tuple(np.ascontiguousarray(each) for each in inputs)
    result = np.full(len(inputs[0]), 0x5A, np.uint8).astype(out)
    arrays = dict(zip("abce"[: len(inputs)], inputs, strict=True)) | {"d": result}
    registers, loads = "", ""
    for number, (name, array) in enumerate(arrays.items()):
        registers += f".reg .b{_bits(array.dtype)} %{name}<1>;\n"
        loads += f"ld.param.u64 %at0, [{name}];\n"
        loads += f"mul.wide.u32 %w0, %index0, {array.itemsize};\n"
        loads += f"add.u64 %address{number}, %at0, %w0;\n"
        if name != "d":
            loads += f"ld.global.u{8 * array.itemsize} %{name}0, [%address{number}];\n"
    kernel = KERNEL.format(
        parameters=", ".join(f".param .u64 {name}" for name in [*arrays, "size"]),
        count=len(arrays),
        registers=registers,
        loads=loads,
        body=body,
        store=f"st.global.u{8 * result.itemsize} [%address{len(arrays) - 1}], %d0;",
    )
    blocks = (len(result) + 63) // 64
    arguments = [*arrays.values(), np.uint64(len(result))]
    run(HEADER + kernel, "snippet", arguments, (blocks, 1, 1), (64, 1, 1))
    return result


def integers(dtype: type, count: int, *, seed: int = 0) -> np.ndarray:
    """Return random integers of every magnitude, among them the extreme ones."""
    random = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    bits = random.integers(0, 2**64, count, np.uint64)
    bits >>= random.integers(0, 64, count, np.uint64)
    values = np.where(random.integers(0, 2, count) == 0, bits, ~bits).astype(dtype)
    edges = np.array([0, 1, 2, info.max, info.max - 1, info.min, info.min + 1], dtype)
    return random.permutation(np.concatenate([values[len(edges) :], edges]))
