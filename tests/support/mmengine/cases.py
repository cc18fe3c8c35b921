"""The work of the ranks of test_wrappers.py: each case asserts on every rank."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import pickle
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel

import pyparallel
from pyparallel import DataContainer, collate, mmengine
from pyparallel.core import errors
from pyparallel.mmengine import MMSeparateDistributedDataParallel as Separate
from pyparallel.mmengine import _upstream
from tests.support.mmengine.training import (
    SAMPLES,
    Net,
    alone,
    batch,
    deviation,
    gradients,
    recorded,
    sgd,
    values,
)
from tests.support.ranks.distributed_ranks import case, equal_on_all, from_all

EACH = [[number] for number in range(20)]
GROUPS = [[0, 1, 2], [3, 4, 5], [6, 7]]


# ---------------------------------------------------------- MMDistributedDataParallel
@case
def plain(rank: int, world: int) -> None:
    """Twenty steps compared with one process and the whole batch."""
    options: dict[str, Any] = {
        "plain": {},
        "given devices": {"device_ids": [rank], "output_device": rank},
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    }
    for name, kwargs in options.items():
        net = Net(unused=name == "unused")
        expected = alone(net.body, world, EACH)
        model = mmengine.MMDistributedDataParallel(net, **kwargs)
        assert mmengine.is_model_wrapper(model)
        optimizer = sgd(model)
        record = recorded(net.body, optimizer)
        wrapper = mmengine.OptimWrapper(optimizer)
        for number in range(20):
            logged = model.train_step(batch(number, world, rank), wrapper)
        assert deviation(record, expected) < 1e-6, name
        assert equal_on_all(values(net))
        assert list(logged) == ["loss", "loss_square", "acc"]
        assert type(logged["loss"]) is torch.Tensor
        assert not logged["loss"].requires_grad


@case
def accumulation(rank: int, world: int) -> None:
    """Eight micro-steps in groups of three; the last of each group reduces."""
    net = Net()
    expected = alone(net.body, world, GROUPS)
    model = mmengine.MMDistributedDataParallel(net)
    reductions: list[int] = []
    now = 0

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses strings
        reductions.append(now)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, reduce)
    optimizer = sgd(model)
    record = recorded(net.body, optimizer)
    wrapper = mmengine.OptimWrapper(optimizer, accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 8)
    steps = []
    for now in range(1, 9):
        factor = 1 / wrapper.scale_loss(torch.ones(())).item()
        assert round(factor) == (3 if now < 7 else 2)
        before = len(record)
        model.train_step(batch(now - 1, world, rank), wrapper)
        steps += [now] * (len(record) - before)
        assert equal_on_all(gradients(net)) == (now in (3, 6, 8))
    assert steps == reductions == [3, 6, 8]
    assert deviation(record, expected) < 1e-6


def twenty_steps(rank: int, world: int, cls: Any, **settings: Any) -> Any:
    """Return the gradients and values of steps with this optimizer wrapper."""
    net = Net()
    model = mmengine.MMDistributedDataParallel(net)
    optimizer = sgd(model)
    record = recorded(net.body, optimizer)
    wrapper = cls(optimizer=optimizer, **settings)
    for number in range(20):
        model.train_step(batch(number, world, rank), wrapper)
    return record


@case
def clipping(rank: int, world: int) -> None:
    ways: list[tuple[dict[str, Any], Any]] = [
        ({"max_norm": 0.2}, norm_clip),
        (
            {"type": "value", "clip_value": 0.02},
            functools.partial(nn.utils.clip_grad_value_, clip_value=0.02),
        ),
    ]
    for setting, clip in ways:
        record = twenty_steps(rank, world, mmengine.OptimWrapper, clip_grad=setting)
        assert deviation(record, alone(Net().body, world, EACH, clip)) < 1e-6
        assert deviation(record, alone(Net().body, world, EACH)) > 1e-2


@case
def amp(rank: int, world: int) -> None:
    """Compare bfloat16 with one process: each rank's part, and the whole batch."""
    kind, bfloat16 = mmengine.AmpOptimWrapper, torch.bfloat16
    record = twenty_steps(rank, world, kind, dtype="bfloat16", loss_scale=1.0)
    # One process that runs the parts in sequence rounds as the ranks do.
    by_parts = alone(Net().body, world, EACH, dtype=bfloat16, parts=world)
    assert deviation(record, by_parts) < 1e-6
    # On the whole batch a sum in bfloat16 (8 bits) is rounded once, and not by each
    # rank; twenty steps with momentum add that up.
    assert deviation(record, alone(Net().body, world, EACH, dtype=bfloat16)) < 0.03
    assert 1e-4 < deviation(record, alone(Net().body, world, EACH)) < 0.1


