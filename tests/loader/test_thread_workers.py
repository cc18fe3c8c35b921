"""Workers that are threads: shared data sets, memory, seeds, errors and forks."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import sysconfig
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

import pyparallel
from pyparallel import DataLoader, PreDataLoader, sample_random
from pyparallel.core.cpu_time import GilWait, is_gil_enabled
from pyparallel.loader.findings import MUCH_GIL_WAIT
from pyparallel.transfer import debug
from tests.support.loader import resumed
from tests.support.loader.loader_sets import Making, Numbers, wait_for
from tests.support.loader.resumed import Case, continued, uninterrupted
from tests.support.processes import python_runs

pytestmark = pytest.mark.timeout(120)

HAS_GIL = is_gil_enabled()
THREADS: dict[str, Any] = {"num_workers": 2, "worker_method": "thread"}
#: Kinds of workers and numbers of them, which must all give the same.
KINDS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    THREADS,
    {**THREADS, "num_workers": 3, "persistent_workers": True},
    {**THREADS, "num_workers": 1, "prefetch_factor": 4},
]


#: The default of each argument in them.
INLINE: dict[str, Any] = {
    "num_workers": 0,
    "worker_method": "multiprocessing",
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}


@pytest.fixture(autouse=True)
def _torch_is_restored() -> Iterator[None]:
    code = torch_worker.get_worker_info.__code__
    function = torch_collate.default_collate_fn_map[torch.Tensor]
    threads = torch.get_num_threads()
    yield
    gc.collect()
    wait_for(lambda: torch_worker.get_worker_info.__code__ is code)
    assert torch_collate.default_collate_fn_map[torch.Tensor] is function
    assert torch.get_num_threads() == threads
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads]


class Shared:
    """A dataset of objects that neither pickle nor copy."""

    def __init__(self, length: int) -> None:
        self.length, self.lock, self.read = length, threading.Lock(), lambda i: i * 2
        self.file, self.seen = open(os.devnull, "rb"), set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        with self.lock:
            self.seen.add((info.id, threading.get_ident()))
        assert self.file.read(1) == b"" and torch.get_num_threads() == 1
        return torch.full((150, 150), float(self.read(index)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("it was pickled or copied")


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("wrap", [lambda each: each, PreDataLoader])
def test_threads_share_the_dataset_itself(
    options: dict[str, Any], wrap: Callable[[Any], Any]
) -> None:
    dataset = Shared(20)
    loader = wrap(DataLoader(dataset, 2, collate_fn=None, **THREADS, **options))
    for _ in range(2):
        found = [batch[:, 0, 0].tolist() for batch in loader]
        assert found == [[4.0 * i, 4.0 * i + 2] for i in range(10)]
    assert {number for number, _ in dataset.seen} == {0, 1}
    dataset.file.close()
    assert get_worker_info() is None


COLLATE = {
    "default": None,
    "inside": lambda samples: default_collate(samples),
    "collate": pyparallel.collate,
    "rules": pyparallel.Collate(),
}


@pytest.mark.parametrize("name", COLLATE)
def test_a_batch_is_written_once_into_a_recycled_slab(name: str) -> None:
    data = Numbers(30, (150, 150))
    loader = DataLoader(data, 2, collate_fn=COLLATE[name], **THREADS)
    addresses = set()
    for number, batch in enumerate(loader):
        assert batch[0].unique().tolist() == [2 * number]
        assert batch[1].unique().tolist() == [2 * number + 1]
        assert not batch.is_shared()  # it is no file of torch's
        addresses.add(batch.data_ptr())
    stats = loader.stats()
    assert (stats.ring_hits, stats.ring_misses) == (15, 0)
    assert stats.pack_cpu_seconds <= stats.collate_cpu_seconds + 1
    ring: Any = loader._receiver.ring
    assert len(addresses) <= ring.num_slabs
    del batch
    assert ring.holders() == [0] * ring.num_slabs


def test_a_slab_is_not_written_while_any_tensor_of_it_lives() -> None:
    loader = DataLoader(Numbers(40, (150, 150)), **THREADS, ring_slabs=6)
    kept, misses = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PP201: all slabs are in use
        for number, batch in enumerate(loader):
            kept.append((number, batch[0, :50, 3]))
            if number % 7 == 6:
                del kept[::2]
            for value, part in kept:
                assert part.unique().tolist() == [value]
        misses = loader.stats().ring_misses
    assert misses > 0
    del kept, batch, part
    ring: Any = loader._receiver.ring
    assert ring.holders() == [0] * 6


def test_a_tensor_that_the_dataset_keeps_stays_as_it_is() -> None:
    cache: list[torch.Tensor] = []

    def collate(samples: Any) -> Any:
        cache.append(default_collate(samples))
        return cache[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(Numbers(24, (150, 150)), collate_fn=collate, **THREADS)
        assert len(list(loader)) == 24
    values = sorted(int(each.unique().item()) for each in cache)
    assert values == list(range(24))


@pytest.mark.parametrize("offset", [-3, 90_004, 90_067])
@pytest.mark.parametrize("by", ["the thread", "the loop"])
def test_a_write_outside_of_a_batch_is_found(
    by: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)

    def write(batch: torch.Tensor, writer: str) -> None:
        if writer == by and batch[0, 0] == 3:
            ctypes.c_uint8.from_address(batch.data_ptr() + offset).value = 0

    def collate(samples: Any) -> torch.Tensor:
        batch = pyparallel.collate(samples)
        write(batch, "the thread")
        return batch

    data = Making(lambda index: torch.full((22_501,), float(index)), 40)
    loader = DataLoader(data, collate_fn=collate, **THREADS)
    with pytest.raises(RuntimeError, match="must be written within the tensors"):
        for batch in loader:
            write(batch, "the loop")
            del batch


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="its thread frees the batch later, also with the GIL",
)
def test_a_batch_of_a_thread_that_was_freed_is_poisoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debug, "poison_enabled", True)
    batches = iter(DataLoader(Numbers(4, (150, 150)), **THREADS, ring_slabs=8))
    batch = next(batches)
    memory = (ctypes.c_uint8 * batch.nbytes).from_address(batch.data_ptr())
    assert bytes(memory) == batch.numpy().tobytes()
    del batch
    assert set(bytes(memory)) == {0xDB}
    assert len(list(batches)) == 3


@pytest.mark.parametrize("size", [2, 200])
@pytest.mark.parametrize("collate_fn", [None, pyparallel.collate, pyparallel.Collate()])
def test_a_graph_reaches_the_loop(collate_fn: Any, size: int) -> None:
    weight = torch.ones(size, size, requires_grad=True)
    data = Making(lambda index: weight * index, 6)
    for batch in DataLoader(data, 2, collate_fn=collate_fn, **THREADS):
        batch.sum().backward()
    assert weight.grad is not None and weight.grad.unique().item() == sum(range(6))


def test_the_warning_of_many_workers_is_about_threads() -> None:
    crowd: dict[str, Any] = {"num_workers": 999, "worker_method": "thread"}
    with pytest.warns(UserWarning, match="will create 999 worker threads in total"):
        loader = DataLoader(Numbers(4), **crowd)
    with pytest.warns(UserWarning, match="will create 999 worker threads in total"):
        loader.check_worker_number_rationality()
    with pytest.warns(UserWarning, match="will create 999 worker processes in total"):
        DataLoader(Numbers(4), num_workers=999)


@pytest.mark.parametrize("how", ["left", "error", "end"])
def test_slabs_are_free_after_an_epoch_that_was_left(how: str) -> None:
    def make(index: int) -> torch.Tensor:
        if how == "error" and index == 5:
            raise ValueError("no 5")
        return torch.ones(150, 150)

    loader = DataLoader(Making(make, 12), **THREADS)
    for _ in range(3):
        try:
            for _batch in loader:
                if how == "left":
                    break
        except ValueError as error:
            assert any(
                "at index 5" in note
                for note in getattr(error, "__notes__", ["at index 5"])
            )
            error.__traceback__ = None
        del _batch
    ring: Any = loader._receiver.ring
    wait_for(lambda: ring.holders() == [0] * ring.num_slabs)


class Drawing(resumed.Numbers):
    """Samples of random numbers of their own generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        own = sample_random()
        assert own is sample_random()
        drawn = [own.python.random(), own.numpy.random()]
        drawn += torch.rand(2, generator=own.torch, dtype=torch.float64).tolist()
        return torch.tensor([index, *drawn], dtype=torch.float64)


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate with random weights, as MixUp does."""
    return torch.stack([*samples, torch.full((5,), sample_random().python.random())])


def drawing(**options: Any) -> Case:
    given = {"sample_seeds": True, "collate_fn": mixed, **options}
    return Case("shuffle", 11, 3, Drawing(11), given, epochs=2)


@pytest.mark.parametrize("options", KINDS[1:], ids=str)
def test_a_sample_draws_the_same_in_every_worker(options: dict[str, Any]) -> None:
    expected, _ = uninterrupted(drawing())
    drawn = [str(row[1:]) for _, batch in expected for row in batch]
    assert len({*drawn}) == len(drawn)
    batches, stops = uninterrupted(drawing(**options))
    is_persistent = bool(options.get("persistent_workers"))
    assert batches[:4] == expected[:4]  # the first epoch
    # A later one of persistent workers draws no new base seed, so its order differs.
    assert is_persistent or batches == expected
    for stop in (stops[3], stops[6]):
        for later in KINDS:
            if bool(later.get("persistent_workers")) == is_persistent:
                found = continued(drawing(**options), stop, **{**INLINE, **later})
                assert found == batches[stop.given :]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_thread_closes_its_counters_before_its_last_code() -> None:
    def opened() -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("schedstat" in os.readlink(x) for x in links if os.path.islink(x))

    before = opened()
    batches = iter(DataLoader(range(8), 2, **THREADS))
    next(batches)
    assert opened() > before
    pool = batches._pool  # it has the programs of the threads
    batches._shutdown_workers()
    assert opened() == before
    assert pool._workers


def test_the_global_states_are_left_alone_by_threads() -> None:
    dataset = Drawing(9)
    loader = DataLoader(dataset, 3, sample_seeds=True, **THREADS)
    batches = iter(loader)  # this draws the base seed
    states = random.getstate(), torch.get_rng_state().tolist(), np.random.rand()
    np.random.seed(3)
    list(batches)
    assert random.getstate() == states[0]
    assert torch.get_rng_state().tolist() == states[1]
    expected = np.random.RandomState(3).rand()
    assert np.random.rand() == expected


def test_the_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    def rows(num_replicas: int) -> dict[float, list[float]]:
        found = {}
        for rank in range(num_replicas):
            sampler = torch.utils.data.DistributedSampler(
                Drawing(8), num_replicas, rank, seed=4
            )
            generator = torch.Generator().manual_seed(2)
            loader = DataLoader(
                *(Drawing(8), 2),
                sampler=sampler,
                sample_seeds=True,
                **THREADS,
                generator=generator,
            )
            for batch in loader:
                found.update({row[0]: row[1:] for row in batch.tolist()})
        return found

    assert rows(1) == rows(2) == rows(4) and len(rows(1)) == 8


def test_generators_belong_to_one_sample_of_one_thread() -> None:
    with pytest.raises(RuntimeError, match=r"^sample_random\(\) must be called in a"):
        sample_random()
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            sample_random()
        except RuntimeError as error:
            found.append(str(error))

    class Nesting(Drawing):
        def __getitem__(self, index: int) -> Any:
            first = sample_random()
            inner = DataLoader(Drawing(2), sample_seeds=True)
            assert len(list(inner)) == 2
            assert sample_random() is first
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return index

    assert len(list(DataLoader(Nesting(2), sample_seeds=True))) == 2
    assert len(found) == 2
    with pytest.raises(RuntimeError, match="this thread reads none"):
        sample_random()
    with pytest.raises(RuntimeError, match="this thread reads none"):
        list(DataLoader(Drawing(2), **THREADS))  # without sample_seeds


DRAWS: dict[str, Callable[[], Any]] = {
    "torch (rand)": lambda: torch.rand(2),
    "torch (uniform_)": lambda: torch.empty(2).uniform_(),
    "random or NumPy": random.random,
    "random or NumPy ": np.random.rand,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_from_a_global_generator_is_a_warning(name: str) -> None:
    pyparallel.core.errors._warned.discard("PP219 ")

    def make(index: int) -> int:
        DRAWS[name]()
        return index

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(DataLoader(Making(make, 12), sample_seeds=True, **THREADS))
    texts = [str(each.message) for each in caught if "PP219" in str(each.message)]
    assert len(texts) == 1 and f"generator of {name.strip()}, which" in texts[0]


def test_draws_of_the_loop_are_no_warning() -> None:
    pyparallel.core.errors._warned.discard("PP219 ")
    drawn, stopped = threading.Event(), threading.Event()

    def draw() -> None:
        while not stopped.is_set():
            random.random(), np.random.rand()
            drawn.set()

    def make(index: int) -> int:
        if index >= 4:  # the loop has no batch before
            drawn.clear()
            assert drawn.wait(60)
        return index

    loop = threading.Thread(target=draw)
    options: Any = {**THREADS, "num_workers": 1, "sample_seeds": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = iter(DataLoader(Making(make, 16), 4, **options))
        next(batches)
        loop.start()
        try:
            assert len(list(batches)) == 3
        finally:
            stopped.set()
            loop.join()


def test_own_generators_are_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader(Drawing(12), sample_seeds=True, **THREADS))


class Ordered(resumed.Uneven):
    """Shards of their own lengths, in order."""

    def __iter__(self) -> Iterator[Any]:
        worker, length = self.share()
        return iter([torch.tensor(100 * worker + i) for i in range(length)])


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["shuffle", Ordered, resumed.UnevenCursors])
def test_a_state_continues_with_threads_and_with_processes(
    kind: Any, persistent: bool
) -> None:
    process = {"num_workers": 2, "multiprocessing_context": "fork"}
    process["persistent_workers"] = persistent
    if isinstance(kind, str):
        case = Case(kind, 11, 2, options=process, epochs=2)
    else:
        case = Case("", 0, 2, kind((7, 4)), process, epochs=2)
    expected, stops = uninterrupted(case)
    threads = {**process, **THREADS, "multiprocessing_context": None}
    own = Case(case.order, case.length, 2, case.dataset, threads, epochs=2)
    batches, thread_stops = uninterrupted(own)
    assert batches == expected
    for stop, other in zip(stops[2:7:2], thread_stops[2:7:2], strict=True):
        assert continued(case, stop, **threads) == expected[stop.given :]
        assert continued(case, other) == expected[other.given :]
        assert continued(case, other, **threads) == expected[other.given :]


class Own(IterableDataset[int]):
    """An iterable dataset that is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return 1


