"""A loader has the protocol of torchdata's StatefulDataLoader."""

from __future__ import annotations

import pytest
import resumed

from pyparallel import DataLoader

try:
    from torchdata.stateful_dataloader import Stateful, StatefulDataLoader
except ImportError as error:
    pytest.skip(f"needs torchdata: {error}", allow_module_level=True)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.mark.parametrize("ask_for_more", [False, True])
def test_the_epoch_after_the_last_batch_is_equal(ask_for_more: bool) -> None:
    found = []
    for cls in (DataLoader, StatefulDataLoader):
        loader = cls(resumed.Numbers(6), 2)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert not ask_for_more or next(batches, None) is None
        state = loader.state_dict()
        loader = cls(resumed.Numbers(6), 2)
        loader.load_state_dict(state)
        found.append([len(list(loader)) for _ in range(2)])
    assert found[0] == found[1] == ([3, 3] if ask_for_more else [0, 3])


def test_a_loader_is_stateful_as_torchdata_has_it() -> None:
    assert isinstance(DataLoader(resumed.Numbers(2)), Stateful)
