"""The pages on mmcv, mmengine and other frameworks, with those packages."""

from __future__ import annotations

import collections
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import forked
from tests.support.ranks.torchrun import python, torchrun
from tests.support.repository.docs_blocks import blocks, run_page
from tests.support.repository.folders import ROOT, SUPPORT

# What these packages, or torch on their behalf, deprecate is not ours.
pytestmark = [
    pytest.mark.also_peers,
    pytest.mark.one_backend,
    pytest.mark.filterwarnings("default"),
]


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} is not installed: see `make test-peers`"
    return pytest.mark.skipif(bool(missing), reason=reason)


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FRAMEWORKS = [it for it in blocks("docs/frameworks.md") if it.language == "python"]
#: Stops a program at a call of `backward`. Arguments: the number, and the file.
STOPPED = """
import runpy, sys
from accelerate import Accelerator
left, backward = [int(sys.argv[1])], Accelerator.backward
def count(self, loss):
    if not left[0]:
        sys.exit(3)
    left[0] -= 1
    backward(self, loss)
Accelerator.backward = count
runpy.run_path(sys.argv[2], run_name="__main__")
"""


#: It replaces a class before it imports transformers.
FIRST = 5
#: Jobs with programs of docs/frameworks.md by their keys: the folder, the number of the
#: program, the step at which it is stopped or none, and the ranks.
JOBS: dict[Any, tuple[str, int, str, int]] = {
    **{(number, 0): (f"{number}", number, "", 0) for number in (1, 2, 3, 4, 6, 7)},
    **{(number, 2): (f"{number}-2", number, "", 2) for number in (1, 2)},
    ("whole", 0): ("whole", 0, "", 0),
    ("again", 0): ("whole", 0, "", 0),  # started again after its end
    # The last state is in the middle of the second epoch.
    ("stopped", 0): ("stopped", 0, "11", 0),
    ("continued", 0): ("stopped", 0, "", 0),
    ("whole", 2): ("whole-2", 0, "", 2),
    ("stopped", 2): ("stopped-2", 0, "8", 2),
    ("continued", 2): ("stopped-2", 0, "", 2),
}
of_frameworks = needs("accelerate", "lightning", "monai", "transformers")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, forked.Ended]:
    root, jobs = tmp_path_factory.mktemp("jobs"), []
    for name, number, step, world in JOBS.values():
        folder = root / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(FRAMEWORKS[number].text, encoding="utf-8")
        (folder / "stopped.py").write_text(STOPPED, encoding="utf-8")
        script = ("stopped.py", [step, "train.py"]) if step else ("train.py", [])
        jobs.append((folder, *script, world))
    imports = """
import torch._dynamo, pyparallel
import accelerate, lightning
from transformers import LlamaForCausalLM, Trainer
"""
    return dict(zip(JOBS, forked.run(imports, jobs), strict=True))


@of_frameworks
@pytest.mark.timeout(1200)
def test_programs_of_frameworks_md_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[Any, forked.Ended]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page("docs/frameworks.md", "pycon") == 1
    assert len(FRAMEWORKS) == 8
    assert all(program.text.count("\n") <= 60 for program in FRAMEWORKS)
    for number in {*range(1, 8)} - {FIRST}:  # the next test runs the first one
        done = ended[number, 0]
        assert done.codes == [0], (FRAMEWORKS[number].name, done.err[-3000:])


@of_frameworks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [0, 2])
def test_a_stopped_program_of_accelerate_ends_with_the_same_weights(
    world: int, ended: dict[Any, forked.Ended]
) -> None:
    stopped, codes = ended["stopped", world], [0] * max(world, 1)
    assert 0 not in stopped.codes and 3 in stopped.codes, stopped.err[-3000:]
    lines = []
    for run in ("whole", "continued", *["again"][world:]):
        done = ended[run, world]
        assert done.codes == codes, done.err[-3000:]
        lines.append(done.out.splitlines()[-1])
    assert len({*lines}) == 1


@of_frameworks
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [1, 2])
def test_other_programs_run_in_two_processes(
    number: int, ended: dict[Any, forked.Ended]
) -> None:
    assert ended[number, 2].codes == [0, 0], ended[number, 2].err[-3000:]


@of_frameworks
@pytest.mark.parametrize("run", [python, torchrun])
def test_a_program_that_replaces_a_class_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # transformers makes a folder
    program = tmp_path / "train.py"
    program.write_text(FRAMEWORKS[FIRST].text, encoding="utf-8")
    done = run(program)
    assert done.returncode == 0, done.stderr[-3000:]


