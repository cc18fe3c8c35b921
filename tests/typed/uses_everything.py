"""Every public name, used as a program would: ``mypy --strict`` must accept all of it.

Nothing here runs. ``assert_type`` has the types that an editor must show.
`test_typed.py` checks that no public name is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import pyparallel
from pyparallel import (
    MODULE_WRAPPERS,
    BatchWarning,
    Collate,
    Concat,
    DataContainer,
    DataLoader,
    DistributedEvalSampler,
    Error,
    HostCopy,
    ImagePreprocessor,
    List,
    LoaderStats,
    LoaderWarning,
    MMDataParallel,
    MMDistributedDataParallel,
    Pad,
    Padded,
    Padding,
    PreDataLoader,
    Ragged,
    SizeBatcher,
    SizeBatchSampler,
    Stack,
    StaticBatches,
    collate,
    gather,
    is_module_wrapper,
    memory,
    mmcv,
    mmengine,
    pad_stack,
    parallel_apply,
    profile,
    registry,
    replicate,
    resize_mask,
    sample_random,
    scatter,
    scatter_kwargs,
    start_to_host,
    to_host,
    unpad,
)

Sample = dict[str, DataContainer]


def containers(image: Tensor, boxes: Tensor) -> Sample:
    """Return a sample of a dataset."""
    padding = Padding(size_divisor=32, buckets=((320, 320), (640, 640)), mask=True)
    assert_type(padding.num_dims, int | None)
    sample = {
        "img": DataContainer(image, stack=True, padding=Padding(shape=(64, 64))),
        "heat": DataContainer(image, stack=True, padding_value=-1, pad_dims=2),
        "boxes": DataContainer(boxes, ragged=True),
        "meta": DataContainer({"name": "a"}, cpu_only=True),
    }
    container = sample["img"]
    assert_type(container.stack, bool)
    assert_type(container.cpu_only, bool)
    assert_type(container.ragged, bool)
    assert_type(container.pad_dims, int | None)
    assert_type(container.padding_value, float)
    assert_type(container.padding, Padding | None)
    assert_type(container.datatype, type | str)
    assert_type(container.dim(), int)
    assert_type(len(container), int)
    assert_type(container.to("cuda:0", non_blocking=True), DataContainer)
    assert_type(container.pin_memory(), DataContainer)
    height, width = container.size()[-2:]
    chunk = container.data[0] if height < width else container[0]
    return {**sample, "again": DataContainer([*container, chunk])}


def stacked(samples: list[Tensor]) -> tuple[Tensor, Ragged]:
    """Plain tensors of different sizes."""
    found = pad_stack(samples, pad_dims=1, padding_value=-1)
    assert_type(found, Tensor)
    assert_type(pad_stack(samples, side="left", out=found), Tensor)
    assert_type(pad_stack(samples, sizes=True), Padded)
    assert_type(unpad(found, [[1], [2]], dim=-1), list[Tensor])
    assert_type(resize_mask(found > 0, 4), Tensor)
    assert_type(pad_stack(samples, padding=Padding(mask=True)), Tensor | Padded)
    padded = pad_stack(samples, mask=True, size_divisor=32)
    assert_type(padded, Padded)
    assert_type(padded.data, Tensor)
    assert_type(padded.sizes, Tensor | None)
    assert_type(padded.mask, Tensor | None)
    assert_type(padded.num_samples, int)
    found = padded.part(0, 1).data
    ragged = Ragged.from_tensors(samples)
    assert_type(ragged.values, Tensor)
    assert_type(ragged.offsets, Tensor)
    assert_type(ragged.lengths(), Tensor)
    assert_type(ragged.unbind(), list[Tensor])
    assert_type(ragged.num_samples, int)
    assert_type(ragged.to_padded(-1.0), Tensor)
    assert_type(ragged.to_padded(0.0, Padding(sizes=True)), Tensor | Padded)
    return found, Ragged.from_nested(ragged.to_nested()).part(0, 2)


def images(pixels: list[Tensor]) -> Tensor:
    """Bytes of images become a batch."""
    mean, std = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    prepare = ImagePreprocessor(mean, std, size_divisor=32, device="cuda")
    batch = prepare.forward(pixels)
    assert_type(batch, Tensor | Padded)
    return batch.data if isinstance(batch, Padded) else batch


def rules(dataset: torch.utils.data.Dataset[dict[str, Tensor]]) -> Iterator[Any]:
    """Plain samples, with a rule for each field."""
    fields = Collate(
        image=Pad(
            0.5,
            dims=2,
            size_divisor=(32, 32),
            side="left",
            mask=True,
            dtype=torch.float16,
        ),
        target={"boxes": Concat(), "names": List()},
        default=Stack(dtype=torch.bfloat16),
    )
    assert_type(Collate.auto(dataset, num_samples=8), Collate)
    assert_type(fields([dataset[0], dataset[1]]), dict[str, Any])
    assert_type(fields([(1, "a"), (2, "b")]), Any)
    for batch in DataLoader(dataset, batch_size=4, collate_fn=fields):
        assert_type(batch, Any)
        boxes: Ragged = batch["target"]["boxes"]
        assert_type(boxes.cu_seqlens, Tensor)
        assert_type(boxes.position_ids, Tensor)
        assert_type(boxes.max_seqlen, int)
        yield Collate(Pad(), lambda values: values[0])([(boxes.values, 1)])


def loaders(dataset: torch.utils.data.Dataset[Sample]) -> Iterator[Any]:
    """Load through a ring and prefetch."""
    merge = partial(collate, samples_per_gpu=4)
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, collate_fn=merge, ring_slabs=4
    )
    assert_type(DataLoader([1, 2]), DataLoader[Any])
    annotated: DataLoader[Sample] = DataLoader(dataset)
    as_of_torch: torch.utils.data.DataLoader[Sample] = annotated
    assert_type(as_of_torch.dataset, torch.utils.data.Dataset[Sample])
    loader.load_state_dict(loader.state_dict())
    assert_type(sample_random().torch, torch.Generator)
    sampler = SizeBatchSampler([(4, 5), (6, 7)], max_padded=100, padding=Padding())
    sampler.set_epoch(1)
    assert_type(sampler.report().planned.padding, float)
    assert_type(DistributedEvalSampler(dataset, 2, 0).num_valid, int)
    SizeBatchSampler(len, 2, num_samples=3, progress=False, cache=Path("sizes.npz"))
    config = mmengine.SizeBatchSampler(sampler, 4, sizes=[1, 2], window=3)
    assert_type(config.sampler.epoch, int)
    for words in SizeBatcher(["a", "bb"], len, batch_size=2):
        assert_type(words, list[str])
    loader = DataLoader(dataset, batch_sampler=sampler)
    assert_type(loader.stats(), LoaderStats)
    for finding in loader.preflight():
        print(finding)
    with PreDataLoader(loader, "cpu", 3, transform=None, timeout=60.0) as ahead:
        assert_type(len(ahead), int)
        for batch in ahead:
            assert_type(batch, Any)
            yield batch
        yield ahead.next()
        stats = ahead.stats()
        assert_type(stats.verdict, str)
        assert_type(stats.hidden, float | None)
        assert_type(stats.padding_fraction + stats.waited + stats.wait_seconds, float)
        assert_type(stats.batches + stats.nbytes + stats.ring_misses, int)


def merged(tensors: list[Tensor], samples: list[Sample]) -> Tensor:
    """Batches keep the structure of their samples, also across devices."""
    assert_type(collate(tensors), Tensor)
    assert_type(collate([sample["img"] for sample in samples]), DataContainer)
    assert_type(collate([{"x": tensors[0]}]), dict[str, Tensor])
    batch = collate(samples, samples_per_gpu=2)
    assert_type(batch, dict[str, DataContainer])
    assert_type(scatter(batch, [0, 1]), list[dict[str, Any]])
    assert_type(scatter(batch["img"], [0, 1]), Sequence[Any])
    assert_type(scatter(tensors[0], ["cuda:0"]), tuple[Tensor, ...])
    parts = scatter({"x": tensors[0]}, ["cuda:0", "cuda:1"])
    assert_type(parts, list[dict[str, Tensor]])
    assert_type(gather(parts, -1), dict[str, Tensor])
    assert_type(to_host(parts), list[dict[str, Tensor]])
    return gather(scatter(tensors[0], [0, 1]), 0)


def transfers(batch: Any, model: nn.Module) -> Any:
    """To devices, through them, and back."""
    stream = torch.Stream(device="cuda:0")
    parts = scatter(batch, [0, 1], dim=0, dtype=torch.float16, stream=stream)
    inputs, kwargs = scatter_kwargs((batch,), {"mode": "loss"}, ["cuda:0", -1])
    assert_type(inputs, tuple[Any, ...])
    assert_type(kwargs, tuple[Any, ...])
    replicas = replicate(model, [torch.device("cuda:0"), "cuda:1"], detach=True)
    assert_type(replicas, list[nn.Module])
    outputs = parallel_apply(replicas, parts, [{}, {}], [0, 1])
    assert_type(outputs, list[Any])
    assert_type(parallel_apply(len, [[1], [2]], ["cpu", "cpu"], dim=0), list[int])
    handle = start_to_host(gather(outputs, 0))
    assert_type(handle, HostCopy)
    return handle.get() if handle.is_done() else to_host(outputs)


def fixed(batch: dict[str, Tensor], loader: DataLoader[Sample]) -> int:
    """Batches at fixed addresses."""
    static = StaticBatches(num_slabs=2, max_plans=4)
    assert_type(scatter(batch, 0, out=static), list[dict[str, Tensor]])
    assert_type(PreDataLoader(loader, 0, static=static).static, StaticBatches | None)
    static.clear()
    return static.num_plans + static.nbytes + static.num_slabs + static.max_plans


def profiled(loader: DataLoader[Sample]) -> str:
    """Where the time of some steps goes."""
    with profile("where", steps=10, warmup=2, synchronize=False) as found:
        for batch in loader:
            print(batch)
    assert_type(found.files, tuple[Path, ...])
    assert_type(found.text, str)
    return found.verdict


def wrappers(model: nn.Module, batch: Sample) -> Any:
    """Run the training step of mmcv 1.x."""
    single = MMDataParallel(model, device_ids=[0])
    several = MMDistributedDataParallel(model, broadcast_buffers=False)
    assert_type(is_module_wrapper(several), bool)
    assert_type(MODULE_WRAPPERS.get("MMDataParallel"), type | None)
    single.val_step(batch, None)
    return several.train_step(batch, torch.optim.SGD(model.parameters()))


class Own(registry.Registry):
    """A registry of one's own, below the one that is there."""


