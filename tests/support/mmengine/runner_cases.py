"""Runs of mmengine's own Runner, by config; each is a process of torchrun.

    torchrun --nproc_per_node=2 mmengine_runner_cases.py FOLDER

Writes ``FOLDER/<rank>.pt`` with the result or the error of each case. Cases run in
order: those of one process first, then those with the process group. Configs have
mmengine's parts or ours.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.runner._flexible_runner import FlexibleRunner

from tests.support.mmengine.runner_parts import Reader
from tests.support.repository.docs_blocks import split_section

FOLDER = Path(sys.argv[1])
BATCH = 16
PARTS = "tests.support.mmengine.runner_parts"


def loader(count: int, first: int, containers: bool, collate: Any, workers: int) -> Any:
    dataset = dict(
        type=f"{PARTS}.Names", first=first, count=count, containers=containers
    )
    return dict(
        batch_size=BATCH,
        num_workers=workers,
        dataset=dataset | dict(containers=containers),
        sampler=dict(type="DefaultSampler", shuffle=first == 0),
        collate_fn=collate,
    )


def config(
    name: str,
    *,
    ours: str = "",
    count: int = 256,
    epochs: int = 1,
    workers: int = 0,
    distributed: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Return a config with mmengine's parts, or with ours, named after ``ours``."""
    collate: dict[str, Any] = dict(type="pseudo_collate")
    preprocessor = f"{PARTS}.PaddingPreprocessor"
    wrapper: dict[str, Any] = dict(type="MMDistributedDataParallel", device_ids=None)
    if ours:
        top = "pyparallel" if ours == "pyparallel.mmengine" else ours
        collate = dict(type=f"{top}.collate", samples_per_gpu=BATCH)
        preprocessor = f"{ours}.BaseDataPreprocessor"
        wrapper = dict(type=f"{ours}.MMDistributedDataParallel")
    optim = f"{ours}.OptimWrapper" if ours else "OptimWrapper"
    wrapped = dict(model_wrapper_cfg=wrapper, launcher="pytorch") if distributed else {}
    return (
        dict(
            model=dict(
                type=f"{PARTS}.Reader", data_preprocessor=dict(type=preprocessor)
            ),
            train_dataloader=loader(count, 0, bool(ours), collate, workers),
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            optim_wrapper=dict(type=optim, optimizer=dict(type="Adam", lr=0.01)),
            default_hooks=dict(checkpoint=None),
            randomness=dict(seed=0),
            env_cfg=dict(dist_cfg=dict(backend="gloo")),
            work_dir=str(FOLDER / name),
            experiment_name=name,
            log_level="ERROR",
        )
        | wrapped
        | changes
    )


def with_validation(cfg: dict[str, Any]) -> dict[str, Any]:
    train = cfg["train_dataloader"]
    val = loader(
        256, 8000, train["dataset"]["containers"], dict(train["collate_fn"]), 0
    )
    return cfg | dict(
        val_dataloader=val,
        val_cfg=dict(),
        val_evaluator=dict(type=f"{PARTS}.Accuracy"),
    )


def run(cfg: Any, kind: Any = Runner, **settings: Any) -> dict[str, Any]:
    """Train, and return the values to compare."""
    runner = kind.from_cfg(cfg if isinstance(cfg, Config) else Config(cfg))
    model = runner.train()
    scalars = runner.message_hub.log_scalars

    def logged(name: str) -> list[float]:
        return scalars[name].data[0].tolist() if name in scalars else []

    wrapper = runner.optim_wrapper if kind is Runner else runner.strategy.optim_wrapper
    model = getattr(model, "module", model)
    preprocessor = getattr(model, "data_preprocessor", None)
    parts = (runner.model, preprocessor, wrapper)
    return dict(
        losses=logged("train/loss"),
        accuracy=logged("val/accuracy"),
        norms=logged("train/grad_norm"),
        weights=[each.detach().clone() for each in model.parameters()],
        classes=[f"{type(each).__module__}.{type(each).__name__}" for each in parts],
    )


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
CASES["alone_stock"] = lambda: run(config("alone_stock", distributed=False))
CASES["no_group"] = lambda: run(config("no_group"))


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


CASES["dotted"] = lambda: run(config("dotted", ours="pyparallel.mmengine"))
CASES["short_stock"] = lambda: run(config("short_stock"))


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
