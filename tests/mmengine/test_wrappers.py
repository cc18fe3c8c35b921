"""The wrappers on gloo ranks against one process, and settings of sharded models."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from pyparallel import mmengine
from pyparallel.mmengine.fully_sharded_distributed import resolve_dtypes
from tests.support.mmengine.optim_runs import refuses
from tests.support.mmengine.training import Net
from tests.support.ranks.distributed_ranks import launch

pytestmark = pytest.mark.one_backend


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_an_accelerator_the_cpu_must_be_named() -> None:
    with refuses(
        "MMFullyShardedDataParallel: there must be an accelerator, but torch "
        f"{torch.__version__} sees none. Pass device_id='cpu' to shard on the CPU.",
        RuntimeError,
    ):
        mmengine.MMFullyShardedDataParallel(Net())


def test_settings_are_converted_for_torch_and_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def note(self: Any, module: Any, **kwargs: Any) -> None:
        seen.update(kwargs)

    monkeypatch.setattr(fsdp.FullyShardedDataParallel, "__init__", note)
    net = Net()
    policy = "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy"
    settings: dict[str, Any] = {
        "sharding_strategy": "SHARD_GRAD_OP",
        "cpu_offload": True,
        "auto_wrap_policy": {"type": policy, "min_num_params": 5},
        "backward_prefetch": "BACKWARD_POST",
        "mixed_precision": {"param_dtype": "float16", "reduce_dtype": torch.float32},
        "param_init_fn": {"type": "torch.nn.init.constant_", "val": 1.0},
        "ignored_parameters": ["body.0.weight"],
        "ignored_modules": ["body.2"],
        "device_id": "cpu",
    }
    before = copy.deepcopy(settings)
    mmengine.MMFullyShardedDataParallel(net, **settings)
    assert settings == before
    wrap, init = seen.pop("auto_wrap_policy"), seen.pop("param_init_fn")
    assert isinstance(wrap, functools.partial) and wrap.keywords == {
        "min_num_params": 5
    }
    assert init.func is torch.nn.init.constant_ and init.keywords == {"val": 1.0}
    (ignored,) = seen.pop("ignored_states")
    assert ignored is net.body[0].weight
    assert seen == {
        "process_group": None,
        "use_orig_params": True,
        "sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": fsdp.CPUOffload(offload_params=True),
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": fsdp.MixedPrecision(torch.float16, torch.float32),
        "ignored_modules": [net.body[2]],
        "device_id": torch.device("cpu"),
    }


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "sharding_strategy": ("ALL", KeyError, "must be one of FULL_SHARD, "),
    "backward_prefetch": (3, TypeError, "must be a BackwardPrefetch, its name or None"),
    "cpu_offload": (
        "yes",
        TypeError,
        "must be a bool, a CPUOffload or None, but is str",
    ),
    "auto_wrap_policy": ("no.such", ValueError, "must be the name of a function, but"),
    "param_init_fn": ({"val": 1}, TypeError, "must be a function, its name, a dict"),
    "mixed_precision": ({"param_dtype": "half16"}, ValueError, "must be a dtype"),
    "ignored_modules": (["a"], KeyError, "must be names of the model, but has 'a'"),
    "ignored_parameters": ([3], TypeError, "must hold names, parameters or modules"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_without_a_meaning_are_named(name: str) -> None:
    value, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        mmengine.MMFullyShardedDataParallel(Net(), **{name: value})
    assert str(caught.value).startswith(f"MMFullyShardedDataParallel: {name}")
    assert message in str(caught.value)
    with refuses(
        "MMFullyShard: shard must be names of the model, but has 'Conv2d'.", KeyError
    ):
        mmengine.MMFullyShard(Net(), shard=["Conv2d"])


def test_precision_takes_only_arguments_of_its_class() -> None:
    with pytest.raises(TypeError, match="here must hold arguments of MixedPrecision"):
        resolve_dtypes({"dtype": "float16"}, fsdp.MixedPrecision, "here")
    with pytest.raises(TypeError, match=r"here\['param_dtype'\] must be a torch.dtype"):
        resolve_dtypes({"param_dtype": 3}, fsdp.MixedPrecision, "here")


CASES = ["plain", "accumulation", "clipping", "amp", "batches", "own_steps"]
CASES += ["unfrozen", "anomalies", "adversaries", "structure", "no_sync"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"), [(2, [*CASES, "fully_shard", "fsdp"]), (4, CASES)]
)
def test_all_ranks_pass(world: int, cases: list[str], tmp_path: Path) -> None:
    results = launch(tmp_path, "tests.support.mmengine.cases", cases, world, limit=180)
    assert all(results[case] for case in cases)


@pytest.mark.slow
@pytest.mark.also_peers
@pytest.mark.parametrize(
    ("world", "cases"), [(2, ["clipped", "refusals"]), (4, ["clipped"])]
)
def test_sharded_models_clip_by_the_norm_of_one_process(
    world: int, cases: list[str], tmp_path: Path
) -> None:
    results = launch(
        tmp_path, "tests.support.mmengine.sharded_cases", cases, world, limit=180
    )
    assert not any(any(results[case]) for case in cases)


@pytest.mark.slow
@pytest.mark.peers
def test_sharded_models_and_wrappers_of_mmengine(tmp_path: Path) -> None:
    (case,) = cases = ["with_mmengine"]
    results = launch(tmp_path, "tests.support.mmengine.sharded_cases", cases, limit=180)
    assert results[case] == [None, None]
