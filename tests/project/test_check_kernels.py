"""scripts/check_kernels.py: a kernel that breaks a rule is reported."""

from __future__ import annotations

from types import ModuleType

import from_scripts
import pytest

pytestmark = pytest.mark.one_backend

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onePf' for 'sm_80'
ptxas info    : Function properties for _Z3onePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 62 registers, used 0 barriers, 22912 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3twoPf' for 'sm_80'
ptxas info    : Function properties for _Z3twoPf
    16 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads
ptxas info    : Function properties for __internal_fdividef
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 16 bytes cumulative stack size
"""
CUOBJDUMP = """\
\t\tFunction : _Z3onePf
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
        /*0030*/                   SHF.R.U64 R8, R8, R40.reuse, R9 ;
"""


@pytest.fixture
def script() -> ModuleType:
    return from_scripts.load("check_kernels")


def test_output_of_the_tools_is_counted_by_kernel(script: ModuleType) -> None:
    # The usage of a kernel includes that of the functions that it calls.
    assert script.parse_usage(LOG) == {
        "_Z3onePf": script.Usage(62, 0, 0),
        "_Z3twoPf": script.Usage(8, 24, 76),
    }
    assert script.parse_sass(CUOBJDUMP) == {
        "_Z3onePf": script.Accesses(wide_loads=1, wide_stores=2, local=0, ahead=1),
        "_Z3twoPf": script.Accesses(wide_loads=0, wide_stores=0, local=2),
    }
    assert script.parse_sass(NVDISASM) == {"_Z3onePf": script.Accesses(1, 1, 0, 1, 1)}


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
