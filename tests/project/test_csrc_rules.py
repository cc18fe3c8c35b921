"""The rules of csrc/README.md that a regular expression can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.repository.folders import ROOT

CSRC = ROOT / "csrc"
TORCH_HEADERS = Path(torch.__file__).parent / "include"
SOURCES = sorted(
    path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")
)
#: From the top down: folders, and the folders or headers that they may include besides
#: their own. Folders of one row do not include each other.
ROWS = (
    ("bindings", "memory ops pytree"),
    ("ops", "core memory transfer"),
    ("cpu cuda", "core ops/backend.h transfer/runtime.h"),
    ("transfer", "core"),
    ("core memory pytree", ""),
)
MAY_INCLUDE = {
    folder: (folder, *below.split()) for row, below in ROWS for folder in row.split()
}
#: Files that connect torch with a folder that otherwise does not know it.
GLUE = (
    "cpu/backend.cpp",
    "cuda/backend.cpp",
    "cuda/host_allocator.cpp",
    "cuda/runtime.cpp",
)
TORCH = r"(torch|ATen|c10|caffe2|pybind11)/"

pytestmark = pytest.mark.one_backend
each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: path.relative_to(CSRC).as_posix()
)
#: Functions of the CUDA runtime that call no device.
CALLS_NO_DEVICE = {"memory_size", "free", "current_streams", "observe_copies"}
CALLS_NO_DEVICE |= {"refused_batch", "scope"}


def without_comments(path):
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def includes(path, quotes):
    begin, end = quotes
    pattern = rf"^\s*#\s*include\s*{begin}([^>\"]+){end}"
    return re.findall(pattern, path.read_text(encoding="utf-8"), flags=re.M)


def folder_of(path):
    return path.relative_to(CSRC).parts[0]


@each_source
def test_a_folder_includes_only_folders_below_it(path):
    allowed = MAY_INCLUDE[folder_of(path)]
    for name in includes(path, '""'):
        assert {name, name.split("/")[0]} & {*allowed}, f"it may not include {name}"
        assert (CSRC / name).is_file()


@each_source
def test_only_glue_knows_torch(path):
    knows = [name for name in includes(path, "<>") if re.match(TORCH, name)]
    may = folder_of(path) in ("ops", "bindings") or path.as_posix().endswith(GLUE)
    hook = path.name == "parallel_for.cpp" and knows == ["ATen/Parallel.h"]
    assert may or hook or not knows, f"{path.name} includes {knows}"
    assert "torch/extension.h" not in knows
    assert "ATen/ATen.h" not in knows


@each_source
def test_words_stay_where_they_belong(path):
    text = without_comments(path)
    folder = folder_of(path)
    assert ("pybind11" in text) <= (folder == "bindings")
    assert ("Python.h" in text) <= (folder == "pytree")
    assert ("<<<" in text) <= (path.name == "launch.cuh")
    assert ("__CUDACC__" in text) <= (path.name == "host_device.h")
    knows_cuda = folder == "cuda" or path.name in ("host_device.h", "build_info.cpp")
    assert knows_cuda or "cuda" not in text.lower()
    assert "WITH_CUDA" not in text
    assert "PP_STD_THREADS" not in text or path.name == "parallel_for.cpp"


@each_source
def test_errors_are_checks_and_numbers_are_not_cut(path):
    text = without_comments(path)
    assert not re.search(r"\b(assert|abort|terminate|exit)\s*\(", text)
    c_cast = r"\((unsigned|int|long|size_t|u?int(8|16|32|64)_t)\)\s*[\w(]"
    assert not re.search(c_cast, text), "use static_cast or checked_narrow"
    assert "using namespace" not in text


def test_one_place_launches():
    launches = [path for path in SOURCES if "<<<" in without_comments(path)]
    assert [path.name for path in launches] == ["launch.cuh"]
    text = without_comments(*launches)
    assert text.count("<<<") == text.count("cudaGetLastError()") == 1


def test_no_instruction_is_used_without_asking():
    text = without_comments(CSRC / "cpu" / "nontemporal.h")
    chosen = re.findall(r"visit\((\w+)\{\}\)", text)
    asked = re.findall(r"if \((\w+)::supported\(\) && visit\(\1\{\}\)\)", text)
    assert chosen == asked and len(chosen) == 3
    text = without_comments(CSRC / "cpu" / "instruction_sets.h")
    chosen = re.findall(r"visit\((\w+)\{\}\)", text)
    asked = re.findall(r"if \((\w+)::supported\(\)\) visit\(\1\{\}\)", text)
    assert [name for name in chosen if name != "AnyCpu"] == asked and len(asked) == 2
    text = without_comments(CSRC / "cpu" / "cast.cpp")
    assert text.count("has_f16c())") == 1 and text.count("&cast_to_halves<") == 2
    for path in [ROOT / "setup.py", ROOT / "CMakeLists.txt"]:
        assert not re.search(r"-m(arch|avx|fma|cpu)", path.read_text(encoding="utf-8"))


def test_each_call_of_cuda_is_guarded():
    text = without_comments(CSRC / "cuda" / "runtime.cpp")
    calls = re.findall(
        r"\n  [\w:<>]+ (\w+)\(([^)]*)\)( noexcept)? override \{\n(.*?)\n  \}",
        text,
        flags=re.S,
    )
    assert len(calls) == text.count(" override {") == 21
    for name, args, _, body in calls:
        if name == "exchange_capture_mode":  # the guard would undo it
            assert body.index("CUDAGuard guard(") < body.index("cudaThreadExchange")
            continue
        if name in CALLS_NO_DEVICE:
            assert not re.search(r"\bcuda[A-Z]", body), name
            continue
        guard = re.match(r"    const CallGuard guard\((.*?)\);\n", body)
        assert guard, name
        if "Stream& stream" in args:
            assert guard[1] == "stream.device", name
        elif "Event& event" in args:
            assert guard[1] == "event.device", name
    guard = text[text.index("class CallGuard") :]
    for members in ("{}.emplace(", "> {};"):
        place = [guard.index(members.format(each)) for each in ("device_", "relaxed_")]
        assert place[0] < place[1]


def test_no_memory_is_write_combined():
    for path in SOURCES:
        assert "writecombined" not in without_comments(path).lower(), path


def test_the_extension_does_not_declare_that_it_needs_no_gil():
    """No free-threaded Python has run its tests: docs/threads.md."""
    for path in SOURCES:
        assert "gil_not_used" not in without_comments(path).lower(), path
    page = (ROOT / "docs" / "threads.md").read_text(encoding="utf-8")
    assert "does not declare `Py_MOD_GIL_NOT_USED`" in page


def virtual_functions(header: str, struct: str) -> set[str]:
    """Return the virtual functions of a struct of torch, without its destructor."""
    text = (TORCH_HEADERS / header).read_text(encoding="utf-8")
    body = re.search(rf"\nstruct \w+ {struct}\b[^;{{]*\{{(.*?)\n\}};", text, re.S)
    assert body is not None, f"{struct} is not in {header}"
    code = re.sub(r"//[^\n]*", "", body[1])
    return set(re.findall(r"\bvirtual [^(~]*?(\w+)\(", code))


def test_no_function_of_torchs_allocator_is_hidden():
    of_host = virtual_functions("ATen/core/CachingHostAllocator.h", "HostAllocator")
    of_all = virtual_functions("c10/core/Allocator.h", "Allocator")
    assert {"record_event", "empty_cache"} <= of_host
    assert {"allocate", "raw_deleter"} <= of_all
    if "setHostAllocator" not in exported_functions():
        pytest.skip("this torch exports no function to replace the allocator")
    text = without_comments(CSRC / "cuda" / "host_allocator.cpp")
    overridden = re.findall(r"(\w+)\([^{}]*?\)(?: const)? override \{", text)
    assert {*overridden} == of_host | of_all
    for name in overridden:
        assert f"inner_->{name}(" in text, name


def exported_functions() -> list[str]:
    header = TORCH_HEADERS / "ATen/core/CachingHostAllocator.h"
    text = header.read_text(encoding="utf-8")
    return re.findall(r"\nTORCH_API [\w:*& ]*?(\w+)\(", text)
