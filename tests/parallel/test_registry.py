"""MODULE_WRAPPERS, the registry behind it, and is_module_wrapper."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pyparallel import MODULE_WRAPPERS, MMDataParallel, is_module_wrapper
from pyparallel.registry import Registry

pytestmark = pytest.mark.one_backend


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.fixture
def registry():
    return Registry("thing")


def test_a_class_is_registered_under_its_own_name_or_others(registry):
    assert registry.register_module(module=Wrapper) is Wrapper
    assert registry.register_module("w", module=Wrapper) is Wrapper
    assert registry.register_module(["x", "y"], module=Wrapper) is Wrapper
    assert registry.get("Wrapper") is registry.get("w") is registry.get("y") is Wrapper
    assert registry.module_dict == dict.fromkeys(("Wrapper", "w", "x", "y"), Wrapper)
    assert (len(registry), "w" in registry, "z" in registry) == (4, True, False)
    assert registry.get("z") is None


def test_it_decorates_with_and_without_parentheses(registry):
    @registry.register_module()
    class A: ...

    @registry.register_module
    class B: ...

    @registry.register_module(name="other")
    class C: ...

    assert registry.module_dict == {"A": A, "B": B, "other": C}
    message = "Registry 'thing': module must be a class, but is 5."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        registry.register_module(module=5)


def test_a_taken_name_is_refused_and_nothing_changes(registry):
    registry.register_module("w", module=Wrapper)
    message = (
        f"Registry 'thing': w must be a new name, but is registered for {Wrapper!r}. "
        "Pass force=True to replace it."
    )
    with pytest.raises(KeyError) as caught:
        registry.register_module(["new", "w"], module=nn.Linear)
    assert caught.value.args == (message,)
    assert registry.module_dict == {"w": Wrapper}
    registry.register_module("w", module=Wrapper)
    registry.register_module("w", force=True, module=nn.Linear)
    assert registry.get("w") is nn.Linear


def test_children_have_scopes(registry):
    child = Registry("part", parent=registry, scope="lib")
    child.register_module(module=Wrapper)
    assert registry.children == {"lib": child}
    assert child.parent is registry
    assert registry.get("lib.Wrapper") is Wrapper
    assert registry.get("Wrapper") is None
    with pytest.raises(KeyError, match="'lib' is taken"):
        Registry("part", parent=registry, scope="lib")
    assert repr(child) == f"Registry(name='part', items={{'Wrapper': {Wrapper!r}}})"


def test_wrappers_and_their_subclasses_are_recognised():
    class Own(MMDataParallel): ...

    linear = nn.Linear(1, 1)
    compiled = torch.compile(linear, backend="eager")
    for wrapper in (nn.DataParallel(linear), MMDataParallel(linear), Own(linear)):
        assert is_module_wrapper(wrapper)
    for other in (linear, compiled, Wrapper(linear), nn.DataParallel, None, 5, "text"):
        assert not is_module_wrapper(other)


def test_child_registries_count_at_any_depth(monkeypatch):
    monkeypatch.setattr(MODULE_WRAPPERS, "children", dict(MODULE_WRAPPERS.children))
    child = Registry("module wrapper", parent=MODULE_WRAPPERS, scope="test")
    grandchild = Registry("deep", parent=child, scope="deep")
    wrapped = Wrapper(nn.Linear(1, 1))
    assert not is_module_wrapper(wrapped)
    grandchild.register_module(module=Wrapper)
    assert is_module_wrapper(wrapped)
