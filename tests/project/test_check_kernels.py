"""scripts/check_kernels.py: parsing of recorded output, and messages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

SCRIPT = ROOT / "scripts" / "check_kernels.py"
pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.skipif(not SCRIPT.exists(), reason="there is no script here"),
]

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onePf' for 'sm_80'
ptxas info    : Function properties for _Z3onePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 62 registers, used 0 barriers, 22912 bytes cmem[0]
ptxas info    : Compile time = 105.640 ms
ptxas info    : Compiling entry function '_Z3twoPf' for 'sm_80'
ptxas info    : Function properties for _Z3twoPf
    16 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads
ptxas info    : Function properties for __internal_fdividef
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 16 bytes cumulative stack size
"""
CUOBJDUMP = """\
\t\tFunction : _Z3onePf
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_PTX_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ; /* 0x0 */
        /*0020*/                   LDG.E.CONSTANT R8, desc[UR4][R2.64+0x10] ; /* 0x0 */
        /*0030*/              @UP0 STG.E.128 desc[UR4][R2.64], R4 ; /* 0x0 */
        /*0040*/               @P1 STG.E.64 desc[UR4][R2.64], R4 ;  /* 0x0 */
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R4 ; /* 0x0 */
\t\t..........
\t\tFunction : _Z3twoPf
        /*0000*/              @!P2 STL.128 [R1], R4 ;  /* 0x0 */
        /*0010*/                   LDL R4, [R1] ;      /* 0x0 */
        /*0020*/                   EXIT ;              /* 0x0 */
"""
NVDISASM = """\
\t.section\t.text._Z3onePf,"ax",@progbits
.text._Z3onePf:
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   STG.E.128 [R2.64], R4 ;
.L_x_0:
        /*0030*/                   EXIT ;
"""
KERNEL = (
    "void pyparallel::cuda::run_body<4, pyparallel::cuda::(anonymous namespace)::"
    "Inline<{}, {}> >(pyparallel::cuda::(anonymous namespace)::Inline<{}, {}>, long)"
)
IMAGE = (
    "pyparallel::ImageLanes<unsigned char, pyparallel::BFloat16, true, "
    "(pyparallel::RowLayout)1, pyparallel::cuda::(anonymous namespace)::DeviceMath>"
)
BOXES = "pyparallel::PadCopy<pyparallel::CachedWriter>"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernels", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_usage_includes_the_functions_that_a_kernel_calls(
    script: ModuleType,
) -> None:
    assert script.parse_usage(LOG) == {
        "_Z3onePf": script.Usage(62, 0, 0),
        "_Z3twoPf": script.Usage(8, 24, 76),
    }
    assert script.parse_usage("ptxas info    : Used 3 registers") == {}


def test_accesses_are_counted_by_kernel(script: ModuleType) -> None:
    assert script.parse_sass(CUOBJDUMP) == {
        "_Z3onePf": script.Accesses(wide_loads=1, wide_stores=2, local=0, ahead=1),
        "_Z3twoPf": script.Accesses(wide_loads=0, wide_stores=0, local=2),
    }
    assert script.parse_sass(NVDISASM) == {"_Z3onePf": script.Accesses(1, 1, 0, 1)}


LOAD, STORE = "LDG.E.128 R4, [R2.64]", "STG.E.128 [R2.64], R4"


def kernel(*code: str) -> str:
    """Machine code of one kernel, each instruction at a multiple of sixteen."""
    lines = [
        f"        /*{16 * n:04x}*/   {line} ;   /* 0x0 */"
        for n, line in enumerate(code)
    ]
    return "\n".join(["\t\tFunction : one", *lines])


@pytest.mark.parametrize(
    ("code", "ahead"),
    [
        ([LOAD, LOAD, LOAD, LOAD, STORE, STORE, STORE, STORE], 4),
        ([LOAD, f"@!P0 {LOAD}", "IADD3 R2, R2, 0x10, RZ", LOAD, STORE, LOAD], 3),
        ([LOAD, STORE, LOAD, STORE, LOAD, STORE, LOAD, STORE], 1),
        ([LOAD, "STG.E.U8 [R2.64], R4", LOAD, LOAD], 2),
        (["LDG.E R4, [R2.64]", "LDG.E.64 R4, [R2.64]", LOAD, STORE], 1),
        # Two loads on each of two branches; a thread takes one branch.
        (["@P0 BRA 0x40", LOAD, LOAD, "BRA 0x60", LOAD, LOAD, STORE], 2),
        # The second of three loads is where a loop begins.
        ([LOAD, LOAD, LOAD, "@!P1 BRA P2, 0x0010"], 2),
        ([LOAD, "CALL.REL.NOINC 0x3030", LOAD, LOAD, "EXIT"], 2),
    ],
)
def test_loads_ahead_follow_one_another_in_straight_code(
    script: ModuleType, code: list[str], ahead: int
) -> None:
    assert script.parse_sass(kernel(*code))["one"].ahead == ahead


