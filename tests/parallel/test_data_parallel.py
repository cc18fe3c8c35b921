"""MMDataParallel on one device: the host, and accelerators driven by fakes."""

from __future__ import annotations

import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyparallel import DataContainer, MMDataParallel, collate, is_module_wrapper
from pyparallel.core import errors
from tests.support.ranks.distributed_model import (
    METHODS,
    Recorder,
    caller,
    make_batch,
    make_net,
    make_samples,
)

pytestmark = pytest.mark.cuda_torch


ON_HOST: list[Any] = [[], (), -1, [-1], "cpu", ["cpu"], torch.device("cpu")]
ON_HOST += [np.int64(-1), torch.tensor(-1), np.array([-1])]


class FakeDevice(MMDataParallel):
    """As on a device: the model is on the host, which replaces the checked device."""

    def __init__(self, module: nn.Module, device_ids: Any = (0,)) -> None:
        nn.Module.__init__(self)
        self.module, self.dim = module, 0
        self.device_ids = list(device_ids)
        self.src_device_obj = torch.device("cpu")
        self.seen: list[Any] = []

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.seen.append(device_ids)
        return super().scatter(inputs, kwargs, [-1])


class Counting(nn.Linear):
    """A model that counts how often its parameters are looked through."""

    looked = 0

    def parameters(self, recurse: bool = True) -> Any:
        for parameter in super().parameters(recurse):
            self.looked += 1
            yield parameter

    def train_step(self, data: torch.Tensor) -> torch.Tensor:
        return self(data)


