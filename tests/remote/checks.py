"""The remote loader against the local one; test_cluster.py runs this in the trainer of
a job with data hosts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from pieces import base
from views_for_checks import Absent, Slow, Stale

from kd.cli.training import train
from kd.cluster.decoders import Pool
from kd.cluster.group import RAY_MARK
from kd.cluster.hosts import marked_processes, signal_all
from kd.cluster.remote import RemoteLoader
from kd.core.errors import KdError
from kd.core.types import TENSORS, Batch, Plan
from kd.data.loader import LocalLoader, Share
from kd.data.views import MixupCutmix, TrainTransform, Views
from kd.parts.datasets.imagefolder import Options, build

DEADLINE = 2.0
COMPARED = ("kind", "step", "loss", "kl", "lr", "accuracy", "nll", "agreement")
DATA_HOSTS = json.loads(os.environ["SM_INSTANCE_GROUPS_DICT"])["data"]["hosts"]


@pytest.fixture(scope="module")
def broken(photos, tmp_path_factory) -> Path:
    """`photos` with one file that is no image."""
    root = tmp_path_factory.mktemp("broken")
    for file in photos.rglob("*.jpg"):
        target = root / file.relative_to(photos)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes() if file.name != "03.jpg" else b"no image")
    return root


@pytest.fixture(scope="module")
def datasets(photos, broken) -> list:
    """What the decoders of this module read: mixed, with unreadable images, refusing
    them, slow, absent, stale.
    """
    source, torn = (
        build(Options(root=str(root)), "train", None) for root in (photos, broken)
    )
    transform = TrainTransform(16, 0.35, 0.5, 0.3)
    views = Views(source, transform, size=16, seed=3, mixing=MixupCutmix(0.8, 1.0, 0.7))
    skip, refuse = (
        Views(torn, TrainTransform(16, 0.35, 0.5, 0.3), 16, 3, on_corrupt=on_corrupt)
        for on_corrupt in ("skip", "error")
    )
    return [views, skip, refuse, Slow(views, 0.02), Absent(views), Stale(views)]


@pytest.fixture(scope="module")
def pools(datasets) -> list[Pool]:
    """What rank 0 and rank 1 see of the same decoders, one on each host."""
    pools = [Pool(datasets, rank, 7, 60.0) for rank in range(2)]
    for pool in pools:
        pool.wait_for_decoders()
    return pools


def wait(condition, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)
    return condition()


def plan_of(count: int, seed: int = 1) -> Plan:
    generator = torch.Generator().manual_seed(seed)
    return Plan(
        ids=torch.randint(0, 36, (count,), generator=generator),
        weights=torch.linspace(0.5, 2.0, count),
    )


def both(
    datasets, pool: Pool, number: int, *sizes: int
) -> tuple[LocalLoader, RemoteLoader]:
    return LocalLoader(datasets[number], Share(*sizes), 0), RemoteLoader(
        pool, number, datasets[number], Share(*sizes)
    )


def same(first: Batch, second: Batch) -> bool:
    equal = all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in TENSORS
    )
    dtypes = all(
        getattr(first, name).dtype == getattr(second, name).dtype for name in TENSORS
    )
    return (
        equal
        and dtypes
        and (first.view, first.unreadable, first.crc)
        == (second.view, second.unreadable, second.crc)
    )


def same_epochs(here: LocalLoader, there: RemoteLoader, count: int, view: int) -> bool:
    epochs = (loader.epoch(plan_of(count), view) for loader in (here, there))
    return all(same(a, b) for a, b in zip(*epochs, strict=True))


SIZES = [(12, 1, 1, 0), (12, 2, 1, 3), (24, 1, 2, 1), (96, 1, 1, 0)]


@pytest.mark.parametrize(("batch", "micros", "ranks", "start"), SIZES)
def test_all_ranks_get_what_the_local_loader_gives(
    datasets, pools, batch, micros, ranks, start
):
    """Also in the first pass: the trainers of a short run once made all images
    themselves.
    """
    for rank in range(ranks):
        here, there = both(datasets, pools[rank], 0, batch, micros, rank, ranks)
        for view in range(2):
            expected = list(here.epoch(plan_of(192, view), view, start))
            batches = list(there.epoch(plan_of(192, view), view, start))
            assert len(batches) == (192 // batch - start) * micros
            assert all(same(a, b) for a, b in zip(expected, batches, strict=True))
        assert there.made_here == 0
        assert len(pools[rank].trusted()) == 1 + len(DATA_HOSTS)


def test_two_epochs_at_once_and_one_that_is_given_up(datasets, pools):
    here, there = both(datasets, pools[0], 0, 12, 1, 0, 1)
    _, remote = both(datasets, pools[0], 1, 12, 1, 0, 1)
    batches = there.epoch(plan_of(144), 0)
    first = next(batches)
    assert (
        len(list(remote.epoch(plan_of(72), 0))) == 6
    )  # an evaluation in the middle of an epoch
    second = next(batches)
    batches.close()
    assert all(
        same(a, b)
        for a, b in zip(here.epoch(plan_of(144), 0), (first, second), strict=False)
    )
    assert wait(lambda: not any(slot.calls for slot in pools[0].slots), 10)
    assert len(list(there.epoch(plan_of(144), 0))) == 12


def test_unreadable_images_are_reported_alike(datasets, pools):
    here, there = both(datasets, pools[0], 1, 12, 1, 0, 1)
    assert same_epochs(here, there, 96, 0)
    assert here.unreadable == there.unreadable
    assert len(there.unreadable) == 3


def test_an_unreadable_image_is_the_local_loaders_error_at_the_same_batch(
    datasets, pools
):
    errors = []
    for loader in both(datasets, pools[0], 2, 12, 1, 0, 1):
        batches = 0
        try:
            for _ in loader.epoch(plan_of(96), 0):
                batches += 1
        except KdError as error:
            errors.append((batches, type(error), str(error)))
    assert len(errors) == 2
    assert errors[0] == errors[1]


def test_a_host_with_an_old_copy_of_the_data_ends_the_run(datasets, pools):
    """Its images were trained on, and nothing was said."""
    _, there = both(datasets, pools[0], 5, 12, 1, 0, 1)
    with pytest.raises(
        KdError,
        match=(
            r"^data\.loader: the host .* makes other pixels of image \d+ than this one"
        ),
    ):
        list(there.epoch(plan_of(24), 0))


def test_images_that_only_the_trainer_has_are_made_there(datasets, pools):
    here, there = both(datasets, pools[1], 4, 12, 1, 0, 1)
    assert same_epochs(here, there, 48, 0)
    assert there.made_here == 48
    pools[1].grow()  # as the next pass does
    assert pools[1].slots == []


def test_a_data_host_is_frozen_and_killed_and_comes_back(datasets, pools, monkeypatch):
    monkeypatch.setattr(pools[0], "deadline", DEADLINE)
    here, there = both(datasets, pools[0], 3, 6, 1, 0, 1)
    plan = plan_of(240)
    longest = 0.0
    before = time.monotonic()
    frozen = []
    killed = []
    expected = LocalLoader(datasets[0], Share(6, 1, 0, 1), 0).epoch(plan, 1)
    for number, (a, b) in enumerate(zip(expected, there.epoch(plan, 1), strict=True)):
        assert same(a, b)
        longest = max(longest, time.monotonic() - before)
        before = time.monotonic()
        if number == 8:
            frozen = of_ray(DATA_HOSTS[-1])
            signal_all(frozen, signal.SIGSTOP)
        if number == 24:
            signal_all(frozen, signal.SIGCONT)
            killed = of_ray(DATA_HOSTS[0])
            signal_all(killed, signal.SIGKILL)
    assert frozen
    assert killed
    print(f"longest wait {longest:.1f} s, {there.made_here} of 240 images made here")
    assert 0 < there.made_here < 120
    back = set(DATA_HOSTS)
    assert wait(lambda: back <= {slot.address for slot in pools[0].trusted()}), (
        "a host has not come back"
    )
    made_before = there.made_here
    assert same_epochs(here, there, 36, 2)
    assert there.made_here == made_before
    assert {slot.calls for slot in pools[0].slots} == {
        0
    }  # else a host that came back looks busy for ever


def test_a_run_waits_for_its_first_decoder(datasets):
    """It takes longer to start than a call may take: the trainers of a short run made
    all images themselves.
    """
    pool = Pool(datasets, 0, 8, 0.01)  # it ends the decoders of the tests above
    pool.wait_for_decoders()
    pool.deadline = 60.0
    here, there = both(datasets, pool, 0, 12, 1, 0, 1)
    assert same_epochs(here, there, 96, 0)
    assert there.made_here == 0


def of_ray(host: str) -> list[int]:
    """Return Ray's processes of a host of this job."""
    return sorted(
        set(marked_processes(host, "SM_CURRENT_HOST"))
        & set(marked_processes(os.environ["KD_RUN"], "KD_RUN"))
        & ray_started()
    )


def ray_started() -> set[int]:
    """Return all processes that a host of any job has started with Ray."""
    processes = set()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if f"\0{RAY_MARK}=".encode() in (folder / "environ").read_bytes():
                processes.add(int(folder.name))
    return processes


@pytest.mark.skipif(
    not os.environ.get("KD_SOAK"), reason="15 s of CPU; equal batches make equal runs"
)
def test_a_run_with_a_teacher_cache_is_the_same_run(photos, tmp_path, capfd):
    rows = []
    settings = base(photos, tmp_path)
    settings["teacher"] |= {
        "cache": {"views": 1},
        "fit": {"epochs": 1, "folder": str(tmp_path / "teachers")},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    for loader in ("local", "ray"):
        keys = [
            f"run.name={loader}",
            f"run.folder={tmp_path / loader}",
            f"data.loader={loader}",
        ]
        assert train([str(tmp_path / "tiny.yaml"), *keys]) == 0, capfd.readouterr().err
        lines = (tmp_path / loader / loader / "metrics.jsonl").read_text().splitlines()
        rows.append(
            [
                {k: v for k, v in json.loads(line).items() if k in COMPARED}
                for line in lines
            ]
        )
    assert rows[0] == rows[1]
    assert len(rows[0]) > 4