class Foreign(nn.Module):
    """A preprocessor that does not support DataContainers."""

    def forward(self, data: Any, training: bool = False) -> Any:
        return {**data, "inputs": data["inputs"] * 2}


class AsTuple(nn.Module):
    def forward(self, data: Any, training: bool = False) -> Any:
        return data["inputs"], data["targets"]


class AsNothing(nn.Module):
    def forward(self, data: Any, training: bool = False) -> Any:
        return 3


def raised(error: type[Exception], call: Any, *args: Any) -> str:
    try:
        call(*args)
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


@case
def batches(rank: int, world: int) -> None:
    """Open DataContainers for every step, and pass on the result of preprocessors."""
    samples = [
        {
            "inputs": DataContainer(torch.ones(5), stack=True, pad_dims=None),
            "targets": DataContainer(torch.ones(3), stack=True, pad_dims=None),
        }
        for _ in range(SAMPLES)
    ]
    contained = collate(samples, SAMPLES)
    losses = {}
    for preprocessor in (None, Foreign(), AsTuple()):
        net = Net(preprocessor)
        model = mmengine.MMDistributedDataParallel(net)
        wrapper = mmengine.OptimWrapper(sgd(model))
        losses[type(preprocessor)] = [
            model.train_step(data, wrapper)["loss_square"].item()
            for data in (contained, batch(0, world, rank))
        ]
        assert net.seen == [("Tensor", "loss")] * 2
        if isinstance(preprocessor, AsTuple):
            continue
        with torch.no_grad():
            inputs = torch.ones(SAMPLES, 5) * (1 if preprocessor is None else 2)
            expected = net.body(inputs)
            for predict in (model.val_step, model.test_step):
                assert torch.equal(predict({"inputs": contained["inputs"]}), expected)
        assert net.seen[2:] == [("Tensor", "predict")] * 2
    assert losses[AsTuple] == losses[type(None)]
    assert raised(TypeError, model.train_step, contained, sgd(model)) == (
        "MMDistributedDataParallel.train_step: optim_wrapper must be an OptimWrapper, "
        "but is torch.optim.sgd.SGD. Write OptimWrapper(optimizer)."
    )
    model = mmengine.MMDistributedDataParallel(Net(AsNothing()))
    wrapper = mmengine.OptimWrapper(sgd(model))
    assert raised(TypeError, model.train_step, {}, wrapper) == (
        "MMDistributedDataParallel: data_preprocessor must return a dict, a list or a "
        "tuple of arguments, but returned int."
    )


class OwnStep(Net):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        raise ZeroDivisionError


@case
def own_steps(rank: int, world: int) -> None:
    """Warn, once, of a step that the wrappers do not call."""
    kinds = [mmengine.MMDistributedDataParallel, mmengine.MMFullyShard]
    for cls, net in itertools.product(kinds, (Net, OwnStep)):
        model: Any = cls(net())
        name = cls.__name__
        expected = [
            f"[PP304] {name}: train_step of {type(model.module).__name__} must be "
            f"called to have an effect, but {name} calls forward(mode='loss') and "
            f"parse_losses instead. Override train_step in a subclass of {name}."
        ]
        found = warned(model, rank, world)
        assert found == expected * (net is OwnStep), found


def warned(model: Any, rank: int, world: int) -> list[str]:
    """Return our warnings in two steps."""
    errors._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(2):
            wrapper = mmengine.OptimWrapper(sgd(model))
            model.train_step(batch(number, world, rank), wrapper)
    texts = [str(each.message) for each in found]
    return [text for text in texts if text.startswith("[PP")]


