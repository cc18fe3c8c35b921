"""Runs of mmengine's own Runner, by config; each is a process of torchrun.

    torchrun --nproc_per_node=2 mmengine_runner_cases.py FOLDER

Writes ``FOLDER/<rank>.pt`` with the result or the error of each case. Cases run in
order: those of one process first, then those with the process group.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from docs_blocks import split_section
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.runner._flexible_runner import FlexibleRunner
from mmengine_runner_configs import (
    BATCH,
    FOLDER,
    config,
    run,
    with_validation,
)
from mmengine_runner_parts import Reader

RANK = int(os.environ["RANK"])
#: The modules of pyparallel that a script imports with DataContainer.
IMPORTED = sorted(
    name
    for name in sys.modules
    if name in ("pyparallel.registry", "pyparallel.mmengine")
)
CASES: dict[str, Callable[[], Any]] = {}


# Configs import our classes; only some cases import a class themselves.
def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------- one process
@case
def alone_stock() -> Any:
    return run(config("alone_stock", distributed=False))


@case
def alone_ours() -> Any:
    found = run(config("alone_ours", distributed=False, ours="pyparallel"))
    return found | {"imported": IMPORTED}


# ---------------------------------------------------------------------- two ranks
@case
def joined_by_config() -> Any:
    """Join the group by an import in a config file."""
    path = FOLDER / f"join{RANK}.py"
    path.write_text('custom_imports = dict(imports=["pyparallel.mmengine.join"])\n')
    Config.fromfile(path)
    return torch.distributed.get_backend(), torch.distributed.get_rank()


@case
def stock() -> Any:
    return run(with_validation(config("stock", count=2048, epochs=2)))


@case
def scoped() -> Any:
    cfg = config("scoped", ours="pyparallel", count=2048, epochs=2, workers=1)
    return run(with_validation(cfg))


@case
def dotted() -> Any:
    return run(config("dotted", ours="pyparallel.mmengine"))


@case
def short_stock() -> Any:
    return run(config("short_stock"))


@case
def containers_and_a_stock_preprocessor() -> Any:
    cfg = config("containers", ours="pyparallel")
    cfg["model"]["data_preprocessor"] = dict(type="BaseDataPreprocessor")
    return run(cfg)


def accumulated(name: str, ours: str) -> Any:
    cfg = config(name, ours=ours, count=224)
    cfg["optim_wrapper"] |= dict(accumulative_counts=3, clip_grad=dict(max_norm=0.2))
    return run(cfg)


CASES["accumulated_stock"] = partial(accumulated, "accumulated_stock", "")
CASES["accumulated_ours"] = partial(accumulated, "accumulated_ours", "pyparallel")


@case
def mixed_ours() -> Any:
    cfg = config("mixed_ours", ours="pyparallel")
    cfg["optim_wrapper"] |= dict(type="pyparallel.AmpOptimWrapper", dtype="bfloat16")
    return run(cfg)


@case
def default_scope() -> Any:
    cfg = config("default_scope", ours="pyparallel")
    cfg["model_wrapper_cfg"] = dict(type="MMDistributedDataParallel")
    cfg["optim_wrapper"]["type"] = "OptimWrapper"
    cfg["model"]["data_preprocessor"]["type"] = "BaseDataPreprocessor"
    return run(cfg | dict(default_scope="pyparallel"))


@case
def wrapped_before() -> Any:
    from pyparallel import collate
    from pyparallel.mmengine import BaseDataPreprocessor, MMDistributedDataParallel

    cfg = config("wrapped_before", ours="pyparallel")
    del cfg["model_wrapper_cfg"]
    cfg["train_dataloader"]["collate_fn"] = partial(collate, samples_per_gpu=BATCH)
    torch.manual_seed(0)
    cfg["model"] = MMDistributedDataParallel(Reader(BaseDataPreprocessor()))
    # Configs with non-text values cannot be printed; a Runner accepts them in Python.
    return run_in_python(cfg)


def run_in_python(cfg: dict[str, Any]) -> Any:
    runner = Runner(**cfg)
    runner.train()
    return runner.message_hub.log_scalars["train/loss"].data[0].tolist()


def checkpointed(name: str, epochs: int, **changes: Any) -> Any:
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1))
    cfg = config(name, ours="pyparallel", epochs=epochs)
    return run(cfg | dict(default_hooks=hooks) | changes)


@case
def straight() -> Any:
    return checkpointed("straight", 2)


@case
def resumed() -> Any:
    saved = str(FOLDER / "straight" / "epoch_1.pth")
    return checkpointed("resumed", 2, resume=True, load_from=saved)


def flexible(name: str, strategy: dict[str, Any]) -> Any:
    cfg = config(name, ours="pyparallel", strategy=strategy)
    del cfg["model_wrapper_cfg"]
    return run(cfg, FlexibleRunner)


@case
def flexible_runner() -> Any:
    wrapper = dict(type="pyparallel.MMDistributedDataParallel")
    strategy = dict(type="DDPStrategy", model_wrapper=wrapper)
    return flexible("flexible_runner", strategy)


@case
def flexible_sharded() -> Any:
    wrapper = dict(type="pyparallel.MMFullyShardedDataParallel", device_id="cpu")
    strategy = dict(type="FSDPStrategy", model_wrapper=wrapper)
    return flexible("flexible_sharded", strategy)


@case
def documented() -> Any:
    """Merge each config outside of the recipes into the previous ones, and train."""
    _, page = split_section("docs/mmengine-runner.md", "Recipes")
    cfg = Config(config("documented", count=128))
    cfg.train_dataloader.dataset.containers = True
    found = []
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        cfg.merge_from_dict(dict(Config.fromstring(block, ".py")))
        cfg.work_dir = str(FOLDER / f"documented{len(found)}")
        cfg.experiment_name = f"documented{len(found)}"
        if "strategy" in cfg:
            cfg.pop("model_wrapper_cfg", None)
            found.append(run(cfg, FlexibleRunner))
        else:
            found.append(run(cfg))
    return [(block["classes"], len(block["losses"])) for block in found]


@case
def resumed_without_install() -> Any:
    import pyparallel.mmengine

    pyparallel.mmengine.uninstall()
    saved = str(FOLDER / "straight" / "epoch_1.pth")
    changes = dict(resume=True, load_from=saved)
    return run(config("resumed_without", epochs=2) | changes)


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    for name, function in CASES.items():
        try:
            results[name] = function()
        except Exception as error:
            sys.stderr.write(f"--- {name}\n{traceback.format_exc()}")
            results[name] = f"{type(error).__name__}: {error}"
    torch.save(results, FOLDER / f"{RANK}.pt")


if __name__ == "__main__":
    main()
