"""Code found in repositories that use ``mmcv.parallel``, run against install().

Lines are unchanged; ``torch.cuda`` is absent on the host, where
such scripts run unchanged or end in an error that names the missing part.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pyparallel.mmcv

pytestmark = pytest.mark.filterwarnings("ignore:On January 1, 2023, MMCV")


@pytest.fixture(autouse=True)
def mmcv():
    with pyparallel.mmcv.installed():
        import mmcv.parallel

        yield mmcv


def sample(i: int) -> dict:
    from mmcv.parallel import DataContainer as DC

    return {
        "img": DC(torch.full((3, 4 + i, 5), float(i)), stack=True),
        "img_metas": DC({"filename": f"{i}.jpg"}, cpu_only=True),
    }


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, img=None, img_metas=None, return_loss=True, **kwargs):
        seen = {"img": img, "img_metas": img_metas, "return_loss": return_loss}
        return {**seen, **kwargs}

    def train_step(self, data, optimizer, **kwargs):
        loss = self.fc(data["img"].mean().view(1)).sum()
        seen = {"optimizer": optimizer, "data": data, **kwargs}
        num = len(data["img_metas"])
        return {"loss": loss, "log_vars": {}, "num_samples": num, "seen": seen}

    def show_result(self, img, result):
        return img, result


def test_wrap_on_the_first_device():  # 2, 4, 9, 11, 12
    from mmcv.parallel import MMDataParallel, MMDistributedDataParallel, collate

    model = MMDataParallel(Detector(), device_ids=range(0, 1))
    data = collate([sample(0), sample(1)], samples_per_gpu=2)
    result = model(return_loss=False, rescale=True, **data)
    assert (result["return_loss"], result["rescale"]) == (False, True)
    assert result["img"].shape == (2, 3, 5, 5)
    assert result["img_metas"][1] == {"filename": "1.jpg"}
    assert model.module.show_result(1, 2) == (1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model.train_step(data, optimizer, extra=3)
    out["loss"].backward()
    assert out["seen"]["optimizer"] is optimizer and out["seen"]["extra"] == 3
    assert issubclass(MMDistributedDataParallel, nn.parallel.DistributedDataParallel)


def test_a_subclass_repairs_the_forward_of_ddp():  # S1
    from mmcv.parallel.distributed import MMDistributedDataParallel

    class MMDistributedDataParallelFix(MMDistributedDataParallel):
        def _run_ddp_forward(self, *inputs, **kwargs):
            inputs, kwargs = self.to_kwargs(inputs, kwargs, -1)
            return self.module(*inputs[0], **kwargs[0])

    fixed = object.__new__(MMDistributedDataParallelFix)
    nn.Module.__init__(fixed)
    fixed.module, fixed.dim, fixed.mixed_precision = Detector(), 0, None
    assert fixed._run_ddp_forward(img=torch.ones(2))["img"].tolist() == [1, 1]


def test_a_subclass_skips_the_constructor():  # S4
    from mmcv.parallel import MMDataParallel, collate

    class _SingleGPUWrapper(MMDataParallel):
        def __init__(self, module):
            super(nn.DataParallel, self).__init__()
            self.module = module
            self.device_ids = []
            self.dim = 0
            self.src_device_obj = torch.device("cpu")
            self.output_device = -1

    model = _SingleGPUWrapper(Detector())
    assert model.train_step(collate([sample(0)]), None)["num_samples"] == 1
    assert model(**collate([sample(0)]))["img"].shape == (1, 3, 4, 5)