class OldStep(Net):
    """A model of mmcv's protocol, whose caller has another step."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return self(**data, mode="loss")["loss_square"]


class OldCaller(pyparallel.MMDistributedDataParallel):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        optim_wrapper.update_params(super().train_step(data, optim_wrapper))


@case
def unfrozen(rank: int, world: int) -> None:
    """Warn, once, of a parameter that DDP leaves out and that is trained later."""
    kinds = [mmengine.MMDistributedDataParallel, Separate, OldCaller]
    for cls in kinds:
        net = OldStep() if cls is OldCaller else Net()
        net.body[0].requires_grad_(False)
        model: Any = cls(net)
        assert not warned(model, rank, world)
        net.requires_grad_(True)
        assert warned(model, rank, world) == [
            f"[PP305] {cls.__name__}: body.0.weight must require no gradient, as in "
            "the constructor, but requires one now. DDP does not reduce it, so each "
            "rank trains this parameter alone. Wrap the module again after "
            "requires_grad_()."
        ]
        assert not equal_on_all(values(net))
        model = cls(net)  # the advice
        assert not warned(model, rank, world)
        assert equal_on_all(values(net))


@case
def anomalies(rank: int, world: int) -> None:
    """Name the parameters without a gradient."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pyparallel.mmengine")
    if _upstream.available:
        from mmengine.logging import MMLogger

        logger = MMLogger.get_instance("anomalies", log_level="CRITICAL")
        logger.setLevel("ERROR")
    logger.addHandler(handler)
    net = Net(unused=True)
    model = mmengine.MMDistributedDataParallel(net, True, find_unused_parameters=True)
    model.train_step(batch(0, world, rank), mmengine.OptimWrapper(sgd(model)))
    assert sorted(lines) == [
        f"module.unused.{name} with shape {torch.Size(shape)} is not in the "
        "computational graph \n"
        for name, shape in (("bias", (2,)), ("weight", (2, 2)))
    ]