def registries() -> bool:
    """Register a wrapper."""
    own = Own("own", parent=registry.MODULE_WRAPPERS, scope="own")
    own.register_module(module=MMDataParallel)
    return "MMDataParallel" in own and registry.is_module_wrapper(nn.ReLU())


def held() -> int:
    """Use the limits of host memory."""
    memory.set_cache_limit(1 << 30, idle_seconds=5.0)
    memory.set_pinned_limit(64 << 20)
    assert_type(memory.cache_info(), memory.CacheInfo)
    pinned: memory.PinnedInfo = memory.pinned_info()
    assert_type(memory.empty_cache(), int)
    return pinned.waits + memory.cache_info().hits


def replaced() -> None:
    """Install the replacements for mmcv and mmengine."""
    mmcv.install()
    mmcv.uninstall()
    context: AbstractContextManager[None] = mmcv.installed()
    with context, mmengine.installed():
        mmengine.install()
        mmengine.uninstall()


class Net(mmengine.BaseModel):
    """A model of mmengine's protocol, without mmengine."""

    def __init__(self) -> None:
        super().__init__(data_preprocessor=mmengine.BaseDataPreprocessor())
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "loss") -> Any:
        """Return the loss."""
        return {"loss": self.layer(inputs).mean()}


def training(batch: Any) -> Any:
    """Run the steps of mmengine."""
    mmengine.init_dist("pytorch", backend="gloo", timeout=60)
    net = Net()
    wrapped = mmengine.MMDistributedDataParallel(net, detect_anomalous_params=True)
    optimizer = mmengine.OptimWrapper(torch.optim.SGD(net.parameters()), 2)
    amp = mmengine.AmpOptimWrapper(optimizer=optimizer.optimizer, dtype="bfloat16")
    both = mmengine.OptimWrapperDict(net=optimizer, amp=amp)
    assert_type(both["net"], mmengine.OptimWrapper)
    assert_type(optimizer.get_lr(), dict[str, list[float]])
    assert_type(optimizer.should_update(), bool)
    with optimizer.optim_context(net):
        losses = net.train_step(batch, optimizer)
    assert_type(losses, dict[str, Any])
    assert_type(mmengine.detect_anomalous_params(losses["loss"], net), list[str])
    assert_type(mmengine.is_model_wrapper(wrapped, mmengine.MODEL_WRAPPERS), bool)
    mmengine.MMSeparateDistributedDataParallel(net, find_unused_parameters=True)
    mmengine.MMFullyShardedDataParallel(net, sharding_strategy="FULL_SHARD")
    sharded = mmengine.MMFullyShard(net, shard=["layer"], cpu_offload=False)
    return sharded.val_step(batch)


def mmengine_batches(samples: list[dict[str, Tensor]]) -> Any:
    """Use the collate functions of mmengine."""
    prepare = mmengine.ImgDataPreprocessor([0.0], [1.0], pad_size_divisor=32)
    padded = mmengine.stack_batch([sample["img"] for sample in samples], 32)
    assert_type(padded, Tensor)
    merged = mmengine.pseudo_collate(samples)
    return prepare.forward(merged), mmengine.default_collate(samples)


ERRORS: type[Exception] = Error
CATEGORIES: list[type[Warning]] = [BatchWarning, LoaderWarning, mmengine.OptimWarning]
assert_type(pyparallel.__version__, str)
