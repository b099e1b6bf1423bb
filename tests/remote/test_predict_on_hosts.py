"""`kd-predict --ray` on a Ray cluster of two hosts: the file of one machine, whatever happens to a host."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pieces import wait_until

from kd.cluster.group import QUIET, RAY_MARK, Node
from kd.cluster.hosts import Hosts, end_marked, free_ports, marked, signal_all
from kd.core.errors import ModelError
from kd.deploy.predict.predict import PredictOptions, predict

pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Node]]:
    """127.0.0.2 and 127.0.0.3 with a CPU each, as `ray start` makes them."""
    monkeypatch = pytest.MonkeyPatch()
    mark, port = secrets.token_hex(8), free_ports(1)[0]
    more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "KD_DECODERS": "1", **QUIET}
    for name, value in {**more, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{port}")
    nodes = [
        Node(Hosts(host, ("127.0.0.2",), ("127.0.0.3",), (port, 0)), f"{mark}-{host}")
        for host in ("127.0.0.2", "127.0.0.3")
    ]
    try:
        assert all([node.start() for node in nodes])
        yield nodes
    finally:
        for node in nodes:
            end_marked(node.mark, RAY_MARK)
        shutil.rmtree(nodes[0].folder, ignore_errors=True)
        monkeypatch.undo()


def until_rows(process: subprocess.Popen[str], journal: Path, size: int) -> None:
    wait_until(lambda: journal.is_file() and journal.stat().st_size > size, process)


def starts(exported: Path, images: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "kd.cli", "predict", str(exported), str(images)]
    argv += ["--to", str(target), "--ray", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, cwd=target.parent, text=True, **pipes)


@pytest.mark.slow
def test_sigterm_and_the_same_command_with_and_without_hosts(cluster, exported, photos, tmp_path, command):
    listed, target = tmp_path / "listed.txt", tmp_path / "rows.csv"
    listed.write_text("\n".join(str(path) for path in sorted(photos.rglob("*.jpg")) * 100))
    process, journal = starts(exported, listed, target), tmp_path / "rows.csv.part"
    until_rows(process, journal, 20_000)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.splitlines()[-1]) == (75, "stopped by SIGTERM; the same command resumes")
    done = len(journal.read_bytes().splitlines()) - 1
    answer = command("predict", exported, listed, "--to", target)
    assert answer.code == 0, answer
    assert f", {done} of them by an earlier start" in answer.out
    whole = tmp_path / "whole.csv"
    predict(PredictOptions(export=exported, images=str(listed), to=whole))
    assert target.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_two_hosts_write_the_file_of_one_machine_and_one_may_be_lost(cluster, exported, photos, tmp_path):
    listed, whole = tmp_path / "listed.txt", tmp_path / "whole.csv"
    names = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    for times in (20, 80, 320):  # a host whose processes start late may find no work left
        listed.write_text("\n".join([*names, "missing.jpg"] * times))
        process = starts(exported, listed, tmp_path / f"both{times}.csv", "--top", "2")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        if " on 2 hosts: " in out:
            break
    assert " on 2 hosts: " in out
    predict(PredictOptions(export=exported, images=str(listed), to=whole, top=2, cores=1))
    assert (tmp_path / f"both{times}.csv").read_bytes() == whole.read_bytes()

    process, journal = starts(exported, listed, tmp_path / "one.csv", "--top", "2"), tmp_path / "one.csv.part"
    until_rows(process, journal, 1000)
    signal_all(marked(cluster[1].mark, RAY_MARK), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "one.csv").read_bytes() == whole.read_bytes()


def test_a_cluster_that_is_not_named_or_not_there_is_one_line(exported, photos, refused, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    target = tmp_path / "rows.csv"
    assert "RAY_ADDRESS names no cluster" in refused("predict", exported, photos, "--to", target, "--ray")


def test_an_export_without_its_graph_is_one_line(exported, photos, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "export"))
    (folder / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"model\.onnx' cannot be read"):
        predict(PredictOptions(export=folder, images=str(photos / "val"), to=tmp_path / "labels.csv", ray=True))