# -------------------------------------------------- MMSeparateDistributedDataParallel
class Model(nn.Module):
    """Two adversarial networks, a frozen and a shared child, and own parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.ones(3))  # of the generator's step
        self.shifts = nn.ParameterList([torch.zeros(3)])
        self.same_generator = self.generator
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.activation = nn.ReLU()
        self.register_module("missing", None)
        self.register_buffer("offset", torch.full((3,), 0.5))

    def fake(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.same_generator(inputs) * self.scale + self.shifts[0]
        return self.frozen(made + self.offset)

    def critic_loss(self, data: Any) -> torch.Tensor:
        fake = self.critic(self.fake(data["inputs"]).detach())
        return (fake - self.critic(data["targets"])).square().mean()

    def generator_loss(self, data: Any) -> torch.Tensor:
        return self.critic(self.fake(data["inputs"])).square().mean()

    def made_parameters(self) -> list[nn.Parameter]:
        return [*self.generator.parameters(), self.scale, *self.shifts]

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        with optim_wrapper["critic"].optim_context(self.critic):
            critic_loss = self.critic_loss(data)
        optim_wrapper["critic"].update_params(critic_loss)
        self.critic.requires_grad_(False)
        with optim_wrapper["generator"].optim_context(self.generator):
            generator_loss = self.generator_loss(data)
        optim_wrapper["generator"].update_params(generator_loss)
        self.critic.requires_grad_(True)
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

    def val_step(self, data: Any) -> Any:
        return self.fake(data["inputs"])

    test_step = val_step


def optimizers(model: Model) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.SGD(model.critic.parameters(), lr=0.05),
        "generator": torch.optim.SGD(model.made_parameters(), lr=0.1, momentum=0.9),
    }


def wrappers(
    optimizers: dict[str, torch.optim.Optimizer], every: int, total: int
) -> mmengine.OptimWrapperDict:
    made = {
        name: mmengine.OptimWrapper(optimizer, accumulative_counts=every)
        for name, optimizer in optimizers.items()
    }
    for wrapper in made.values():
        wrapper.initialize_count_status(None, 0, total)
    return mmengine.OptimWrapperDict(**made)


def adversaries_alone(
    model: Model, world: int, groups: list[list[int]]
) -> torch.Tensor:
    """Return the values after training in one process; the model does not change."""
    model = copy.deepcopy(model)
    both = optimizers(model)
    for group in groups:
        for number in group:
            data = batch(number, world)
            (model.critic_loss(data) / len(group)).backward()
            if number == group[-1]:
                both["critic"].step()
                both["critic"].zero_grad()
            model.critic.requires_grad_(False)
            (model.generator_loss(data) / len(group)).backward()
            model.critic.requires_grad_(True)
        both["generator"].step()
        both["generator"].zero_grad()
    return all_values(model)


def all_values(model: nn.Module) -> torch.Tensor:
    tensors = [*model.parameters(), *model.buffers()]
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def by_pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@case
def adversaries(rank: int, world: int) -> None:
    """Compare two optimizers with one process, also of buffers and frozen children."""
    copied: list[Any] = [copy.copy, copy.deepcopy, by_pickle]
    for groups, made in ((EACH, None), *((GROUPS, each) for each in (None, *copied))):
        model = Model()
        expected = adversaries_alone(model, world, groups)
        with torch.no_grad():  # which the constructor has to undo
            for each in (*model.parameters(), *model.buffers()):
                each.add_(rank)
        wrapped = Separate(model, device_ids=[rank])
        if made is not None:
            wrapped = made(wrapped)
            model = wrapped.module
        both = optimizers(model)
        total = sum(map(len, groups))
        wrapper = wrappers(both, len(groups[0]), total)
        for number in range(total):
            logged = wrapped.train_step(batch(number, world, rank), wrapper)
        assert (all_values(model) - expected).abs().max() < 1e-6
        assert equal_on_all(all_values(model))
        assert list(logged) == ["critic", "generator"]


@case
def structure(rank: int, world: int) -> None:
    """One wrapper for each trained child, with the state keys of mmengine."""
    model = Model()
    wrapped = Separate(model, find_unused_parameters=True, detect_anomalous_params=True)
    ddp = "MMDistributedDataParallel"
    assert {name: type(each).__name__ for name, each in model._modules.items()} == {
        "generator": ddp,
        "critic": ddp,
        "shifts": "ParameterList",
        "same_generator": ddp,
        "frozen": "Linear",
        "activation": "ReLU",
        "missing": "NoneType",
    }
    assert model.generator is model.same_generator
    assert model.critic.find_unused_parameters and model.critic.detect_anomalous_params
    old = vars(model.critic).get("broadcast_buffers")  # before torch 2.13
    assert vars(model.critic).get("forward_sync_buffers", old) is False
    layers = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(wrapped.state_dict()) == [
        "module.scale",
        "module.offset",
        *[f"module.generator.module.{each}" for each in layers],
        *[f"module.critic.module.{each}" for each in layers],
        "module.shifts.0",
        *[f"module.same_generator.module.{each}" for each in layers],
        "module.frozen.weight",
        "module.frozen.bias",
    ]
    data = {"inputs": DataContainer([torch.ones(2, 5)], stack=True)}
    with torch.no_grad():
        expected = model.fake(torch.ones(2, 5))
        assert torch.equal(wrapped.val_step(data), expected)
        assert torch.equal(wrapped.test_step(data), expected)
    for mode in (False, True):
        wrapped.train(mode)
        assert {wrapped.training, model.training, model.critic.module[0].training} == {
            mode
        }
    assert raised(NotImplementedError, wrapped, torch.ones(1)) == (
        "MMSeparateDistributedDataParallel: forward must be called on one child, but "
        "was called on the whole model. Call train_step, val_step or test_step."
    )
    assert mmengine.is_model_wrapper(wrapped)
    assert not mmengine.is_model_wrapper(wrapped.module)


class Pair(nn.Module):
    """Has two children and its own parameter; the loss uses all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 1)
        self.own = nn.Parameter(torch.ones(2))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return self.other(self.one(data) * self.own).square().sum()


@case
def no_sync(rank: int, world: int) -> None:
    """Let the next pass outside of no_sync make up for a pass inside."""
    model = Pair()
    wrapped = Separate(model)
    data = torch.full((1, 2), 1.0 + rank)
    with wrapped.no_sync():
        assert not model.one.require_backward_grad_sync
        assert not model.other.require_backward_grad_sync
        wrapped.train_step(data, None).backward()
    inside = [from_all(p.grad.clone()) for p in model.parameters()]
    wrapped.train_step(data, None).backward()
    assert model.one.require_backward_grad_sync
    assert model.other.require_backward_grad_sync
    for parameter, parts in zip(model.parameters(), inside, strict=True):
        assert not torch.equal(*parts[:2])
        mean = sum(parts, torch.zeros(())) / world
        torch.testing.assert_close(parameter.grad, 2 * mean, rtol=1e-5, atol=1e-8)


