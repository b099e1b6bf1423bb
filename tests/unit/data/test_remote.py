"""What `data.loader: ray` refuses, without a cluster; tests/remote has one."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_store_belongs_to_one_machine(written, refused, store):
    told = refused("train", written(), "data.loader=ray", f"data.store={store}")
    assert told.startswith(f"data.store: is {store}, but with data.loader=ray")


def test_a_run_without_a_cluster_is_one_line(written, refused, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    told = refused("train", written(), "data.loader=ray")
    assert told.startswith("data.loader: is ray, but the variable RAY_ADDRESS names no cluster")


@pytest.mark.parametrize("groups", ["dnn", "dnn=0,data=2", "dnn=1;data=2", "dnn=1,dnn=2", ""])
def test_groups_that_are_none(written, command, groups):
    answer = command("launch", written(), "--local", groups)
    assert answer.code == 2
    assert "--local" in answer.err
