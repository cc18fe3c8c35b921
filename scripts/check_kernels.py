"""Compile the kernels; fail on spills, narrow accesses, or a wait for each load.

    python scripts/check_kernels.py [--nvcc NVCC] [--archs 80 90] [--python PYTHON]

The script needs nvcc, c++filt, and cuobjdump or nvdisasm: from PATH, from CUDA_HOME, or
from PYTHON's triton. It needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", "-Werror=all-warnings"]


class Rule(NamedTuple):
    """The minimum counts of kernels with such a name; accesses have 16 bytes."""

    pattern: str
    loads: int
    stores: int
    reason: str = ""  # for narrower loads
    ahead: int = 0  # loads that follow one another before any store or branch
    shifts: int = 0  # funnel shifts
    blocks: int = 1  # per multiprocessor, by their registers
    edge_loads: int = 0  # narrow loads of a loop before its first store
    # The maximum counts of such kernels.
    divisions: int = 99
    per_value: float = 99.0  # instructions of the loops over whole groups of values
    size: int = 9999  # instructions


_WORDS = "a store takes 4 or 8 bytes of an image, and lanes read adjacent words"
_ITEMS = "an item of a row has four bytes, and lanes read adjacent words"
# One of the stores of images writes the mask, and one writes padding only.
# Divisions in 64 bits take places of huge batches: one or two of each of four Divisors.
RULES = [
    Rule(
        "PadCopy<CachedWriter>",
        *(8, 6),
        ahead=4,
        shifts=16,
        blocks=4,
        edge_loads=2,
        divisions=5,
    ),
    Rule(
        "PadCopy<MaskWriter>",
        *(0, 3, "a mask is made of sizes alone"),
        blocks=4,
        divisions=5,
    ),
    # A word of four items takes about 220 instructions, if the lanes of a warp
    # take all branches. The rest finds the place of an item in the next plane.
    Rule("ShortRows<CachedWriter>", 0, 1, _ITEMS, blocks=6, divisions=0, size=540),
    Rule("ShortRows<MaskWriter>", 0, 1, _ITEMS, blocks=6, divisions=0, size=480),
    Rule("InlinePack<", loads=8, stores=5, ahead=4, shifts=16, divisions=0),
    Rule("ImageLanes<unsigned char, [^,]+, [^,]+, planes>", 0, 4, _WORDS),
    Rule(
        "ImageLanes<unsigned char, [^,]+, [^,]+, planes of pixels>",
        loads=0,
        stores=7,
        reason="three stores take 12 or 24 bytes, and lanes read adjacent words",
    ),
    Rule("ImageLanes<unsigned char, [^,]+, [^,]+, pixels>", 0, 5, _WORDS),
    Rule("ImageLanes<float, [^,]+, [^,]+, planes>", loads=2, stores=4),
    Rule("ImageLanes<float, [^,]+, [^,]+, pixels>", loads=2, stores=5),
    # Only values at edges of groups are divided.
    Rule(
        "ImageLanes<unsigned char, [^,]+, true, planes( of pixels)?>",
        *(0, 4, _WORDS),
        divisions=5,
        per_value=11,
    ),
    Rule("ImageLanes<unsigned char, [^,]+, true, pixels>", 0, 5, _WORDS, divisions=7),
]


_FRAME = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
# Its address precedes it in a comment, and often a predicate.
_INSTRUCTION = re.compile(r"/\*(\w+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"0x([0-9a-f]+)|(\.L_\w+)")
_BRANCHES = {"BRA", "BRX", "CALL", "EXIT", "JMP", "RET"}
_REGISTERS = 65536 // 256  # registers of a multiprocessor for each thread of a block


class Usage(NamedTuple):
    """The output of ptxas for a kernel, in registers and bytes."""

    registers: int = 0
    stack: int = 0
    spills: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks whose registers fit in one multiprocessor."""
        return _REGISTERS // max(-(-self.registers // 8) * 8, 8)  # in units of 8


class Accesses(NamedTuple):
    """Instructions of a kernel that access memory, and funnel shifts."""

    wide_loads: int = 0  # of 16 bytes
    wide_stores: int = 0
    local: int = 0
    ahead: int = 0
    shifts: int = 0
    edge_loads: int = 0
    divisions: int = 0
    per_store: float = 0.0  # instructions for a wide store, where it follows loads
    size: int = 0  # instructions


class Instruction(NamedTuple):
    """One line of machine code; `kind` is its name up to the first dot."""

    place: int | str  # its address, or a label without an instruction
    kind: str
    modifiers: list[str]
    operands: str


def parse_usage(log: str) -> dict[str, Usage]:
    """Parse the output of ``nvcc -Xptxas -v``, by the mangled names of kernels."""
    found: dict[str, Usage] = {}
    name = ""
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
            found[name] = Usage()
        elif name and (frame := _FRAME.search(line)):
            stack, stores, loads = map(int, frame.groups())
            before = found[name]  # possibly of a function that it calls
            spills = before.spills + stores + loads
            found[name] = Usage(0, before.stack + stack, spills)
        elif name and (used := re.search(r"Used (\d+) registers", line)):
            found[name] = found[name]._replace(registers=int(used[1]))
            name = ""
    return found


