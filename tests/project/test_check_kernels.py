"""scripts/check_kernels.py: its counts of machine code, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.repository import from_scripts

pytestmark = pytest.mark.one_backend

EDGE = "PadCopy<CachedWriter> x 3952"
IMAGE = "ImageLanes<unsigned char, {}, true, {}> x 246"
EACH = "must need at most 11 instructions for a value, but the number is 12"


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    yield from_scripts.load("check_kernels")


def sass(lines: str) -> str:
    """Return lines as the output of cuobjdump, at their indices times sixteen."""
    code = [
        f" /*{16 * i:04x}*/ {each.strip()} ;" for i, each in enumerate(lines.split(";"))
    ]
    return "\n".join(["\t\tFunction : kernel", *code])


OUTER = """
MUFU.RCP R1, R2; LDG.E R1, [R2]; LDG.E R3, [R4]; @P0 STG.E [R2], R1; STG.E [R4], R3;
@P1 BRA 0x10; LDG.E.128 R4, [R8]; FADD R1, R2, R3; STG.E.128 [R8], R4; IADD R1, R1, 1;
STG.E.128 [R8+0x10], R4; @!P0 BRA 0x60; @P2 BRA 0x0; EXIT
"""


def test_the_loops_of_a_kernel_are_counted(kernels: ModuleType) -> None:
    found = kernels.parse_sass(sass(OUTER))["kernel"]
    assert found.divisions == 1
    assert found.edge_loads == 2
    assert found.per_store == 6 / 2  # the loop around both is not counted
    early = OUTER.replace("LDG.E R3, [R4]; @P0 STG.E", "@P0 STG.E", 1)
    early = early.replace("STG.E [R4], R3", "LDG.E R3, [R4]; STG.E [R4], R3")
    assert kernels.parse_sass(sass(early))["kernel"].edge_loads == 1


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (EDGE, {}, ""),
        (
            EDGE,
            {"edge_loads": 1},
            "must load 2 items before an edge, but the number is 1",
        ),
        (
            "InlinePack<168l>",
            {"wide_stores": 4, "divisions": 0},
            "must store sixteen bytes at a time in 5",
        ),
        (IMAGE.format("float", "planes"), {"per_store": 48}, EACH),
        (IMAGE.format("Half", "planes"), {"divisions": 6}, "must divide in at most 5"),
        (
            "ShortRows<CachedWriter> x 3936",
            {"divisions": 0, "size": 541},
            "must have at most 540 instructions, but the number is 541",
        ),
    ],
)
def test_each_limit_is_a_fault_where_it_is_exceeded(
    kernels: ModuleType, name: str, change: dict[str, int], problem: str
) -> None:
    least = kernels.Accesses(8, 7, 0, 4, 28, edge_loads=2, divisions=5, per_store=30)
    usage = kernels.Usage(registers=40)
    found = kernels.faults(name, usage, least._replace(**change), kernels.RULES)
    assert [each for each in found if not problem or problem not in each] == []
    assert len(found) == (problem != "")