class TestWithoutAnAccelerator:
    @pytest.fixture(autouse=True)
    def no_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        monkeypatch.setattr(errors, "_warned", set())

    @pytest.mark.parametrize("method", METHODS)
    def test_the_model_gets_opened_containers_and_the_optimizer_itself(
        self, method: str
    ) -> None:
        model = Recorder()
        model.output = OrderedDict(loss=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        both = {"g": optimizer, "d": optimizer}
        call = caller(MMDataParallel(model, device_ids=[0]), method)
        output = call(make_batch(0, 0, 2), optimizer, both, flag=True, none=None)
        assert output is model.output
        (data, first, second), kwargs = model.calls[0]
        assert data["img"].shape == (4, 3, 8, 8)
        assert [type(box) for box in data["boxes"]] == [torch.Tensor] * 4
        assert data["metas"] == [(5, 6), (7, 8), (4, 6), (8, 8)]
        assert first is optimizer
        assert second["g"] is second["d"] is optimizer
        assert kwargs == {"flag": True, "none": None}
        call()
        assert model.calls[1] == ((), {})

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("ids", [None, *ON_HOST], ids=repr)
    def test_the_host_is_no_reason_to_warn(self, ids: Any) -> None:
        assert MMDataParallel(nn.Linear(1, 1), ids).device_ids == []

    @pytest.mark.parametrize("ids, shown", [([0], "[0]"), ("cuda:1", "['cuda:1']")])
    def test_an_absent_accelerator_is_warned_of(self, ids: Any, shown: str) -> None:
        with pytest.warns(UserWarning) as caught:
            assert MMDataParallel(nn.Linear(1, 1), ids).device_ids == []
            MMDataParallel(nn.Linear(1, 1), ids)
        assert [str(warning.message) for warning in caught] == [
            f"[PP004] MMDataParallel: device_ids={shown} must be devices of this "
            f"machine, but torch {torch.__version__} finds no accelerator. The model "
            "stays on the host. Use -1 or 'cpu' to select the host."
        ]
        assert caught[0].filename == __file__


@pytest.mark.parametrize("devices", [[-1], ["cpu", "cpu"]], ids=str)
def test_more_chunks_than_devices_are_an_error_and_not_dropped(devices: Any) -> None:
    batch = collate(make_samples(0, 6), samples_per_gpu=2)
    with pytest.raises(ValueError, match="at most one chunk for each target"):
        MMDataParallel(make_net(), devices).train_step(batch)


def test_a_compiled_wrapper_is_a_module_wrapper_and_still_opens_containers() -> None:
    compiled = torch.compile(MMDataParallel(nn.Linear(2, 1), [-1]), backend="eager")
    assert is_module_wrapper(compiled)
    x = torch.ones(3, 2)
    batch = DataContainer([x], stack=True)
    assert torch.equal(compiled(batch), compiled.module(x))


class TestWithAccelerators:
    @pytest.fixture(autouse=True)
    def accelerators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Show four CUDA devices to pyparallel, but not to torch."""
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        cuda = SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 4, current_device=lambda: 0
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: cuda)

    def test_the_host_can_be_selected(self) -> None:
        for ids in ON_HOST:
            model = Recorder()
            wrapper = MMDataParallel(model, ids)
            wrapper.train_step(DataContainer([torch.ones(1)], stack=True))
            assert wrapper.device_ids == []
            assert model.calls[0][0][0].device.type == "cpu"

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (None, None),
            (2, [2]),
            ([1, 0], [1, 0]),
            (range(2), [0, 1]),
            ((i for i in (3,)), [3]),
            ("cuda:1", [1]),
            ([torch.device("cuda")], [0]),
        ],
    )
    def test_torch_gets_the_devices_as_a_list(
        self, monkeypatch: pytest.MonkeyPatch, asked: Any, expected: Any
    ) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(
            nn.DataParallel, "__init__", lambda self, *args: seen.extend(args)
        )
        monkeypatch.setattr(nn.Module, "__setattr__", object.__setattr__)
        MMDataParallel(None, asked, 1, dim=3)  # type: ignore[arg-type]
        cuda = expected and [torch.device("cuda", i) for i in expected]
        assert seen == [None, cuda, 1, 3]

    def test_a_device_that_the_machine_lacks_is_named(self) -> None:
        message = (
            "scatter: target cuda:4 must be a device of this machine, but torch "
            f"{torch.__version__} sees 4 of type cuda. Use -1 or 'cpu' to stay on the "
            "host."
        )
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            MMDataParallel(nn.Linear(1, 1), [4])


class TestOnADevice:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("ids", [[3], []], ids=["device", "host"])
    def test_a_call_scatters_to_the_device_ids(self, method: str, ids: Any) -> None:
        model = Recorder()
        wrapper = FakeDevice(model, ids)
        caller(wrapper, method)(DataContainer([torch.ones(1)]), key=1)
        caller(wrapper, method)()
        assert wrapper.seen == [ids or [-1]] * 2
        assert model.calls == [((torch.ones(1),), {"key": 1}), ((), {})]

    def test_every_tensor_is_checked_once_and_then_only_the_first(self) -> None:
        model = Counting(2, 2)
        wrapper = FakeDevice(model)
        looked = []
        for _ in range(3):
            model.looked = 0
            wrapper.train_step(torch.ones(1, 2))
            looked.append(model.looked)
        assert looked == [2, 1, 1]
        model.to("meta")  # not by the wrapper
        with pytest.raises(RuntimeError, match="found one on meta"):
            wrapper.train_step(torch.ones(1, 2))

    @pytest.mark.parametrize("kind", ["parameter", "buffer"])
    def test_a_tensor_on_another_device_is_an_error(self, kind: str) -> None:
        model = nn.Linear(1, 1)
        if kind == "parameter":
            model.bias = nn.Parameter(torch.ones(1, device="meta"))
        else:
            model.register_buffer("mean", torch.ones(1, device="meta"))
        message = (
            "FakeDevice: module must have its parameters and buffers on cpu "
            "(device_ids[0]), but found one on meta."
        )
        wrapper = FakeDevice(model)
        for _ in range(2):  # a failed check counts for nothing
            with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
                wrapper.train_step(torch.ones(1, 1))

    def test_the_check_is_armed_again_when_the_wrapper_is_moved(self) -> None:
        model = Counting(2, 2)
        wrapper = FakeDevice(model)
        wrapper.train_step(torch.ones(1, 2))
        assert wrapper.to(torch.float32) is wrapper
        model.looked = 0
        wrapper.train_step(torch.ones(1, 2))
        assert model.looked == 2
        model.bias = nn.Parameter(torch.ones(2, device="meta"))
        wrapper.float()
        with pytest.raises(RuntimeError, match="found one on meta"):
            wrapper.train_step(torch.ones(1, 2))


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_all_but_cpu_only_data_is_moved(method: str) -> None:
    model = Recorder()
    wrapper = MMDataParallel(model, device_ids=[0])
    caller(wrapper, method)(
        make_batch(0, 0, 1), DataContainer([[torch.ones(1)]], cpu_only=True)
    )
    data, host = model.calls[0][0]
    assert [tensor.device.type for tensor in (data["img"], *data["boxes"])] == [
        "cuda"
    ] * 5
    assert host[0].device.type == "cpu"
    assert next(model.parameters()).device.type == "cuda"


@pytest.mark.cuda
def test_on_a_machine_with_a_gpu_the_host_can_be_used() -> None:
    net = make_net()
    MMDataParallel(net, device_ids=[-1]).train_step(make_batch(0, 0, 1))[
        "loss"
    ].backward()
    assert net.conv.weight.grad.device.type == "cpu"
