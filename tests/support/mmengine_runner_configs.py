"""Configs of the runner tests, with mmengine's parts or with ours, and their runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner

FOLDER = Path(sys.argv[1])
BATCH = 16
PARTS = "mmengine_runner_parts"


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
