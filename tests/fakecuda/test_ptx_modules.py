"""Memory, threads and errors of the PTX interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_snippets import HEADER, PtxError, needs_compiler, run

pytestmark = needs_compiler
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


def test_loads_extend_to_wider_registers() -> None:
    for dtype in (np.int8, np.int16, np.int32):
        memory, bits = aligned(64), 8 * np.dtype(dtype).itemsize
        memory[:8] = np.array([-5], dtype).repeat(64 // bits).view(np.uint8)
        execute(
            f"""ld.global.s{bits} %w1, [%w0]; st.global.b64 [%w0+16], %w1;
            ld.global.u{bits} %w1, [%w0]; st.global.b64 [%w0+24], %w1;""",
            memory,
        )
        assert memory[16:32].view(np.int64).tolist() == [-5, 2**bits - 5]


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


def test_parameters_are_read_by_offset_and_by_generic_address() -> None:
    text = (
        HEADER
        + """.entry k(.param .u64 to, .param .u8 c,
        .param .u32 a, .param .align 16 .b8 b[16])
    { .reg .b64 %w<9>; .reg .b32 %r<9>; ld.param.u64 %w0, [to];
    cvta.to.global.u64 %w0, %w0; mov.b64 %w1, b; cvta.param.u64 %w2, %w1;
    ld.param.u32 %r0, [a]; ld.param.v2.u64 {%w3, %w4}, [%w1]; ld.u64 %w5, [%w2+8];
    ld.param.u8 %r1, [c]; st.global.v2.u32 [%w0], {%r0, %r1};
    st.global.u64 [%w0+8], %w3; st.global.v2.u64 [%w0+16], {%w4, %w5}; }
    """
    )
    memory = aligned(64)
    pair = np.array([(7, 8)], "u8,u8")[0]
    run(text, "k", [memory, np.uint8(6), np.uint32(5), pair])
    assert memory[:8].view(np.uint32).tolist() == [5, 6]
    assert memory[8:32].view(np.uint64).tolist() == [7, 8, 8]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("ld.param.u64 %w1, [to+8];", "8 bytes at 0x8"),
        ("ld.param.u64 %w1, [to+-8];", "8 bytes at 0xfffffffffffffff8"),
        ("ld.param.v2.u64 {%w1, %w2}, [to];", "16 bytes at 0x0"),
    ],
)
def test_reads_outside_of_the_parameters_are_errors(body: str, place: str) -> None:
    problem = f"{place} are outside of the 8 bytes of parameter memory"
    assert error_of(body) == f"{PREFIX}{problem}: {body}"


STORE = """mov.u32 %r2, %tid.x; mul.wide.u32 %w1, %r2, 4; add.u64 %w0, %w0, %w1;
st.global.u32 [%w0], %r0;"""


def test_a_loop_counts_its_instructions() -> None:
    body = """mov.u32 %r0, 0; mov.u32 %r1, 0; mov.u32 %r2, %tid.x;
    $again: add.u32 %r0, %r0, %r1; add.u32 %r1, %r1, 1; setp.le.u32 %p0, %r1, %r2;
    @%p0 bra $again;
    """
    result = np.zeros(8, np.uint32)
    executed = execute(body + STORE, result, 8)
    assert result.tolist() == [n * (n + 1) // 2 for n in range(8)]
    assert executed == sum(1 + 3 + 4 * (n + 1) + 4 + 1 for n in range(8))


def test_guards_comments_and_braces() -> None:
    body = """mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 1; setp.eq.u32 %p0, %r1, 0;
    mov.u32 %r0, 9; // a comment; ret;
    .pragma "nounroll"; { @%p0 mov.u32 %r0, 1; @!%p0 add.u32 %r0, %r0, 1; }
    @%p0 bra.uni $end; add.u32 %r0, %r0, 100; $end:
    """
    result = np.zeros(4, np.uint32)
    execute(body + STORE + "ret; st.global.u32 [%w0], 0;", result, 4)
    assert result.tolist() == [1, 110, 1, 110]


def test_threads_know_their_place() -> None:
    grid, block = (2, 3, 2), (5, 2, 4)
    places = [(f"%nctaid.{axis}", f"%ctaid.{axis}") for axis in "zyx"]
    places += [(block["xyz".index(axis)], f"%tid.{axis}") for axis in "zyx"]
    body = "mov.u32 %r0, 0; mov.u32 %r2, 0;\n"
    for size, place in places:  # %r0: four bits each; %r2: the number of the thread
        body += f"""mov.u32 %r1, {size}; mul.lo.u32 %r2, %r2, %r1;
        mov.u32 %r1, {place}; add.u32 %r2, %r2, %r1;
        shl.b32 %r0, %r0, 4; or.b32 %r0, %r0, %r1;
        """
    body += "mul.wide.u32 %w1, %r2, 4; add.u64 %w0, %w0, %w1;"
    body += "st.global.u32 [%w0], %r0;"
    found = np.zeros(12 * 40, np.uint32)
    run(ENTRY.replace("BODY", body), "k", [found], grid, block)
    sizes = [*grid[::-1], *block[::-1]]
    expected = [int("".join(map(str, each)), 16) for each in np.ndindex(*sizes)]
    assert found.tolist() == expected


def test_a_block_has_a_limit_of_threads() -> None:
    text = HEADER + ".entry k() .maxntid 8, 2, 1 .minnctapersm 1 { ret; }"
    assert run(text, "k", [], (1, 1, 1), (16, 1, 1)) == 16
    with pytest.raises(PtxError) as error:
        run(text, "k", [], (1, 1, 1), (17, 1, 1))
    assert str(error.value) == "k: a block must have at most 16 threads, but has 17"


def test_unknown_instructions_are_parse_errors() -> None:
    for body in (
        "foo.b32 %r0, %r1;",
        "fma.rz.f32 %r0, %r1, %r2, %r3;",
        "bar.sync 0;",
        "atom.global.add.u32 %r0, [%w0], 1;",
    ):
        assert error_of(body) == f"PTX line 9: unknown instruction: {body}"


def test_wrong_instructions_are_parse_errors() -> None:
    bodies = {
        "div.full.f32 %r0, %r1, %r2;": "unknown modifier .full of div",
        "mul.hi.u32 %r0, %r1, %r2;": "unknown modifier .hi of mul",
        "add.rn.ftz.f32 %r0, %r1, %r2;": "unknown modifier .rn of add",
        "ld.volatile.u32 %r0, [%w0];": "unknown modifier .volatile of ld",
        "st.u32 [%w0], %r0;": "st must be st.global",
        "setp.lo.u32 %p0, %r0, %r1;": "unknown comparison of setp",
        "setp.lt.and.s32 %p0, %r0, %r1, %p1;": "unknown modifier .and of setp",
        "cvt.f32.u32 %r0, %r1;": "unknown type .f32 of cvt",
        "cvt.sat.u16.u32 %h0, %r0;": "unknown modifier .sat of cvt",
        "add.f64 %w0, %w1, %w2;": "unknown modifier .f64 of add",
        "add.u8 %r0, %r1, %r2;": "unknown type .u8 of add",
        "add %r0, %r1, %r2;": "add has no type",
        "add.u32 %r0, %r1;": "add must have 3 operands here, but has 2",
        "add.u64 %w0, %w1, %r1;": "%r1 must have 8 bytes, but has 4",
        "ld.global.v2.u32 {%r0}, [%w0];": ".v2 must have 2 items, but has 1",
        "ld.global.u32 %r0, %w0;": "expected an address in brackets",
        "add.u32 %r0, %r1, [%w0];": ("an operand of add must be a register or a value"),
        "mov.u32 %r0, %clock;": "%clock is no known name and no value of .u32",
        "mov.f32 %r0, 0f3F800000;": "0f3F800000 is no known name and no value of .f32",
        "mov.u64 %w0, 99999999999999999999;": (
            "99999999999999999999 is no known name and no value of .u64"
        ),
        "mov.u32 %tid.x, %r0;": "the destination of mov must be a register",
        "mov.u64 to, %w0;": "the destination of mov must be a register",
    }
    for body, problem in bodies.items():
        assert error_of(body) == f"PTX line 9: {problem}: {body}"


def test_other_wrong_text_is_a_parse_error() -> None:
    bodies = {
        "@%r0 ret;": "the guard must be a predicate: %r0",
        "bra $nowhere;": "unknown label: $nowhere",
        "$a: $a:": "the label is not unique: $a",
        ".reg .b32 %r<2>;": "the name is not unique: %r0",
        ".reg .b128 %x<1>;": "unknown type: .b128",
        ".shared .b8 pool[4];": "unknown directive: .shared",
        "ret [%w0 }": "expected ], but found }",
    }
    for body, problem in bodies.items():
        assert error_of(body) == f"PTX line 9: {problem}"
    modules = {
        ".func f() { ret; }": "unknown directive: .func",
        ".global .u32 state;": "unknown directive: .global",
        ".address_size 32": "addresses must have 64 bits",
        ".entry k(.reg .u32 x) {}": "expected .param, but found .reg",
        ".entry k(.param .b8 x[n]) {}": "expected an integer: n",
        ".entry k() .cluster 2 { ret; }": "unknown directive: .cluster",
        ".entry k() { ret;": "expected a word",
    }
    for text, problem in modules.items():
        with pytest.raises(PtxError) as error:
            run(HEADER + text, "k", [])
        assert str(error.value) == f"PTX line 5: {problem}"