def parse_sass(text: str) -> dict[str, Accesses]:
    """Parse the output of ``cuobjdump -sass`` or ``nvdisasm``, by mangled names."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"\s*Function : (\w+)|\.text\.(\w+):", line):
            name = header[1] or header[2]
            found[name] = []
        elif name and (label := _LABEL.match(line)):
            found[name].append(Instruction(label[1], "", [], ""))
        elif name and (code := _INSTRUCTION.search(line)):
            kind, *modifiers = code[2].split(".")
            found[name].append(Instruction(int(code[1], 16), kind, modifiers, code[3]))
    return {name: count(code) for name, code in found.items()}


def count(code: list[Instruction]) -> Accesses:
    """Count the accesses of one kernel."""
    wide = [each.kind for each in code if "128" in each.modifiers]
    local = sum(each.kind in ("LDL", "STL") for each in code)
    shifts = sum(
        each.kind == "SHF" and "HI" not in each.modifiers and "RZ" not in each.operands
        for each in code
    )
    divisions = sum(each.kind == "MUFU" and "RCP" in each.modifiers for each in code)
    loops = list(map(Loop.of, innermost_loops(code)))
    edges = [each.early for each in loops if each.loads and not each.wide_stores]
    per_store = [each.per_store for each in loops if each.loads and each.wide_stores]
    return Accesses(
        *(wide.count("LDG"), wide.count("STG"), local, loads_ahead(code), shifts),
        edge_loads=min(edges, default=0),
        divisions=divisions,
        per_store=max(per_store, default=0.0),
        size=sum(each.kind not in ("", "NOP") for each in code),
    )


class Loop(NamedTuple):
    """The counts of one loop without another loop inside."""

    loads: int
    early: int  # loads before the first store
    wide_stores: int
    per_store: float

    @classmethod
    def of(cls, code: list[Instruction]) -> Loop:
        """Count the instructions of a loop."""
        kinds = [each.kind for each in code]
        first = kinds.index("STG") if "STG" in kinds else len(kinds)
        wide = sum(each.kind == "STG" and "128" in each.modifiers for each in code)
        early = kinds[:first].count("LDG")
        return cls(kinds.count("LDG"), early, wide, len(code) / max(wide, 1))


def innermost_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """Return the loops that contain no other loop; each ends with a branch back."""
    index = {each.place: i for i, each in enumerate(code)}
    spans = [
        (index[place], end)
        for end, each in enumerate(code)
        for place in targets_of(each)
        if index.get(place, end + 1) < end
    ]
    return [
        [each for each in code[begin : end + 1] if each.kind]
        for begin, end in spans
        if not any(begin <= b and e < end for b, e in spans)
    ]


def targets_of(instruction: Instruction) -> list[int | str]:
    """Return the places that a branch names."""
    if instruction.kind not in _BRANCHES:
        return []
    found = _TARGET.finditer(instruction.operands)
    return [int(each[1], 16) if each[1] else each[2] for each in found]


def loads_ahead(code: list[Instruction]) -> int:
    """Return the length of the longest sequence of wide loads.

    A store, a branch and the target of a branch end a sequence.
    """
    targets = {place for each in code for place in targets_of(each)}
    most = loads = 0
    for each in code:
        if each.kind in {"STG", *_BRANCHES} or each.place in targets:
            loads = 0
        if each.kind == "LDG" and "128" in each.modifiers:
            loads += 1
            most = max(most, loads)
    return most


def shorten(name: str) -> str:
    """Shorten a demangled kernel to its body and the capacity of its parameters."""
    kinds = ("planes", "planes of pixels", "pixels")
    for index, kind in enumerate(kinds):
        name = name.replace(f"(pyparallel::RowLayout){index}", kind)
    name = name.replace("(anonymous namespace)::", "")
    name = re.sub(r"pyparallel::(cuda::)?", "", name).replace(", DeviceMath", "")
    body = re.search(r"run_body<\d+, \d+, (?:Inline<(.+), (\d+)l?>|(.+?)) ?>\(", name)
    if body is None:
        return name
    return f"{body[1]} x {body[2]}" if body[1] else body[3]


def faults(name: str, usage: Usage, accesses: Accesses, rules: list[Rule]) -> list[str]:
    """Return the faults of a kernel, given its short name."""
    found = []
    if usage.stack or usage.spills or accesses.local:
        found.append(
            f"must use no local memory, but has a stack of {usage.stack} bytes, "
            f"{usage.spills} bytes of spills and {accesses.local} accesses to it"
        )
    for rule in rules:
        if not re.match(rule.pattern, name):
            continue
        for demand, least, num in (
            ("load sixteen bytes at a time in {} places", rule.loads, accesses[0]),
            ("store sixteen bytes at a time in {} places", rule.stores, accesses[1]),
            ("read {} words before it stores one", rule.ahead, accesses.ahead),
            ("have {} funnel shifts", rule.shifts, accesses.shifts),
            ("leave registers for {} blocks", rule.blocks, usage.blocks),
            ("load {} items before an edge", rule.edge_loads, accesses.edge_loads),
        ):
            if num < least:
                found.append(f"must {demand.format(least)}, but the number is {num}")
        for demand, most, count in (
            ("divide in at most {} places", rule.divisions, accesses.divisions),
            ("have at most {} instructions", rule.size, accesses.size),
            (
                "need at most {} instructions for a value",
                rule.per_value,
                accesses.per_store / values_of_store(name),
            ),
        ):
            if count > most:
                found.append(f"must {demand.format(most)}, but the number is {count:g}")
    return found


def values_of_store(name: str) -> int:
    """Return the number of values in sixteen bytes, given the name of a kernel."""
    return 4 if re.match(r"ImageLanes<[^,]+, float,", name) else 8


def places(tool: str, python: str) -> Iterator[str]:
    """List the possible paths of a tool, in search order."""
    yield from filter(None, [shutil.which(tool)])
    for home in filter(None, [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]):
        yield f"{home}/bin/{tool}"
    code = (
        "import importlib.util as u; s = u.find_spec('triton'); print(s and s.origin)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        yield str(Path(done.stdout.strip()).parent / f"backends/nvidia/bin/{tool}")


def find(tool: str, python: str) -> str | None:
    """Return the first path of a tool that runs."""
    return next((each for each in places(tool, python) if shutil.which(each)), None)


def disassemble(cubin: Path, python: str) -> str:
    """Return the machine code of a cubin as text."""
    for tool, option in (("cuobjdump", "-sass"), ("nvdisasm", "-c")):
        if path := find(tool, python):
            return run([path, option, str(cubin)]).stdout
    raise SystemExit(
        "check_kernels must find cuobjdump or nvdisasm, but neither is in PATH, in "
        f"CUDA_HOME, or in the triton of {python}. Install one, or set CUDA_HOME."
    )


def run(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; raise if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, input=given)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done


def demangle(names: list[str]) -> dict[str, str]:
    """Return the short form of mangled names."""
    lines = run(["c++filt"], "\n".join(names)).stdout.splitlines()
    return {name: shorten(line) for name, line in zip(names, lines, strict=True)}


#: The figures of a file's kernels for an architecture, by mangled names.
Kernels = tuple[dict[str, Usage], dict[str, Accesses]]


def compiled(source: Path, arch: str, nvcc: str, python: str) -> Kernels:
    """Compile a file and read its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        include = f"-I{ROOT / 'csrc'}"
        command = [nvcc, *FLAGS, f"-arch=sm_{arch}", include, "-o", str(cubin)]
        usages = parse_usage(run([*command, str(source)]).stderr)
        sass = parse_sass(disassemble(cubin, python))
    if not usages or set(usages) != set(sass):
        raise SystemExit(
            f"{source.name}: ptxas and the machine code name other kernels."
        )
    return usages, sass


