"""What `data.loader: ray` refuses, without a cluster; tests/remote has one."""

import pytest
import yaml

pytest.importorskip("ray")


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_store_belongs_to_one_machine(written, refused, store, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    message = refused("train", written(), "data.loader=ray", f"data.store={store}")
    assert message.startswith(f"data.store: is {store}, but with data.loader=ray")
    assert "Allowed: none. Set data.store=none" in message


def test_a_run_without_a_cluster_is_one_line(settings, refused, monkeypatch, tmp_path):
    """Before anything is made: the pictures of food_mini took half a minute."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    settings["data"] = {
        "kind": "food_mini",
        "root": str(tmp_path / "food"),
        "loader": "ray",
        "store": "none",
    }
    (tmp_path / "food.yaml").write_text(yaml.safe_dump(settings))
    message = refused("train", tmp_path / "food.yaml")
    assert message.startswith(
        "data.loader: is ray, but the variable RAY_ADDRESS names no cluster"
    )
    assert not (tmp_path / "food").exists()


@pytest.mark.parametrize(
    "groups",
    [
        "dnn",
        "dnn=0,data=2",
        "dnn=1;data=2",
        "dnn=1,dnn=2",
        "",
        "data=2",
        "a=99,b=99,c=99",
    ],
)
def test_invalid_groups_are_refused(written, command, groups):
    """Without trainers nothing was trained, and the exit code was 0."""
    answer = command("launch", written(), "--local", groups)
    assert answer.code == 2
    assert "--local" in answer.err