def test_labels_end_loads_ahead_where_branches_aim_at_them(script: ModuleType) -> None:
    lines = kernel(LOAD, LOAD, LOAD, "@P0 BRA `(.L_x_7)").splitlines()
    for label, ahead in ((".L_x_7:", 2), (".L_x_8:", 3)):
        text = "\n".join([*lines[:2], label, *lines[2:]])
        assert script.parse_sass(text)["one"].ahead == ahead


def test_shifts_of_two_registers_are_funnel_shifts(script: ModuleType) -> None:
    text = kernel(
        "SHF.R.U64 R8, R8, R40.reuse, R9",
        "@!P0 SHF.R.W.U32 R5, R0, UR6, R5",
        "SHF.R.S32.HI R5, RZ, 0x1f, R4",
        "SHF.L.U32 R5, R4, 0x4, RZ",
        "SHF.R.U32.HI R2, RZ, 0x5, R2",
    )
    assert script.parse_sass(text)["one"].shifts == 2


def test_registers_limit_the_blocks_of_a_multiprocessor(script: ModuleType) -> None:
    blocks = [script.Usage(num).blocks for num in (0, 32, 54, 64, 65, 128, 255)]
    assert blocks == [32, 8, 4, 4, 3, 2, 1]


def test_names_are_short(script: ModuleType) -> None:
    image = KERNEL.format(IMAGE, 246, IMAGE, 246)
    boxes = KERNEL.format(BOXES, "3984l", BOXES, "3984l")
    assert script.shorten(image) == (
        "ImageLanes<unsigned char, BFloat16, true, planes of pixels> x 246"
    )
    assert script.shorten(boxes) == "PadCopy<CachedWriter> x 3984"
    plain = (
        "void pyparallel::cuda::run_body<1, pyparallel::Pack>(pyparallel::Pack, long)"
    )
    assert script.shorten(plain) == "Pack"
    assert script.shorten("other(int)") == "other(int)"


def test_broken_rules_are_reported(script: ModuleType) -> None:
    name = "PadCopy<CachedWriter> x 3984"
    good = script.Usage(54, 0, 0), script.Accesses(8, 6, 0, 4, 22)
    assert script.faults(name, *good, script.RULES) == []
    usage, accesses = script.Usage(72, 0, 0), script.Accesses(4, 2, 0, 1, 6)
    assert script.faults(name, usage, accesses, script.RULES) == [
        "must load sixteen bytes at a time in 8 places, but the number is 4",
        "must store sixteen bytes at a time in 6 places, but the number is 2",
        "must read 4 words before it stores one, but the number is 1",
        "must have 16 funnel shifts, but the number is 6",
        "must leave registers for 4 blocks, but the number is 3",
    ]
    local = script.Usage(48, 16, 72), script.Accesses(0, 0, 5)
    assert script.faults("Other", *local, script.RULES) == [
        "must use no local memory, but has a stack of 16 bytes, 72 bytes of spills and "
        "5 accesses to it"
    ]


def test_every_rule_says_why_it_wants_less(script: ModuleType) -> None:
    for rule in script.RULES:
        assert bool(rule.reason) == (not rule.loads and rule.stores > 0)


def test_tools_are_looked_for_beside_the_compiler_and_in_triton(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    assert list(script.places("no-such-tool", sys.executable)) == [
        "/toolkit/bin/no-such-tool",
        "/usr/local/cuda/bin/no-such-tool",
        str(package / "backends/nvidia/bin/no-such-tool"),
    ]
    assert script.find("no-such-tool", sys.executable) is None


def test_a_tool_that_fails_stops_it_with_its_output(script: ModuleType) -> None:
    with pytest.raises(SystemExit) as caught:
        script.run([sys.executable, "-c", "print(1); raise SystemExit('two')"])
    assert str(caught.value).endswith("failed:\n1\ntwo\n")
