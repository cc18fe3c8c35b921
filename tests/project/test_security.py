"""The claims of SECURITY.md on sockets, files and pickles."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyparallel import DataContainer
from tests.support.repository.folders import ROOT

pytestmark = pytest.mark.one_backend

LISTEN = "0A"  # the state in the kernel's table of sockets
TABLES = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]


def addresses_of(port: int) -> list[str]:
    """Return the addresses on which this host listens at a port, as the kernel does."""
    found = []
    for table in TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, number = local.rsplit(":", 1)
            if state == LISTEN and int(number, 16) == port:
                found.append(address)
    return found


linux = pytest.mark.skipif(not TABLES[0].exists(), reason="only Linux has this table")


@linux
def test_the_recipe_keeps_the_store_on_its_host() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert addresses_of(names["port"]) == ["0100007F"]  # 127.0.0.1 and nothing else
    names["store"].set("key", "value")
    other = dist.TCPStore("127.0.0.1", names["port"], is_master=False)
    assert other.get("key") == b"value"


@linux
def test_without_it_the_store_is_open_to_the_network() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert addresses_of(store.port) != ["0100007F"]


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_checkpoints_are_for_their_owner_alone(
    tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import _checkpoint

    module: ModuleType = _checkpoint
    module.write({"weight": torch.ones(2)}, tmp_path / "last.pt")
    assert stat.S_IMODE((tmp_path / "last.pt").stat().st_mode) == 0o600
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o666


def test_containers_are_no_safe_globals(tmp_path: Path) -> None:
    torch.save(DataContainer(torch.ones(2)), tmp_path / "container.pt")
    with pytest.raises(Exception, match=r"pyparallel\.DataContainer"):
        torch.load(tmp_path / "container.pt", weights_only=True)
