"""Cases for the operators: native, pure Python, and expected bytes by numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.support.batch import raw_bytes
from tests.support.fuzzing.fuzzed import Numbers
from tests.support.processes.backends import native, reference

#: The available backends.
BACKENDS: list[ModuleType] = [each for each in (native, reference) if each]
MOST = 2**63 - 1


def tensor(
    numbers: Numbers, rng: np.random.Generator, shape: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, np.ndarray]:
    """Return a tensor of random bytes in some layout, and its items."""
    items = raw_bytes.random_items(rng, shape, dtype)
    return raw_bytes.lay_out(rng, items, dtype, numbers.choose(raw_bytes.LAYOUTS))


def generator(numbers: Numbers) -> np.random.Generator:
    """Return the random generator for the contents of a case."""
    return np.random.default_rng(numbers.between(0, 2**16))


def outcome(call: Any, *args: Any) -> tuple[Any, str]:
    """Return the result of a call, or its exception."""
    try:
        return call(*args), ""
    except (TypeError, ValueError, OverflowError) as error:
        return None, f"{type(error).__name__}: {error}"


def sizes(numbers: Numbers, count: int, most: int = 5) -> tuple[int, ...]:
    """Draw a shape; a tenth of the sizes are 0."""
    most = most if count < 4 else min(most, 3)
    return tuple(
        0 if numbers.maybe(10) else numbers.between(1, most) for _ in range(count)
    )


def raw(numbers: Numbers) -> int:
    """Return any 64-bit number, often a critical one for arithmetic."""
    kind = numbers.between(0, 4)
    if kind == 0:
        return numbers.between(0, 9)
    if kind == 1:
        return min(MOST, 2 ** numbers.between(20, 63) + numbers.between(-1, 1))
    if kind == 2:
        return MOST - numbers.between(0, 130)
    if kind == 3:
        return -numbers.between(0, 2**63)
    return numbers.between(0, MOST)


def moved(
    numbers: Numbers, start: Sequence[int], shape: Sequence[int], target: Sequence[int]
) -> tuple[tuple[int, ...], bool]:
    """Move a start along one dimension; return it, and True if the sample fits."""
    dim = numbers.between(0, len(start) - 1)
    index = raw(numbers)
    fits = 0 <= index <= target[dim] - shape[dim]
    return (*start[:dim], index, *start[dim + 1 :]), fits


def pad_copies(numbers: Numbers) -> None:
    """Copy samples of up to 5 dimensions; some starts are out of bounds."""
    rng, dtype = generator(numbers), numbers.choose(raw_bytes.DTYPES)
    ndim, count = numbers.between(0, 5), numbers.between(0, 4)
    target = sizes(numbers, ndim)
    placed = numbers.maybe() and ndim > 0
    samples, items, starts = [], [], []
    for _ in range(count):
        shape = tuple(numbers.between(0, size) for size in target)
        sample, its = tensor(numbers, rng, shape, dtype)
        samples.append(sample)
        items.append(its)
        room = zip(target, shape, strict=True)
        starts.append(tuple(numbers.between(0, a - b) for a, b in room))
    good = True
    if placed and count and numbers.maybe(8):
        at = numbers.between(0, count - 1)
        starts[at], good = moved(numbers, starts[at], samples[at].shape, target)
    num_fills = numbers.choose([1, count]) if count else 1
    fills = raw_bytes.random_items(rng, (num_fills,), dtype).tobytes()
    masked = numbers.between(0, ndim)
    texts = []
    for backend in BACKENDS:
        dst = raw_bytes.poisoned((count, *target), dtype)
        shape = (count, *target[ndim - masked :])
        mask = raw_bytes.poisoned(shape, torch.uint8).view(torch.bool)
        before = raw_bytes.bytes_of(dst), raw_bytes.bytes_of(mask)
        args = (dst, samples, fills, starts if placed else None)
        _, text = outcome(backend.pad_copy, *args, mask if masked else None)
        texts.append(text)
        found = raw_bytes.bytes_of(dst), raw_bytes.bytes_of(mask)
        if not good:
            assert found == before, "written before it was checked"
            continue
        assert not text, text
        places = starts if placed else None
        right = raw_bytes.padded(target, items, fills, dtype.itemsize, places)
        assert found[0] == right
        if masked:
            assert found[1] == raw_bytes.marked(shape, items, places)
    assert (texts[0] == "") is good and len(set(texts)) == 1, texts


def slabs(numbers: Numbers) -> None:
    """Leaves of any dtypes, packed into a slab with old content."""
    rng = generator(numbers)
    leaves, items = [], []
    for _ in range(numbers.between(0, 6)):
        dtype = numbers.choose(raw_bytes.DTYPES)
        shape = sizes(numbers, numbers.between(0, 4))
        leaf, its = tensor(numbers, rng, shape, dtype)
        leaves.append(leaf)
        items.append(its)
    right = b""
    offsets = []
    for its in items:
        offsets.append(len(right))
        right += its.tobytes()
        right += bytes(-len(right) % 64)
    for backend in BACKENDS:
        plan = backend.plan_slab(leaves)
        assert list(plan.offsets) == offsets and plan.nbytes == len(right)
        slab = raw_bytes.poisoned((plan.nbytes,), torch.uint8)
        backend.pack(slab, leaves, plan)
        assert raw_bytes.bytes_of(slab) == right
        views = backend.views(slab, plan)
        for view, leaf, its in zip(views, leaves, items, strict=True):
            assert (view.dtype, view.shape) == (leaf.dtype, leaf.shape)
            assert view.is_contiguous()
            assert raw_bytes.bytes_of(view) == its.tobytes()


def plans(numbers: Numbers) -> None:
    """Plans with sizes beyond any memory, from leaves and from arbitrary numbers."""
    dtypes = [numbers.choose(raw_bytes.DTYPES) for _ in range(numbers.between(0, 4))]
    shapes = []
    for _ in dtypes:
        dims = numbers.between(0, 5)
        shapes.append([raw(numbers) if numbers.maybe(3) else dims for _ in range(dims)])
    offsets, end, good = [], 0, True
    for shape, dtype in zip(shapes, dtypes, strict=True):
        start = -(-end // 64) * 64 + 64 * numbers.between(0, 1)
        offsets.append(raw(numbers) if numbers.maybe(6) else start % 2**63)
        nbytes = math.prod(shape) * dtype.itemsize
        good &= all(size >= 0 for size in shape)
        good &= offsets[-1] >= end and offsets[-1] % 64 == 0
        good &= offsets[-1] + nbytes <= MOST
        end = offsets[-1] + nbytes
    whole = -(-end // 64) * 64 % 2**63
    nbytes = raw(numbers) if numbers.maybe(6) else whole
    good &= nbytes >= end and nbytes % 64 == 0
    made = [outcome(b.SlabPlan, offsets, shapes, dtypes, nbytes) for b in BACKENDS]
    same_plans(made, good, tuple(offsets), nbytes)
    if all(size >= 0 for shape in shapes for size in shape):
        leaf_plans(shapes, dtypes)


def leaf_plans(shapes: list[list[int]], dtypes: list[torch.dtype]) -> None:
    leaves, offsets, end = [], [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        if math.prod(size for size in shape if size) * dtype.itemsize > MOST:
            return  # torch cannot represent such a tensor
        leaves.append(torch.empty((), dtype=dtype).expand(shape))
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // 64) * 64
    made = [outcome(backend.plan_slab, leaves) for backend in BACKENDS]
    same_plans(made, end <= MOST, tuple(offsets), end)


def same_plans(made: Any, good: bool, offsets: tuple[int, ...], nbytes: int) -> None:
    texts = {text for _, text in made}
    assert len(texts) == 1 and (texts == {""}) is good, texts
    for plan, _ in made:
        assert plan is None or (plan.offsets, plan.nbytes) == (offsets, nbytes)


MAGIC = 0x5050_5249_4E47_0001
LINE = 8  # words


def headers(numbers: Numbers) -> None:
    """Arbitrary bytes as the header of a ring, as written by another process."""
    num_slots = numbers.between(1, 6)
    words = [0] * (LINE * (1 + num_slots))
    words[:3] = [MAGIC, num_slots, numbers.between(1, 2)]
    for slot in range(num_slots):
        words[LINE * (1 + slot)] = numbers.choose([0, 1, 2, raw(numbers)])
    for _ in range(numbers.between(0, 2)):
        last = 2 if numbers.maybe() else len(words) - 1
        words[numbers.between(0, last)] = numbers.choose(
            [0, 1, 2, 3, MAGIC, num_slots + 1, raw(numbers)]
        )
    nbytes = 64 * (1 + num_slots)
    if numbers.maybe(6):
        nbytes = numbers.between(0, nbytes)
    start = numbers.between(0, 64) if numbers.maybe(6) else 0
    right_size = nbytes % 64 == 0 and nbytes > 64 and start % 64 == 0
    good = right_size and words[:2] == [MAGIC, nbytes // 64 - 1] and words[2] in (1, 2)
    left = np.array(words, dtype=np.int64).tobytes()
    # torch allocates at multiples of 64 bytes.
    memory = [torch.zeros(1024, dtype=torch.uint8) for _ in BACKENDS]
    memory = [each[start : start + nbytes] for each in memory]
    for each in memory:
        each.numpy()[:] = np.frombuffer(left, dtype=np.uint8)[:nbytes]
    words = words[: nbytes // 8]
    for _ in range(numbers.between(1, 5)):
        name, args = draw_ring_call(numbers, num_slots)
        before = [raw_bytes.bytes_of(each) for each in memory]
        calls = zip(BACKENDS, memory, strict=True)
        done = [outcome(getattr(each, name), header, *args) for each, header in calls]
        assert len({repr(each) for each in done}) == 1, done
        value, text = done[0]
        assert (text == "") is (good and may_call(len(words), name, args)), text
        if not text:
            assert value == on_words(words, name, args)
        right = np.array(words, dtype=np.int64).tobytes() if good else before[0]
        for header, was in zip(memory, before, strict=True):
            assert raw_bytes.bytes_of(header) == (was if text else right)


def draw_ring_call(numbers: Numbers, num_slots: int) -> tuple[str, tuple[int, ...]]:
    name = numbers.choose(["ring_holders", "ring_pass", "ring_pass", "ring_reclaim"])

    def number(good: int) -> int:
        return raw(numbers) if numbers.maybe(8) else good

    holder = number(numbers.between(1, 2))
    if name == "ring_pass":
        slot = number(numbers.between(0, num_slots - 1))
        return name, (slot, holder, number(numbers.between(0, 2)))
    return name, ((holder,) if name == "ring_reclaim" else ())


def may_call(num_words: int, name: str, args: tuple[int, ...]) -> bool:
    if name == "ring_pass":
        slot, holder, to = args
        return 0 <= slot < num_words // LINE - 1 and holder >= 1 and to >= 0
    return name == "ring_holders" or args[0] >= 1


def on_words(words: list[int], name: str, args: tuple[int, ...]) -> Any:
    """Model an operator on the header of a ring with a list; return its result."""
    places = range(LINE, len(words), LINE)
    if name == "ring_holders":
        return [words[at] for at in places]
    if name == "ring_reclaim":
        found = [slot for slot, at in enumerate(places) if words[at] == args[0]]
        for slot in found:
            words[places[slot]] = 0
        return found
    slot, holder, to = args
    if words[places[slot]] != holder:
        return False
    words[places[slot]] = to
    return True
