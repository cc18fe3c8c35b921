"""init_dist: the variables of each launcher, and machines without an accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from pyparallel.mmengine import init_dist, launchers

pytestmark = pytest.mark.one_backend

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = dict(zip(NAMES, ("1", "4", "1", "host", "123"), strict=True))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without a launcher, and restore the environment afterwards."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name in NAMES or name.startswith(("SLURM_", "OMPI_")):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the requested process groups, on a machine without accelerators."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        launchers.dist, "init_process_group", lambda **kwargs: made.append(kwargs)
    )
    accelerators(monkeypatch, None)
    return made


def accelerators(patch: pytest.MonkeyPatch, kind: str | None, num: int = 0) -> Any:
    """Make torch see accelerators; return the list of those that become current."""
    chosen: list[int] = []
    device = None if kind is None else torch.device(kind)
    api = torch.accelerator
    patch.setattr(api, "current_accelerator", lambda check_available: device)
    patch.setattr(api, "device_count", lambda: num)
    patch.setattr(api, "set_device_index", chosen.append)
    return chosen


def refused(*args: Any, **kwargs: Any) -> tuple[Any, str]:
    with pytest.raises(Exception) as caught:
        init_dist(*args, **kwargs)
    return caught.value, str(caught.value)


def test_options_reach_the_group(groups: Any) -> None:
    os.environ.update(TORCHRUN)
    init_dist("pytorch", timeout=timedelta(seconds=90))
    assert {name: os.environ[name] for name in NAMES} == TORCHRUN
    init_dist("pytorch", "gloo", timeout=90, group_name="g", port=5)
    duration = timedelta(seconds=90)
    assert groups == [
        {"backend": "gloo", "timeout": duration},
        {"backend": "gloo", "timeout": duration, "group_name": "g"},
    ]
    assert os.environ["MASTER_PORT"] == "5"


@pytest.mark.parametrize(
    ("options", "wants_address"),
    [
        ({"init_method": "tcp://host:123", "rank": 1, "world_size": 4}, False),
        ({"store": object(), "rank": 1, "world_size": 4}, False),
        ({"init_method": "env://", "timeout": None, "store": None}, True),
        ({"init_method": None}, True),
    ],
)
def test_an_address_is_needed_only_by_the_default_method(
    options: Any, wants_address: bool, groups: Any
) -> None:
    os.environ.update(dict(list(TORCHRUN.items())[:3]))
    if wants_address:
        assert refused("pytorch", **options)[1] == MISSING.format(
            ", ".join(NAMES), "MASTER_ADDR, MASTER_PORT"
        )
        os.environ.update(TORCHRUN)
    init_dist("pytorch", **options)
    assert groups == [{"backend": "gloo", **options}]


def test_a_backend_for_accelerators_is_replaced_without_one(
    groups: Any,
) -> None:
    os.environ.update(TORCHRUN)
    with pytest.warns(UserWarning) as caught:
        init_dist("pytorch", "nccl")
    assert [str(each.message) for each in caught] == [
        "[PP003] init_dist: backend nccl needs an accelerator, but torch "
        f"{torch.__version__} finds none. gloo is used instead, on the CPU. Pass "
        "backend='gloo' if that is intended."
    ]
    assert caught[0].filename == __file__
    assert groups == [{"backend": "gloo"}]
    init_dist("pytorch", "mpi")  # which does not need one
    assert groups[1:] == [{"backend": "mpi"}]


def test_the_accelerator_of_the_rank_becomes_current(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    mp = launchers.torch.multiprocessing
    monkeypatch.setattr(mp, "get_start_method", lambda allow_none: None)
    monkeypatch.setattr(mp, "set_start_method", started.append)
    chosen = accelerators(monkeypatch, "cuda", 2)
    os.environ.update(TORCHRUN)
    init_dist("pytorch")
    init_dist("pytorch", "gloo")
    assert groups == [{"backend": "nccl"}, {"backend": "gloo"}]
    assert chosen == [1, 1] and started == ["spawn", "spawn"]
    monkeypatch.setattr(mp, "get_start_method", lambda allow_none: "fork")
    accelerators(monkeypatch, "xpu", 2)
    init_dist("pytorch")
    assert groups[2:] == [{"backend": "xccl"}] and len(started) == 2
    accelerators(monkeypatch, "cuda", 1)
    error, text = refused("pytorch")
    assert type(error) is RuntimeError and text == (
        "init_dist: LOCAL_RANK must be the number of an accelerator of this machine, "
        "but is 1 and torch finds 1 accelerators. Start fewer processes on it."
    )


def test_no_launcher_does_nothing(groups: Any) -> None:
    before = dict(os.environ)
    init_dist("none", "nccl")
    assert groups == [] and dict(os.environ) == before


@pytest.mark.parametrize(
    ("launcher", "given", "options", "found"),
    [
        ("mpi", {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
                 "OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_ADDR": "first"},
         {}, ["3", "4", "1", "first", "29500"]),
        ("slurm", {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2",
                   "MASTER_ADDR": "given", "MASTER_PORT": "77"},
         {}, ["5", "8", "2", "given", "77"]),
        ("slurm", {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "MASTER_ADDR": "given"},
         {"port": 78}, ["5", "8", "0", "given", "78"]),
    ],
)  # fmt: skip
def test_variables_of_a_launcher_become_those_of_torch(
    launcher: str, given: Any, options: Any, found: list[str], groups: Any
) -> None:
    os.environ.update(given)
    init_dist(launcher, **options)
    assert [os.environ[name] for name in NAMES] == found
    assert groups == [{"backend": "gloo"}]


def test_slurm_uses_the_first_node(
    groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "scontrol"
    asked.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert sys.argv[1:] == ['show', 'hostnames', 'n[7-8]; x'], sys.argv\n"
        "print('n7'); print('n8')\n"
    )
    asked.chmod(0o755)
    os.environ.update(
        PATH=str(tmp_path),
        SLURM_PROCID="5",
        SLURM_NTASKS="8",
        SLURM_NODELIST="n[7-8]; x",
    )
    accelerators(monkeypatch, None)
    init_dist("slurm")
    assert [os.environ[name] for name in NAMES] == ["5", "8", "0", "n7", "29500"]
    asked.unlink()
    del os.environ["MASTER_ADDR"]
    error, text = refused("slurm")
    assert type(error) is RuntimeError
    assert text.startswith(
        "init_dist: scontrol show hostnames n[7-8]; x must name the first node, but "
        "failed: FileNotFoundError"
    )
    assert text.endswith("Set MASTER_ADDR.")


MISSING = (
    "init_dist: the launcher must have set {}, but {} is missing. Start the processes "
    "with that launcher, or set the variables."
)
SLURM = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_NODELIST"]
OMPI = [f"OMPI_COMM_WORLD_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK")]


@pytest.mark.parametrize(
    ("launcher", "given", "wanted", "missing"),
    [
        ("pytorch", NAMES[:2], NAMES, NAMES[2:]),
        ("mpi", (), OMPI, OMPI),
        ("mpi", OMPI, NAMES, ["MASTER_ADDR"]),
        ("slurm", SLURM[:1], SLURM[:2], SLURM[1:2]),
        ("slurm", SLURM[:2], SLURM[2:], SLURM[2:]),
    ],
)
def test_a_missing_variable_of_a_launcher_is_named(
    launcher: str, given: Any, wanted: Any, missing: Any, groups: Any
) -> None:
    os.environ.update(dict.fromkeys(given, "0"))
    error, text = refused(launcher)
    assert type(error) is RuntimeError
    assert text == MISSING.format(", ".join(wanted), ", ".join(missing))
    assert groups == []


def test_an_unknown_launcher_is_refused(groups: Any) -> None:
    for call, kind, text in (
        (("lsf",), ValueError,
         "launcher must be one of pytorch, slurm, mpi, none, but is 'lsf'."),
        (("pytorch", None, "deepspeed"), ValueError,
         "init_backend must be 'torch', but is 'deepspeed'. Call the initialization of "
         "that library instead."),
    ):  # fmt: skip
        error, found = refused(*call)
        assert isinstance(error, kind) and found == f"init_dist: {text}"
    error, found = refused("pytorch", timeout="1h")
    assert isinstance(error, TypeError) and found == (
        "init_dist: timeout must be a number of seconds or a timedelta, but is '1h' "
        "(str)."
    )
