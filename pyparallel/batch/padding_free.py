"""Batches of texts without padding, as the attention of transformers takes them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import BatchTypeError, BatchValueError, EmptyBatchError, type_name
from .ragged import Ragged
from .rules import Concat

#: The fields of a batch that are concatenated.
TEXTS = ("input_ids", "labels")
#: The fields of a sample that a batch without padding has no use for.
_REPLACED = ("attention_mask", "position_ids")
#: The label that the loss ignores.
_IGNORED = -100


def padding_free_rules(rules: Container[str]) -> dict[str, Concat]:
    """Return the rules of the texts; raise if the caller has rules for them."""
    for name in (*TEXTS, *_REPLACED):
        if name in rules:
            raise BatchValueError(
                f"Collate, padding_free=True: {name!r} must have no rule, but has one. "
                "Remove the rule, or padding_free."
            )
    return {name: Concat() for name in TEXTS}


def with_labels(batch: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the samples with labels, and without the fields that are replaced.

    If no sample has labels, they are the ids of the tokens: the models shift them.
    """
    for i, sample in enumerate(batch):
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            found = type_name(sample)
            if isinstance(sample, Mapping):
                found += f" with {', '.join(map(repr, sample))}"
            raise BatchTypeError(
                f"Collate, padding_free=True: batch[{i}] must be a dict with "
                f"'input_ids', but is {found}. Return the ids of the tokens by this "
                "name."
            )
    samples = [{k: x[k] for k in x if k not in _REPLACED} for x in batch]
    if not any("labels" in sample for sample in samples):
        samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
    return samples


def add_arguments(batch: dict[str, Any], texts: Mapping[str, Ragged]) -> None:
    """Make the texts of a batch one row, and add the arguments of attention.

    Raises:
        ValueError: no tokens, or texts and labels of different lengths.
    """
    ids, labels = (texts[name] for name in TEXTS)
    lengths = [each.lengths().tolist() for each in (ids, labels)]
    rests = [each.values.shape[1:] for each in (ids, labels)]
    for i, (expected, found) in enumerate(zip(*lengths, strict=True)):
        if rests[0]:
            raise BatchValueError(
                f"Collate, padding_free=True: batch[{i}]['input_ids'] must be a "
                f"vector, but has shape {(expected, *rests[0])}. Return vectors from "
                "the data set."
            )
        if found != expected or rests[1]:
            raise BatchValueError(
                f"Collate, padding_free=True: batch[{i}]['labels'] must have the shape "
                f"of batch[{i}]['input_ids'], but has shape {(found, *rests[1])} where "
                f"{(expected,)} was expected. Return one label for each token."
            )
    limits = ids.cu_seqlens.unique_consecutive()  # without samples that are empty
    if len(limits) < 2:
        raise EmptyBatchError(
            "Collate, padding_free=True: batch must have at least one token, but all "
            f"{len(ids)} samples are empty. Remove empty samples from the data set."
        )
    for name, each in (("input_ids", ids.values), ("labels", labels.values)):
        # Files of tokens have bytes or torch.uint16, which cannot hold -100.
        is_integer = not each.is_floating_point()
        batch[name] = (each.to(torch.int64) if is_integer else each)[None]
    batch["labels"][0, limits[:-1].long()] = _IGNORED
    batch["position_ids"] = ids.position_ids[None]
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = limits
    batch["max_length_q"] = batch["max_length_k"] = max(lengths[0])
