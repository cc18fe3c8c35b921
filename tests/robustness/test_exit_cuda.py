"""The exit of a process that uses a GPU, and the devices that it opens."""

from __future__ import annotations

import pytest

from tests.support.loader.loader_processes import run

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(120)]

START = """
import threading, warnings
import psutil
from pyparallel import PreDataLoader, backend, scatter, start_to_host, to_host
# Python 3.12 warns of every fork beside a thread: workers start beside CUDA's.
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
warnings.filterwarnings("ignore", ".PP201")  # a device that is late has all slabs
def loader_of(num, **options):
    return DataLoader(Numbers(num, (300_000,)), 2, num_workers=2, **options)
"""

# A device may wait for its work while memory is pinned, so it sleeps again afterwards.
COPIES = """
shaped = [torch.zeros(2, 300_000, device="cuda") for _ in range(7)]
start_to_host(shaped).get()
pinned, pageable = loader_of(40, pin_memory=True), loader_of(40)
batches, ahead = iter(pinned), iter(PreDataLoader(pageable, 0))
torch.cuda._sleep(1_000_000_000)
kept = [scatter(next(batches), [0])[0] for _ in range(3)]
kept += [next(ahead) for _ in range(3)]
torch.cuda._sleep(1_000_000_000)
start_to_host(kept[0])  # and drop it
results = start_to_host(kept)
print(results.is_done())
"""


@pytest.mark.parametrize(
    "end, code, error",
    [
        ("", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("threading.Thread(target=lambda: list(ahead)).start()", 0, ""),
    ],
)
def test_a_process_exits_with_copies_under_way(end: str, code: int, error: str) -> None:
    found, out, err = run(f"{START}{COPIES}{end}")
    assert (found, out) == (code, "False\n"), err
    assert err.rpartition("Traceback")[2].endswith(error)
    assert err.count("Traceback") == bool(error) and bool(err) == bool(error)


FAILURE = """
pinned, pageable = loader_of(400, pin_memory=True), loader_of(400)
batches, pre = iter(pinned), PreDataLoader(pageable, 0)
ahead = iter(pre)
slab = torch.empty(1 << 20, dtype=torch.uint8)
kept = [scatter(next(batches), [0])[0], next(ahead)]
results = start_to_host(kept)
torch._assert_async(torch.zeros(1, device="cuda"))  # the kernel traps
calls = {
    "synchronize": torch.cuda.synchronize,
    "torch": lambda: torch.ones(3).to("cuda"),
    "scatter": lambda: scatter([torch.ones(3), torch.zeros(2)], [0]),
    "pinned ring": lambda: [scatter(batch, [0]) for batch in batches],
    "prefetch": lambda: list(ahead),
    "to_host": lambda: to_host(kept),
    "start_to_host": lambda: start_to_host(kept).get(),
    "an epoch": lambda: [scatter(batch, [0]) for batch in pinned],
    "a pass": lambda: list(pre),
    "pin": lambda: backend.Runtime("cuda").pin(slab.data_ptr(), slab.nbytes),
}
for name, call in calls.items():
    try:
        call()
        print(name, "returns")
    except RuntimeError:
        print(name, "raises")
print([t.name for t in threading.enumerate() if t.name == "pyparallel-prefetch"])
del batches, ahead, pre, calls, call, pinned, pageable
gc.collect()
end = time.monotonic() + 10
while psutil.Process().children() and time.monotonic() < end:
    time.sleep(0.01)
print(psutil.Process().children())
"""


@pytest.mark.parametrize("end, code", [("sys.exit(3)", 3), ("kept.clear()", 0)])
def test_after_a_failure_of_the_device_calls_raise_and_the_process_ends(
    end: str, code: int
) -> None:
    """`run` ends a process that hangs, and fails if it leaves a worker behind."""
    found, out, err = run(START + FAILURE + end)
    names = """
        synchronize, torch, scatter, pinned ring, prefetch, to_host, start_to_host,
        an epoch, a pass, pin
    """
    expected = [f"{name.strip()} raises" for name in names.split(",")]
    assert out.splitlines() == [*expected, "[]", "[]"], err
    assert found == code, err
    assert "terminate called" not in err


ONE_DEVICE = {
    "current device": """
torch.cuda.set_device(1)
loader = loader_of(8, pin_memory=True)
""",
    "named device": """
loader = loader_of(8)
""",
}
USE = """
for _ in range(2):
    with PreDataLoader(loader, 1) as pre:
        sent = list(pre)
    for batch in loader:
        sent += scatter([batch, torch.ones(3)], [1])[0]
    for got in (to_host(sent), start_to_host(sent).get()):
        assert [batch.flatten()[0].item() for batch in got] == [
            0, 2, 4, 6, 0, 1, 2, 1, 4, 1, 6, 1
        ]
del sent, got, batch
gc.collect()
print([torch._C._cuda_hasPrimaryContext(device) for device in (0, 1)])
"""


@pytest.mark.two_gpus
@pytest.mark.parametrize("case", ONE_DEVICE)
def test_a_process_opens_the_devices_that_it_uses_and_no_other(case: str) -> None:
    code, out, err = run(START + ONE_DEVICE[case] + USE)
    assert (code, out) == (0, "[False, True]\n"), err
