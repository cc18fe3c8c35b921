"""parallel_apply on a GPU, named twice: streams, threads, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyparallel import parallel_apply

pytestmark = pytest.mark.cuda
TWICE = [0, 0]


def slow_double(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(20_000_000)  # so that a wait that is missing shows
    return x * 2


def test_results_are_right_however_late_streams_are() -> None:
    for i in range(20):
        with torch.cuda.stream(torch.cuda.Stream()):
            batch = torch.full((8, 1 << 16), float(i), device="cuda")
            torch.cuda._sleep(20_000_000)
            batch += 1
            found = torch.cat(parallel_apply(slow_double, batch, TWICE))
            del batch
            assert bool((found == 2.0 * (i + 1)).all())


def test_each_thread_has_a_stream_of_its_own_and_the_callers_device() -> None:
    def look(_: Any) -> tuple[int, int]:
        torch.cuda._sleep(1000)
        return torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()

    found = parallel_apply(look, range(4), TWICE)
    assert found[0] == found[1] != found[2] == found[3]
    assert torch.cuda.current_stream().cuda_stream not in {
        stream for stream, _ in found
    }
    assert {device for _, device in found} == {0}


def test_items_and_keywords_are_sent_and_results_are_on_the_output_device() -> None:
    def add(item: dict[str, Any], *, bias: torch.Tensor) -> dict[str, Any]:
        assert item["x"].is_cuda and bias.is_cuda
        return {"y": item["x"] + bias, "name": item["name"]}

    items = [{"x": torch.full((3,), float(i)), "name": str(i)} for i in range(5)]
    bias = torch.ones(3)
    for output in (None, "cpu", 0):
        found = parallel_apply(add, items, TWICE, output, 0, {"bias": bias})
        for i, result in enumerate(found):
            assert result["name"] == str(i)
            assert result["y"].device.type == ("cpu" if output == "cpu" else "cuda")
            assert torch.equal(result["y"].cpu(), torch.full((3,), i + 1.0))


@pytest.mark.parametrize("home", ["cuda", "cpu"])
def test_gradients_are_summed_in_the_module(home: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(home)
    batch = torch.randn(7, 6, device=home)
    module(batch).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    torch.cat(parallel_apply(module, batch, TWICE)).square().sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_autocast_of_the_caller_applies_without_shared_casts_of_streams() -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    batch = torch.randn(6, 64, 64, device="cuda")

    def multiply(x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_cache_enabled()
        return x @ weight

    with torch.autocast("cuda", torch.bfloat16):
        found = torch.cat(parallel_apply(multiply, batch, TWICE))
        expected = batch @ weight
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_the_form_of_torch_equals_torch() -> None:
    modules = [nn.Linear(4, 3).cuda() for _ in range(2)]
    inputs = [torch.randn(5, 4, device="cuda") for _ in range(2)]
    for devices in (None, TWICE, ["cuda:0", torch.device("cuda", 0)]):
        found = parallel_apply(modules, inputs, None, devices)
        expected = torch.nn.parallel.parallel_apply(modules, inputs, None, devices)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other)


def test_several_parts_are_refused_under_capture_and_one_is_not() -> None:
    batch = torch.ones(4, 8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="must not be under graph capture"):
            parallel_apply(torch.neg, batch, TWICE)
        found = parallel_apply(torch.neg, batch, [0])
    batch.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((each == -3).all()) for each in found)


def test_an_error_names_item_and_device() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3, device="cuda")

    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        parallel_apply(fail, torch.ones(4, 5, device="cuda"), TWICE)
    assert caught.value.__notes__ == ["in item 0 on device cuda:0"]


@pytest.mark.two_gpus
def test_two_gpus_share_the_items() -> None:
    module = nn.Linear(6, 3).cuda(0)
    batch = torch.randn(6, 6)
    found = parallel_apply(module, batch)
    assert all(each.device == torch.device("cuda", 0) for each in found)
    torch.testing.assert_close(torch.cat(found), module(batch.cuda(0)))
