"""Batches of `Collate` in accelerate, Lightning, transformers, attrs and pydantic."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import pyparallel
from pyparallel import Collate, Concat, List, Pad, Padded, PreDataLoader, Ragged

try:
    import accelerate
    import attrs
    import lightning
    import pydantic
    from accelerate.utils import send_to_device
    from lightning.fabric.utilities import move_data_to_device
    from transformers import (
        DataCollatorWithFlattening,
        LlamaConfig,
        LlamaForCausalLM,
    )
except ImportError as error:
    pytest.skip(f"needs the peers: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    # Both packages, and torch on their behalf, use deprecated interfaces.
    pytest.mark.filterwarnings("default"),
]

RULES = Collate(image=Pad(size_divisor=4, mask=True), boxes=Concat(), name=List())
SAMPLES = [
    {
        "image": torch.full((3, 4 + i, 9 - i), float(i)),
        "boxes": torch.full((i % 3, 4), float(i)),
        "name": f"number {i}",
        "id": i,
    }
    for i in range(8)
]
#: The batches; test_collate_fields.py compares `Collate` with torch's functions.
EXPECTED = [RULES(SAMPLES[:4]), RULES(SAMPLES[4:])]


def assert_equal(found: Any, expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert (type(found["image"]), type(found["boxes"])) == (Padded, Ragged)
    for name in ("image", "boxes", "name"):
        assert found[name] == expected[name]
    assert torch.equal(found["id"], expected["id"])


@pytest.mark.parametrize("loader", [pyparallel.DataLoader, TorchLoader])
def test_accelerate_prepares_the_loader(loader: Callable[..., Any]) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(
        loader(SAMPLES, batch_size=4, num_workers=2, collate_fn=RULES)
    )
    for found, expected in zip(prepared, EXPECTED, strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("send", [send_to_device, move_data_to_device])
def test_every_tensor_is_sent_to_the_device(send: Callable[..., Any]) -> None:
    sent = send(EXPECTED[0], torch.device("meta"))
    assert (type(sent["image"]), type(sent["boxes"])) == (Padded, Ragged)
    assert sent["name"] == EXPECTED[0]["name"]
    tensors = [*sent["image"].fields(), *sent["boxes"].fields(), sent["id"]]
    assert [str(each.device) for each in tensors] == ["meta"] * 6


@attrs.frozen
class OfAttrs:
    """A frozen class of attrs with a validator, and with slots."""

    image: torch.Tensor
    id: int = attrs.field(validator=attrs.validators.instance_of(int))


class OfPydantic(pydantic.BaseModel):
    """A frozen model of pydantic."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, frozen=True)

    image: torch.Tensor
    id: int


@pytest.mark.parametrize("make", [OfAttrs, OfPydantic])
def test_samples_of_other_libraries_keep_their_class(make: Any) -> None:
    samples = [make(image=each["image"], id=each["id"]) for each in SAMPLES[:4]]
    batch = Collate(image=Pad(size_divisor=4, mask=True))(samples)
    (moved,) = PreDataLoader([batch], "cpu")
    for each in (batch, moved):
        assert type(each) is make and "image=Padded(data=(4, 3, 8, 12)" in repr(each)
        assert each.image == EXPECTED[0]["image"]
        assert torch.equal(each.id, EXPECTED[0]["id"])


class Model(lightning.LightningModule):
    """A model that keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Conv2d(3, 1, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.batches.append(batch)
        loss: torch.Tensor = self.net(batch["image"].data).mean()
        self.log("loss", loss, batch_size=len(batch["image"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("loader", [pyparallel.DataLoader, TorchLoader])
def test_lightning_trains_on_the_loader(loader: Callable[..., Any]) -> None:
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(SAMPLES, batch_size=4, num_workers=2, collate_fn=RULES))
    for found, expected in zip(model.batches, EXPECTED, strict=True):
        assert_equal(found, expected)


def texts_of(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(0, 5))] + [1]
    names = ["input_ids", "labels"][: 1 + seed % 2]
    make: Any = torch.LongTensor if seed % 3 else list
    texts = [
        {n: make([rng.randrange(50) for _ in range(k)]) for n in names}
        | {"attention_mask": make([1] * k)}
        for k in lengths
    ]
    return rng.sample(texts, len(texts))


def test_texts_without_padding_are_those_of_transformers() -> None:
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    for seed in range(200):
        texts = texts_of(seed)
        expected, found = theirs(texts), Collate(padding_free=True)(texts)
        assert set(found) == set(expected)
        for name, each in found.items():
            assert type(each) is type(expected[name])
            if isinstance(each, int):
                assert each == expected[name]
            else:
                assert each.dtype == expected[name].dtype
                assert torch.equal(each, expected[name])


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_transformers_needs_no_padding(kernel: str) -> None:
    torch.manual_seed(0)
    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=50, num_attention_heads=2, attn_implementation=kernel, **options
    )
    model = LlamaForCausalLM(config).eval()
    samples = [{"input_ids": list(range(i, 3 * i + 2))} for i in range(1, 5)]
    padded = Collate(input_ids=Pad(mask=True))(samples)["input_ids"]
    mask = padded.mask.long()
    labels = padded.data.masked_fill(~padded.mask, -100)
    expected = model(input_ids=padded.data, attention_mask=mask, labels=labels)
    found = model(**Collate(padding_free=True)(samples), use_cache=False)
    torch.testing.assert_close(found.logits[0], expected.logits[padded.mask])
    torch.testing.assert_close(found.loss, expected.loss)