@needs("mmengine")
def test_every_config_of_the_recipes_trains(tmp_path: Path) -> None:
    done = python(
        SUPPORT / "repository" / "docs_recipes.py",
        str(tmp_path),
        options=("-W", "ignore"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours = "pyparallel.mmengine."
    plain = ["docs_recipes.Tiny", "docs_recipes.Several"]
    ddp = f"{ours}distributed.MMDistributedDataParallel"
    separate = f"{ours}separate_distributed.MMSeparateDistributedDataParallel"
    optim = f"{ours}optimizer_wrapper.OptimWrapper"
    amp = f"{ours}amp_optimizer_wrapper.AmpOptimWrapper"
    loader = "torch.utils.data.dataloader.DataLoader"
    found = [line.split() for line in done.stdout.splitlines() if ours in line]
    found = [[name.replace("__main__", "docs_recipes") for name in it] for it in found]
    assert found == [
        [plain[0], optim, loader],
        [ddp, optim, loader],
        [plain[0], optim, "pyparallel.loader.data_loader.DataLoader"],
        [plain[0], optim, loader],
        [plain[0], amp, loader],
        [separate, f"{ours}optimizer_wrapper_dict.OptimWrapperDict", loader],
    ]


# ------------------------------------------------------- the texts that people look for
class Step(nn.Conv2d):
    """A convolution with a training step."""

    def train_step(self, data: Any, optimizer: Any) -> Any:
        return dict(loss=self(data["img"]).mean())


def ddp_step(api: Any) -> Any:
    model = api.MMDistributedDataParallel(Step(3, 1, 3))
    batch = dict(img=api.DataContainer([torch.ones(1, 3, 8, 8)], stack=True))
    return model.train_step(batch, None)


def stacked(value: Any) -> Callable[[Any], Any]:
    return lambda api: api.collate([api.DataContainer(value, stack=True)])


#: Lines of user code, and the heading or text of docs/mmcv.md about their error.
OF_MMCV: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stream": (
        lambda api: importlib.import_module(
            f"{api.__name__}._functions"
        ).Scatter.forward([0], torch.ones(2)),
        "AttributeError: 'int' object has no attribute 'type'",
    ),
    "forward": (
        lambda api: api.MMDistributedDataParallel(nn.Linear(1, 1))(torch.ones(1, 1)),
        "AttributeError: 'MMDistributedDataParallel' object has no attribute "
        "'_use_replicated_tensor_module'",
    ),
    "index": (
        lambda api: api.DataContainer([1])[0],
        "TypeError: 'DataContainer' object is not subscriptable",
    ),
    "iterate": (
        lambda api: list(api.DataContainer([1])),
        "'DataContainer' object is not iterable",
    ),
    "step on the host": (
        ddp_step,
        "conv2d() received an invalid combination of arguments - got (DataContainer, "
        "Parameter, Parameter, ",
    ),
    "strings": (
        lambda api: api.collate(["ab", "cd"]),
        "RecursionError: maximum recursion depth exceeded",
    ),
    "cpu": (
        lambda api: api.scatter(torch.ones(2), ["cpu"]),
        "ValueError: Expected a non cpu device, but got: cpu",
    ),
    "defaultdict": (
        lambda api: api.scatter(collections.defaultdict(list, a=torch.ones(1)), [-1]),
        "TypeError: first argument must be callable or None",
    ),
    "no arguments": (
        lambda api: api.MMDataParallel(nn.Flatten())(),
        "IndexError: tuple index out of range",
    ),
}
#: Calls that are errors here as well, with a text.
STILL_ERRORS = {
    "array": (stacked([1]), AssertionError, ""),
    "two dimensions": (stacked(torch.ones(3, 3)), AssertionError, ""),
    "object": (
        lambda api: api.scatter(api.DataContainer([[object()]]), [-1]),
        Exception,
        "Unknown type",
    ),
}


def page(name: str) -> str:
    """Return the text of a page with every line break a space."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@pytest.fixture
def theirs() -> Any:
    """Return mmcv's own mmcv.parallel."""
    return importlib.import_module("mmcv.parallel")


@needs("mmcv")
@pytest.mark.parametrize("case", OF_MMCV)
def test_a_text_of_mmcv_is_raised_by_mmcv_and_not_here(
    case: str, theirs: Any, one_rank: None
) -> None:
    line, text = OF_MMCV[case]
    assert text in page("mmcv.md")
    with pytest.raises(Exception) as caught:
        line(theirs)
    assert text in said(caught.value)
    if case == "stream":  # there is no GPU to send to, and no `_get_stream(int)`
        return
    import pyparallel

    if case == "no arguments":
        with pytest.raises(TypeError, match="forward"):  # the model's own
            line(pyparallel)
    else:
        line(pyparallel)


@needs("mmcv")
@pytest.mark.parametrize("case", STILL_ERRORS)
def test_errors_of_mmcv_without_a_reason_have_one_here(case: str, theirs: Any) -> None:
    import pyparallel

    line, kind, text = STILL_ERRORS[case]
    with pytest.raises(kind) as caught:
        line(theirs)
    assert str(caught.value).startswith(text) and len(str(caught.value)) < 60
    with pytest.raises(kind) as caught:
        line(pyparallel)
    assert len(str(caught.value)) > 60
    assert f"### {kind.__name__}" + (f": {text}" if text else "") in page("mmcv.md")
