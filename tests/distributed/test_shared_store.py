"""Two ranks, with workers of their own, fill one store of decoded pixels and train as without it."""

from __future__ import annotations

import pytest
import torch
from pieces import slow


@pytest.mark.parametrize("store", ["disk", slow("ram")])
def test_two_ranks_with_a_store_are_two_ranks_without(plain, train, store):
    """The photos are not larger than training needs, so that a store changes no pixel."""
    with_store = train(f"stored-{store}", 2, f"data.store={store}", "data.workers=1")
    with_store.world.ended_well()
    one, other = plain(2).checkpoint(), with_store.checkpoint()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert with_store.world.logs[0].count("store: about 0.2 MiB of decoded images") == 1
    assert "store: " not in with_store.world.logs[1]
    assert ("in memory of each rank" in with_store.world.logs[0]) == (store == "ram")