class OwnState(Own):
    """One that saves its position."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("cls", [Own, OwnState])
def test_one_iterator_for_several_threads_is_refused(cls: Any, on_error: Any) -> None:
    with pytest.raises(
        ValueError, match=r"an iterator of its own, but .*Own.* returns"
    ):
        next(iter(DataLoader(cls(), on_error=on_error, **THREADS)))


def test_one_state_for_several_threads_is_refused() -> None:
    assert next(iter(DataLoader(Own(), **{**THREADS, "num_workers": 1}))) == 1
    loader = DataLoader(resumed.Remembering(8), **THREADS)
    assert len(list(loader)) == 8
    with pytest.raises(
        RuntimeError, match=r"2 threads share one state of .*Remembering"
    ):
        loader.state_dict()
    one = {**THREADS, "num_workers": 1}
    case = Case("sequential", 9, 2, resumed.Remembering(9), one, epochs=2)
    batches, stops = uninterrupted(case)
    assert continued(case, stops[3]) == batches[stops[3].given :]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worker_method": "threads"}, "must be 'multiprocessing' or 'thread', but is"),
        ({**THREADS, "multiprocessing_context": "fork"}, "must be None, but is"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_errors(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        DataLoader(range(4), **options)


def test_a_stuck_thread_is_named_with_its_stack() -> None:
    released = threading.Event()

    def stuck_in_user_code(index: int) -> int:
        released.wait(60)
        return index

    loader = DataLoader(Making(stuck_in_user_code, 4), timeout=0.3, **THREADS)
    with pytest.raises(RuntimeError, match="DataLoader timed out") as caught:
        next(iter(loader))
    text = str(caught.value)
    assert "worker 0 (thread pyparallel-worker-0) has not finished" in text
    assert "stuck_in_user_code" in text
    released.set()


def test_the_local_variables_of_an_error_stay() -> None:
    def make(index: int) -> int:
        evidence = f"sample {index}"
        raise ZeroDivisionError(evidence)

    with pytest.raises(ZeroDivisionError) as caught:
        list(DataLoader(Making(make, 4), **THREADS))
    trace = caught.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_locals["evidence"] == "sample 0"


#: A text that takes zlib some milliseconds, without the GIL.
TEXT = zlib.compress(bytes(random.Random(0).choices(b"abcdef   ", k=1_000_000)), 1)


def decompress() -> bytes:
    return zlib.decompress(TEXT, bufsize=1_000_000)


#: The work on a sample, and whether threads wait for the GIL in it.
WORK: dict[str, tuple[Callable[[], Any], bool]] = {
    "Python": (lambda: sum(letter == 32 for letter in bytes(200_000)), True),
    "zlib": (decompress, False),
    "waits": (lambda: time.sleep(0.005), False),
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts switches")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", WORK)
def test_waits_for_the_gil_are_measured_and_lead_to_advice(name: str) -> None:
    work, waits = WORK[name]
    waits = waits and HAS_GIL
    loader = DataLoader(
        *(Making(lambda index: (work(), index)[1], 160), 4),
        num_workers=4,
        worker_method="thread",
    )
    list(loader)
    stats = loader.stats()
    work_seconds = stats.fetch_seconds + stats.collate_seconds
    if not waits:
        assert stats.gil_wait_seconds < MUCH_GIL_WAIT / 2 * work_seconds, stats
        assert "GIL" not in stats.verdict
        return
    # The advice of a machine with enough cores. That of a busy one is about cores.
    free = work_seconds - stats.core_wait_seconds
    assert stats.gil_wait_seconds > MUCH_GIL_WAIT * free, stats
    quiet = {"fetch_seconds": free, "collate_seconds": 0.0, "core_wait_seconds": 0.0}
    verdict = replace(stats, **quiet, first_wait_seconds=0.0, cores=8).verdict
    assert "use worker_method='multiprocessing'" in verdict
    assert "waits of worker threads" in str(stats)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts switches")
@pytest.mark.parametrize("has_gil", [True, False])
def test_only_a_python_with_the_gil_waits_for_it(
    has_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    monkeypatch.setattr(GilWait, "delay", lambda self: 0.001)
    wait = GilWait()
    wait.begin()
    for _ in range(5):
        time.sleep(0.001)
    assert (wait.end(1.0) > 0) is has_gil


def test_a_child_of_a_fork_gets_advice_and_other_loaders_work() -> None:
    loader = DataLoader(Numbers(8), **THREADS)
    batches = iter(loader)
    next(batches)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        pid = os.fork()
    if not pid:
        texts = []
        for call in (lambda: next(batches), lambda: iter(loader)):
            try:
                call()
            except RuntimeError as error:
                texts.append(str(error))
        texts.append(str(get_worker_info.__code__.co_filename))
        del batches
        gc.collect()
        try:
            iter(loader)
        except RuntimeError as error:
            texts.append(str(error))
        texts.append(str(len(list(DataLoader(Numbers(3), **THREADS)))))
        os.write(write, "|".join(texts).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    used, begun, code, again, other = os.read(read, 1 << 14).decode().split("|")
    assert "must be used in the process that made it" in used
    assert begun == again and "forked while the threads ran" in begun
    assert "Fork before the first iter() or after the epoch" in begun
    assert code == torch_worker.__file__ and other == "3"
    assert len(list(batches)) == 7
    # The advice.
    if not (pid := os.fork()):
        os._exit(0 if len(list(loader)) == 8 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(read)
    os.close(write)


def test_an_interrupt_leaves_a_loader_that_works() -> None:
    loader = DataLoader(
        Making(lambda index: time.sleep(0.02) or index, 8),
        persistent_workers=True,
        **THREADS,
    )
    batches = iter(loader)
    next(batches)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt)
        )

    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            for _ in loader:
                pass
    timer.join()
    assert [int(each) for each in loader] == list(range(8))


#: Prints the memory of a list of dicts, and at most beside it in epochs with threads.
MEMORY = """
import sys
import torch
from pyparallel import DataLoader

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))

def most(data, workers):
    loader = DataLoader(
        data, 1000, collate_fn=len, num_workers=workers, worker_method="thread"
    )
    return max(resident() for number, _ in enumerate(loader) if number % 40 == 1)

most([{}] * 50_000, 8)  # what threads need without data
before = resident()
samples = range(400_000)
data = [{"id": i, "text": f"the text of sample {i}", "size": [i]} for i in samples]
own = resident() - before
print(own, *(most(data, workers) - before for workers in (1, 2, 8)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux alone")
def test_threads_need_no_memory_for_the_samples_of_a_list() -> None:
    done = python_runs.run(MEMORY, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    own, *found = map(int, done.stdout.split())
    assert own > 150_000, "the list must be large beside the interpreter"
    assert len(found) == 3 and max(found) <= 1.2 * own, (own, found)
