"""The distributed wrappers in one process; test_distributed.py runs them on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import MMDistributedDataParallel as Current
from pyparallel import is_module_wrapper
from pyparallel.mmcv.distributed_deprecated import MMDistributedDataParallel
from tests.support.ranks.distributed_model import METHODS, Recorder, caller, make_batch

pytestmark = pytest.mark.one_backend


def test_a_broadcast_holds_about_bucket_cap_mb_of_one_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda tensor, **_: sent.append(tensor.nbytes)
    )
    model = nn.Sequential(*(nn.Linear(1, 3, bias=False) for _ in range(5)))
    model.register_buffer("steps", torch.tensor(0))
    for cap, expected in ((25, [60, 8]), (24 / 2**20, [24, 24, 12, 8])):
        sent.clear()
        MMDistributedDataParallel(model, bucket_cap_mb=cap)
        assert sorted(sent) == sorted(expected)


class Alone(MMDistributedDataParallel):
    """The wrapper in one process, with all tensors on the host."""

    targets: Any = None

    def _sync_params(self) -> None:
        pass

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.targets = device_ids
        return super().scatter(inputs, kwargs, [-1])


@pytest.mark.parametrize("method", METHODS)
def test_the_model_gets_opened_containers(method: str) -> None:
    model = Recorder()
    model.output = {"loss": 1}
    wrapper = Alone(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = caller(wrapper, method)
    assert call(make_batch(0, 0, 2), optimizer, flag=True) is model.output
    (data, passed), kwargs = model.calls[0]
    assert data["img"].shape == (4, 3, 8, 8)
    assert data["metas"] == [(5, 6), (7, 8), (4, 6), (8, 8)]
    assert passed is optimizer and kwargs == {"flag": True}
    call()
    assert model.calls[1] == ((), {})
    assert is_module_wrapper(wrapper)
    assert (wrapper.dim, wrapper.broadcast_buffers) == (0, True)
    assert list(wrapper.state_dict()) == ["module.layer.weight", "module.layer.bias"]


def test_arguments_are_copied_to_the_device_of_the_model() -> None:
    for model, target in (
        (nn.Linear(2, 2), -1),
        (nn.Linear(2, 2, device="meta"), torch.device("meta")),
        (nn.Identity(), -1),
    ):
        wrapper = Alone(model)
        wrapper(torch.ones(1, 2, device="cpu" if target == -1 else "meta"))
        assert wrapper.targets == [target]


def test_code_of_mmcv_1_that_repairs_the_forward_of_ddp_still_works() -> None:
    class MMDistributedDataParallelFix(Current):
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self.to_kwargs(inputs, kwargs, -1)
            return self.module(*inputs[0], **kwargs[0])

    fixed = object.__new__(MMDistributedDataParallelFix)
    nn.Module.__init__(fixed)
    fixed.module, fixed.dim, fixed.mixed_precision = nn.ReLU(), 0, None
    assert fixed._run_ddp_forward(torch.ones(2)).tolist() == [1, 1]
