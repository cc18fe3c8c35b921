"""Examples that need other packages: mmcv 1.x, accelerate, Lightning."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from repository import ROOT
from torchrun import python

pytestmark = [pytest.mark.also_peers, pytest.mark.one_backend]

FOLDER = ROOT / "examples"


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_the_same_model_is_trained_by_others(trainer: str) -> None:
    pytest.importorskip(trainer)
    script = FOLDER / "lightning_accelerate.py"
    done = python(script, trainer, "--every", "4", "--batch", "64")
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    (share,) = re.findall(rf"^{trainer}: (0\.\d+) of held-out names$", last)
    assert float(share) > 0.8  # the most frequent kind has 0.49


def test_mmcv_1_trains_with_its_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="the example needs scikit-learn")
    if importlib.util.find_spec("mmcv") is None:
        pytest.skip("mmcv is not installed")
    if importlib.util.find_spec("torchvision") is None:
        # mmcv.runner imports it for the names of its pretrained models only.
        (tmp_path / "torchvision.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = python(FOLDER / "mmcv1_install.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (off,) = re.findall(r"^trained by mmcv.runner: (\d\.\d\d) digits off", done.stdout)
    assert float(off) < 1
