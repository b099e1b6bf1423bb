"""What several folders of tests share: a tiny image folder, a tiny fitted teacher, a
configuration, the commands.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

# before torch: it tells OpenMP how to wait, and a run on two busy cores takes a quarter
# of the CPU time
import kd

# isort: split
import converted
import torch
from pieces import base, merged, paint, teacher_at

assert kd.__version__
# until all is imported: a quarter of the collection's CPU time was gc's, which found
# nothing
gc.disable()
SHARED = Path(
    os.environ.get("KD_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data"
)
"""Where real photographs lie, if they do."""
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
)
SPENT = pytest.StashKey[float]()
BUDGET = 31_000
"""Products of matrices for which the default suite may compute: on 2026-11-28 it took
28,900, 33,000 beside other work.
"""


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def pytest_collection_finish() -> None:
    """Collect once what imports have made, which takes a twelfth of the tests' time."""
    # a fifth of an export is to make one list of functions again
    if "kd.models.runtimes" in sys.modules:
        with suppress(ImportError):  # torch 2.4 has no such module
            from torch.onnx._internal.exporter import _registration

            functions = getattr(_registration, "onnxscript_apis", None)
            if functions is not None:
                functions.get_torchlib_ops = cache(functions.get_torchlib_ops)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def spent() -> float:
    """Return the CPU seconds of this process and its children, also the ended ones."""
    running = psutil.Process().children(recursive=True)
    child_seconds = (sum(child.cpu_times()[:4]) for child in running)
    return sum(os.times()[:4]) + sum(child_seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this worker what it has cost."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = spent()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what the workers have cost."""
    node.config.stash[SPENT] = (
        node.config.stash.get(SPENT, 0.0)
        + getattr(node, "workeroutput", {})["cpu_seconds"]
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say the tests' cost in seconds, and in the machine's products of matrices."""
    seconds = config.stash.get(SPENT, 0.0) or spent()
    matrix = torch.ones(1024, 1024)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begin = time.thread_time()
    for _ in range(10):
        matrix @ matrix
    products = round(seconds / (time.thread_time() - begin) * 10, -2)
    torch.set_num_threads(threads)
    cost = (
        f"{seconds:.0f} CPU seconds, as long as {products:,.0f} products of matrices of"
        " 1024 x 1024"
    )
    is_suite = (
        config.option.markexpr == "not slow"
        and config.args_source == config.ArgsSource.TESTPATHS
    )
    if is_suite and products > 1.1 * BUDGET:
        cost += (
            f", {products / BUDGET - 1:.0%} above the budget of tests/conftest.py: the"
            " suite has grown dear"
        )
    terminalreporter.write_line(cost)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the quick tests last: no process is then left alone with a long one."""
    items.sort(key=lambda item: "unit" in item.path.parts)


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    """Keep the variables of a launcher around pytest out of the tests."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """The folder of what all workers share."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    return root / "once"


@pytest.fixture(scope="session", autouse=True)
def converted_once(shared_folder) -> Iterator[None]:
    """Convert a program to ONNX once in all workers."""
    with pytest.MonkeyPatch.context() as patch:
        exporter = converted.once(shared_folder / "converted", torch.onnx.export)
        patch.setattr(torch.onnx, "export", exporter)
        yield


@pytest.fixture(scope="session")
def once(shared_folder) -> Callable[..., Path]:
    """Build a folder in the first worker that asks, for all of them.

    `once("name", build)`, where `build(folder)` returns a path. Nobody writes into it; a test that must, copies it.
    """

    def obtain(name: str, build: Callable[[Path], Path]) -> Path:
        folder = shared_folder / name
        path_file = shared_folder / f"{name}.done"
        shared_folder.mkdir(exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path_file.exists():
                # of a worker in which it failed
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                path_file.write_text(str(build(folder)))
        return Path(path_file.read_text())

    return obtain


@pytest.fixture(scope="session")
def photos(once) -> Path:
    """A folder of 36 training and 13 validation images of three classes, read only."""

    def build(root: Path) -> Path:
        paint(root / "train", (12, 12, 12), seed=1)
        paint(root / "val", (4, 4, 5), seed=2)
        return root

    return once("photos", build)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; needs root."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def taught(photos: Path, folder: Path, epochs: int, **args: int) -> Path:
    """Fit a teacher on `photos` and return its export."""
    from kd import config
    from kd.jobs.train import teach

    settings = base(photos, folder)
    settings["teacher"]["args"] |= args
    settings["teacher"]["fit"]["epochs"] = epochs
    return teach(config.load(settings))[0].absolute()


@pytest.fixture(scope="session")
def teacher(photos, once) -> Path:
    """An export folder: a ViT fitted on `photos`. Do not write into it."""
    return once("teacher", lambda folder: taught(photos, folder, 3))


@pytest.fixture(scope="session")
def steady(photos, once) -> Path:
    """A teacher whose bits do not depend on an image's neighbours in the batch."""
    # heads of 16, as BLAS likes them
    return once(
        "steady", lambda folder: taught(photos, folder, 1, embed_dim=64, num_heads=4)
    )


@pytest.fixture(scope="session")
def photographs(once) -> Path:
    """Two real photographs of each of 28 kinds of fruit, in three splits, read only."""
    path = SHARED / "grocery-fruit.tar"
    if not path.is_file():
        pytest.skip("grocery-fruit.tar is not here; set KD_TEST_DATA to its folder")

    def build(root: Path) -> Path:
        counts = Counter[str]()
        with tarfile.open(path) as archive:
            for member in archive:
                folder = member.name.rpartition("/")[0]
                if member.isfile() and folder.count("/") == 2 and counts[folder] < 2:
                    counts[folder] += 1
                    archive.extract(member, root, filter="data")
        return root / "grocery-fruit"

    return once("photographs", build)


@pytest.fixture
def settings(photos, teacher, tmp_path) -> dict[str, Any]:
    """A configuration to change, with `teacher`, `photos` and runs in `tmp_path`."""
    values = base(photos, tmp_path)
    values["teacher"] = teacher_at(teacher)
    return values


@pytest.fixture
def written(settings, tmp_path) -> Callable[..., str]:
    """Write `settings`, with some sections merged over, as YAML and return the path."""

    def write(**sections: Any) -> str:
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(merged(settings, sections)))
        return str(path)

    return write


@pytest.fixture
def command(capfd) -> Callable[..., Answer]:
    """Run a command in this process: `command("train", path, "run.epochs=1")`."""
    from kd.cli.__main__ import COMMANDS

    def run(name: str, *argv: object) -> Answer:
        capfd.readouterr()
        try:
            code = COMMANDS[name]([str(arg) for arg in argv])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        captured = capfd.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(command) -> Callable[..., str]:
    """Run a command that must stop with code 2 and a line on stderr; return that."""

    def run(name: str, *argv: object) -> str:
        answer = command(name, *argv)
        assert answer.code == 2, answer
        assert len(answer.err.splitlines()) == 1, answer.err
        assert answer.err.rstrip().endswith((".", "?", "!"))
        return answer.err.strip()

    return run


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Path:
    """Work in `tmp_path`, so that relative paths write nothing elsewhere."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learned(photos: Path, teacher: Path, folder: Path, /, **sections: Any) -> Path:
    """Train a student of `teacher` on `photos` and return its run folder."""
    from kd import config
    from kd.jobs.train import train

    settings = base(photos, folder) | {"teacher": teacher_at(teacher)}
    return train(config.load(merged(settings, sections))).folder


@pytest.fixture(scope="session")
def distilled(photos, teacher, once) -> Path:
    """A finished run folder of a student that has learned `photos`, read only."""
    return once(
        "distilled", lambda folder: learned(photos, teacher, folder, run={"epochs": 6})
    )


@pytest.fixture(scope="session")
def exported(distilled, once) -> Path:
    """What `kd-export --int8 --pt2` writes for `distilled`. Do not write into it."""
    from kd.deploy.export.export import ExportOptions, export

    options = ExportOptions(int8=True, pt2=True)
    return once(
        "exported", lambda folder: export(distilled, folder / "export", options).folder
    )


@pytest.fixture(scope="session")
def embedded(photos, teacher, once) -> Path:
    """A finished run folder of an embedding student, with its export, read only."""
    from kd.deploy.export.export import ExportOptions, export

    def build(folder: Path) -> Path:
        losses = [{"kind": "cosine"}, {"kind": "cckd", "weight": 0.5}]
        run = learned(
            photos, teacher, folder, teacher={"cache": {"views": 1}}, losses=losses
        )
        export(run, options=ExportOptions(int8=True))
        return run

    return once("embedded", build)


@pytest.fixture(scope="session")
def _moto() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(_moto, monkeypatch) -> Iterator[Callable[[str], Any]]:
    """Point boto3 and s3fs at moto's server, with only the bucket `bucket`."""
    import boto3

    variables = {
        "AWS_ENDPOINT_URL": _moto,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    urllib.request.urlopen(
        urllib.request.Request(f"{_moto}/moto-api/reset", method="POST")
    ).close()
    boto3.setup_default_session()
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield boto3.client
    boto3.DEFAULT_SESSION = None
