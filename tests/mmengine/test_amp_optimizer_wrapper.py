"""AmpOptimWrapper on the CPU, compared with autocast and an explicit loss scale."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyparallel
from pyparallel.mmengine import AmpOptimWrapper, OptimWrapper
from tests.support.mmengine import optim_runs as runs
from tests.support.mmengine.optim_runs import Recorded, refuses
from tests.support.processes import forkserver

pytestmark = pytest.mark.one_backend

ROOT = Path(pyparallel.__file__).parents[1]


class Cast(Recorded):
    """Notes the dtype that its first layer computes in."""

    seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.layers[0](x).dtype
        return super().forward(x)


def make(**kwargs: Any) -> tuple[Cast, AmpOptimWrapper]:
    model = Cast()
    return model, AmpOptimWrapper(optimizer=runs.optimizer(model), **kwargs)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    bad=st.lists(st.booleans(), min_size=1, max_size=12),
    static=st.booleans(),
    clip=st.sampled_from([None, {"max_norm": 0.5}]),
)
def test_float16_leaves_out_steps_that_overflow_and_halves_the_scale(
    bad: list[bool], static: bool, clip: Any
) -> None:
    growth_interval = 3
    loss_scale: Any = 256.0
    if not static:
        loss_scale = {"init_scale": 256.0, "growth_interval": growth_interval}
    model, wrapper = make(loss_scale=loss_scale, dtype="float16", clip_grad=clip)
    expected = Cast()
    plain = runs.optimizer(expected)
    scale, good = 256.0, 0
    for infinite, batch in zip(bad, runs.batches(len(bad)), strict=True):
        with wrapper.optim_context(model):
            loss = model(batch)
        wrapper.update_params(loss * float("inf") if infinite else loss)
        if infinite:
            scale, good = (scale if static else scale / 2), 0
        else:
            plain.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = expected(batch)
            (loss * scale).backward()
            for parameter in expected.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            runs.clip_of(clip)(list(expected.parameters()))
            plain.step()
            good += 1
            if good == growth_interval and not static:
                scale, good = scale * 2, 0
        assert wrapper.loss_scaler.get_scale() == scale
        assert runs.same_bits(model, expected)
    assert model.seen == torch.float16


@pytest.mark.parametrize("static", [False, True])
def test_an_error_of_clipping_is_no_error_of_later_steps(static: bool) -> None:
    clip = {"max_norm": 1.0, "error_if_nonfinite": True}
    model, wrapper = make(
        loss_scale=256.0 if static else {"init_scale": 256.0}, clip_grad=clip
    )
    before = copy.deepcopy(model)
    (inputs,) = runs.batches(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^The total norm of order 2\.0 for"):
            wrapper.update_params(model(inputs) * float("inf"))
        assert runs.same_bits(model, before)
        wrapper.zero_grad()
    assert wrapper.loss_scaler.get_scale() == (256.0 if static else 64.0)
    wrapper.update_params(model(inputs))
    assert not runs.same_bits(model, before)


def test_the_state_adds_the_scale() -> None:
    scale = {"init_scale": 64.0, "growth_interval": 5}
    model, wrapper = make(loss_scale=scale, dtype="float16")
    assert scale == {"init_scale": 64.0, "growth_interval": 5}  # unchanged
    with wrapper.optim_context(model):
        loss = model(runs.batches(1)[0])
    assert not torch.is_autocast_enabled("cpu")
    wrapper.update_params(loss * float("inf"))
    state = wrapper.state_dict()
    assert list(state) == ["state", "param_groups", "loss_scaler"]
    kept = copy.deepcopy(state)

    _, other = make(dtype="float16")
    other.load_state_dict(state)
    assert other.loss_scaler.get_scale() == 32.0
    assert other.loss_scaler.get_growth_interval() == 5
    assert runs.same_state(other.state_dict(), kept) and runs.same_state(state, kept)

    without = OptimWrapper(runs.optimizer(Recorded()))
    without.load_state_dict(state)  # the scale is of no use to it
    other.load_state_dict(without.state_dict())
    assert other.loss_scaler.get_scale() == 32.0


@pytest.mark.parametrize("broken", ["optimizer", "scale"])
def test_a_state_that_does_not_fit_leaves_the_scale(broken: str) -> None:
    _, wrapper = make()
    state = make(loss_scale=2.0)[1].state_dict()
    if broken == "optimizer":
        state["param_groups"] = []
    else:
        state["loss_scaler"] = {"scale": 2.0}
    before = copy.deepcopy(wrapper.state_dict())
    with pytest.raises((ValueError, KeyError)):
        wrapper.load_state_dict(state)
    assert runs.same_state(wrapper.state_dict(), before)


SCALE = "loss_scale must be 'dynamic', a number or a dict, but is"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "fp16"}, ValueError,
     "dtype must be one of float16, bfloat16, float32, float64, but is 'fp16'."),
    ({"dtype": 16}, TypeError,
     "dtype must be a torch.dtype, its name or None, but is 16 (int)."),
    ({"dtype": "float32"}, ValueError,
     "dtype must be torch.bfloat16 or torch.float16 for parameters on the CPU, but is "
     "torch.float32. Use OptimWrapper to train without casting."),
    ({"loss_scale": "static"}, TypeError, f"{SCALE} 'static' (str)."),
    ({"loss_scale": True}, TypeError, f"{SCALE} True (bool)."),
    ({"loss_scale": 0.0}, ValueError,
     "loss_scale must be above 0 and finite, but is 0.0."),
    ({"loss_scale": {"scale": 2.0}}, TypeError,
     "loss_scale must hold arguments of GradScaler, but is {'scale': 2.0}: got an "
     "unexpected keyword argument 'scale'."),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "cls", "message"), REFUSED)
def test_settings_that_are_refused(kwargs: Any, cls: Any, message: str) -> None:
    with refuses(f"AmpOptimWrapper: {message}", cls, AssertionError):
        make(**kwargs)


class Flattened:
    """A model under FullyShardedDataParallel, offloaded to the CPU."""

    compute_device = torch.device("mps")


class Offloaded:
    """The mesh of a parameter under ``fully_shard``."""

    device_type = "xpu"


@pytest.mark.parametrize(
    ("mark", "model", "expected"),
    [
        ({}, Flattened(), "cpu"),
        ({"_fsdp_flattened": True}, Flattened(), "mps"),
        ({"_fsdp_flattened": True}, object(), "xpu"),
        ({"device_mesh": Offloaded()}, object(), "xpu"),
    ],
)
def test_offloaded_parameters_are_cast_for_the_device_that_computes(
    mark: Any, model: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: accelerator
    )
    cast_for = []

    def autocast(device_type: str, dtype: Any) -> Any:
        cast_for.append(device_type)
        return nullcontext()

    monkeypatch.setattr(torch, "autocast", autocast)
    parameter = torch.nn.Parameter(torch.ones(1))
    vars(parameter).update(mark)
    wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD([parameter], lr=0.1))
    with wrapper.optim_context(model):
        pass
    assert cast_for == [expected]


SHARDED = """
import os, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from pyparallel.mmengine import AmpOptimWrapper, OptimWrapper

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
wrapper = AmpOptimWrapper(optimizer=sgd, use_fsdp=True, clip_grad={"max_norm": 1.0})
print(type(wrapper.loss_scaler).__name__)
before = model.weight.detach().clone()
for factor in (float("inf"), 1.0):
    with wrapper.optim_context(model):
        loss = model(torch.ones(1, 3)).sum() * factor
    wrapper.update_params(loss)
    print(torch.equal(model.weight, before), wrapper.loss_scaler.get_scale())

mesh = init_device_mesh("cpu", (1,))
model = fully_shard(torch.nn.Linear(2, 2, bias=False), mesh=mesh)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
wrapper = OptimWrapper(sgd, clip_grad={"max_norm": 1.0})
wrapper.update_params(model(2 * torch.ones(1, 2)).sum())
print(type(wrapper.grad_norm).__name__, wrapper.grad_norm.item(), flush=True)
os._exit(0)  # before the threads of gloo are taken down
"""


@pytest.mark.slow
def test_sharded_parameters_agree_on_steps_and_on_the_norm() -> None:
    _, output = forkserver.run(SHARDED, [str(ROOT)])
    assert output.split() == [
        *("ShardedGradScaler", "True", "32768.0", "False", "32768.0"),
        *("Tensor", "4.0"),
    ]