def check(arch: str, kernels: Kernels, seen: set[str]) -> int:
    """Print the kernels of one file; return the number of their faults."""
    usages, sass = kernels
    num_faults = 0
    names = demangle(list(usages))
    for mangled, name in sorted(names.items(), key=lambda each: each[1]):
        usage, accesses = usages[mangled], sass[mangled]
        loads = f"{accesses.wide_loads:3} wide loads, {accesses.ahead} ahead,"
        stores = f"{accesses.wide_stores:3} stores, {accesses.shifts:3} shifts"
        print(f"  {usage.registers:3} registers {loads} {stores}", end=" ")
        print(
            f"{accesses.divisions:2} divisions, {accesses.per_store:4.1f} each  {name}"
        )
        seen.add(name)
        for fault in faults(name, usage, accesses, RULES):
            print(f"sm_{arch}: {name} {fault}.")
            num_faults += 1
    return num_faults


def main() -> int:
    """Check all kernels for all architectures; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc", default=find("nvcc", sys.executable) or "nvcc")
    parser.add_argument("--archs", nargs="+", default=["80", "90"])
    parser.add_argument("--python", default=sys.executable)
    chosen = parser.parse_args()
    num_faults = 0
    seen: set[str] = set()
    sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
    pairs = list(itertools.product(sources, chosen.archs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [pool.submit(compiled, *p, chosen.nvcc, chosen.python) for p in pairs]
        for (source, arch), kernels in zip(pairs, work, strict=True):
            print(f"{source.name}, sm_{arch}")
            num_faults += check(arch, kernels.result(), seen)
    for rule in RULES:
        if not any(re.match(rule.pattern, name) for name in seen):
            print(f"A kernel must match {rule.pattern!r}, but none does.")
            num_faults += 1
        elif rule.reason:
            print(f"{rule.pattern}: {rule.reason}.")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