# ------------------------------------------------------------------- sharded models
def train_sharded(
    rank: int, world: int, model: Any, groups: Any, **settings: Any
) -> list[bool]:
    """Train; return the micro-steps without reduced gradients."""
    wrapper = mmengine.OptimWrapper(sgd(model), len(groups[0]), **settings)
    total = sum(map(len, groups))
    wrapper.initialize_count_status(model, 0, total)
    kept = []
    for number in range(total):
        model.train_step(batch(number, world, rank), wrapper)
        kept.append(all(p.grad is None for p in model.parameters()))
    return kept


def has_three(module: Any) -> bool:
    return len(list(module.children())) == 3


def norm_clip(parameters: Any) -> Any:
    return nn.utils.clip_grad_norm_(parameters, max_norm=0.2)


def skips_together(model: Any, rank: int) -> None:
    """Skip a step on all ranks if the part of the first one is not finite."""
    wrapper = mmengine.AmpOptimWrapper(optimizer=sgd(model))
    before = [each.detach().clone() for each in model.parameters()]
    wrapper.loss_scaler.scale(torch.ones(()))
    for each in model.parameters():
        each.grad = torch.full_like(each, float("inf") if rank == 0 else 1.0)
    wrapper.step()
    assert wrapper.loss_scaler.get_scale() == 2**15
    assert all(map(torch.equal, model.parameters(), before))


@case
def fully_shard(rank: int, world: int) -> None:
    """FSDP2 compared with one process."""
    steps = [[number] for number in range(6)]
    clip = {"clip_grad": {"max_norm": 0.2}}
    plans: list[tuple[Any, ...]] = [
        (steps, {}, None, {}),
        (steps, {"shard": ["body.0", "body.2"]}, None, {}),
        (steps, {"shard": "Linear"}, None, {}),
        (steps, {"shard": has_three}, None, {}),
        (GROUPS, {"shard": ["Linear"]}, None, {}),
        (steps, {}, norm_clip, clip),
    ]
    for groups, options, clipped, settings in plans:
        net = Net()
        expected = alone(net.body, world, groups, clipped)[-1][1]
        model = mmengine.MMFullyShard(net, **options)
        kept = train_sharded(rank, world, model, groups, **settings)
        # Reduced gradients are in ``grad``; a step at the end of a group uses them.
        assert groups is steps or kept == [True] * 8
        parts = [p.detach().full_tensor().reshape(-1) for p in model.parameters()]
        assert (torch.cat(parts) - expected).abs().max() < 1e-6, options
        assert next(model.parameters()).to_local().numel() == 15  # half of the weight
        inputs = {"inputs": batch(9, world, rank)["inputs"]}
        with torch.no_grad():
            assert model.val_step(inputs).shape == (4, 3)
            assert model.test_step(inputs).shape == (4, 3)
        names = ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert list(model.state_dict()) == [f"module.body.{name}" for name in names]
        assert mmengine.is_model_wrapper(model)
    skips_together(model, rank)


@case
def fsdp(rank: int, world: int) -> None:
    """Compare the older FSDP with one process, on the CPU if selected."""
    for groups in ([[number] for number in range(6)], GROUPS):
        net = Net()
        expected = alone(net.body, world, groups)[-1][1]
        model = mmengine.MMFullyShardedDataParallel(
            net,
            device_id="cpu",
            sharding_strategy="FULL_SHARD",
            backward_prefetch="BACKWARD_PRE",
            auto_wrap_policy={
                "type": "torch.distributed.fsdp.wrap.size_based_auto_wrap_policy",
                "min_num_params": 30,
            },
        )
        train_sharded(rank, world, model, groups)
        kinds = [isinstance(each, FullyShardedDataParallel) for each in model.modules()]
        assert sum(kinds) == 2 and mmengine.is_model_wrapper(model)
        with torch.no_grad():
            predicted = model.val_step({"inputs": batch(9, world, rank)["inputs"]})
        assert predicted.shape == (4, 3)
        with FullyShardedDataParallel.summon_full_params(model):
            assert (values(model) - expected).abs().max() < 1e-6
    skips_together(model, rank)
