"""How many workers: the rules against cases by hand, and real runs that measure, say and remember it."""

from __future__ import annotations

import re

import pytest
import torch

from kd import build, config
from kd.artifacts.memory import Memory
from kd.data.transforms import Train
from kd.data.views import Views
from kd.datasets import imagefolder
from kd.report.console import Console
from kd.start.workers import Pace, ahead, clear_winner, loading_ms, pairs, share_asked, unmeasured


@pytest.mark.parametrize(
    ("load", "step", "share", "workers", "told"),
    [
        (4.0, 60.0, 8, 1, "one worker is ahead of the step"),  # 1.25 x 4 / 60 = 0.08
        (4.0, 5.0, 8, 1, "one worker is ahead of the step"),  # exactly 1
        (4.0, 4.9, 8, 2, "2 are ahead of the step"),  # 1.02
        (4.0, 1.0, 8, 5, "5 are ahead of the step"),
        (4.0, 1.0, 6, 5, "5 are ahead of the step"),  # six cores: five workers and this process
        (4.0, 1.0, 5, 4, "5 would keep ahead, this rank has 5 cores, so the step will wait"),
        (4.0, 0.1, 8, 7, "50 would keep ahead, this rank has 8 cores, so the step will wait"),
        (4.0, 0.1, 1, 1, "50 would keep ahead, this rank has 1 cores"),
        (0.0, 1.0, 8, 1, "one worker"),
    ],
)
def test_beside_an_accelerator_workers_keep_ahead_of_the_step(load, step, share, workers, told):
    count, line = ahead(Pace(load, step), share, stored=False)
    assert count == workers
    assert told in line
    assert line.startswith(f"loading {load:.3g} ms an image, step {step:.3g} ms: ")
    waits = "will wait" in line
    assert ("data.store=disk" in line) == waits
    assert "data.store" not in ahead(Pace(load, step), share, stored=True)[1]


@pytest.mark.parametrize(
    ("load", "step", "threads", "share", "free", "expected"),
    [
        (1.0, 20.0, 2, 2, True, [(2, 1)]),  # 5 %: nothing to win
        (1.1, 20.0, 2, 2, True, [(2, 1), (1, 1), (2, 0)]),
        (1.1, 20.0, 1, 2, True, [(1, 1), (1, 0)]),  # one thread already leaves a core
        (1.1, 20.0, 2, 2, False, [(2, 1), (2, 0)]),
        (30.0, 20.0, 2, 2, True, [(2, 1), (1, 1), (2, 0)]),  # two workers would leave no core to the step
        (30.0, 20.0, 16, 16, True, [(16, 1), (16, 2), (14, 2), (16, 0)]),
        (30.0, 20.0, 16, 16, False, [(16, 1), (16, 2), (16, 0)]),
        (900.0, 20.0, 4, 4, True, [(4, 1), (4, 3), (1, 3), (4, 0)]),
    ],
)
def test_pairs_worth_trying_on_a_cpu(load, step, threads, share, free, expected):
    assert pairs(Pace(load, step), threads, share, free) == expected
    filling = pairs(Pace(load, step), threads, share, free, alone=False)
    assert filling == [pair for pair in expected if pair[1]]


@pytest.mark.parametrize(
    ("times", "winner"),
    [([100.0, 96.0], 0), ([100.0, 94.9], 1), ([100.0, 94.0, 93.9], 2), ([100.0, 200.0, 300.0], 0), ([100.0], 0)],
)
def test_the_plain_pair_stays_unless_another_is_clearly_faster(times, winner):
    assert clear_winner(times) == winner


@pytest.mark.parametrize(
    ("device", "share", "workers"),
    [("cpu", 1, 0), ("cpu", 2, 1), ("cpu", 64, 1), ("cuda", 1, 1), ("cuda", 8, 7), ("xla", 192, 16)],
)
def test_unmeasured(device, share, workers):
    assert unmeasured(device, share) == workers


def test_a_cache_asks_the_teacher_while_it_fills(settings):
    assert share_asked(config.load(settings, ["run.epochs=8"])) == 1.0
    assert share_asked(config.load(settings, ["run.epochs=8", "teacher.cache.views=2"])) == 0.25
    assert share_asked(config.load(settings, ["run.epochs=2", "teacher.cache.views=4"])) == 1.0


def test_loading_is_timed_on_what_can_be_read(photos, tmp_path):
    for name in ("apple", "pear"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number, path in enumerate(sorted((photos / "train" / name).iterdir())[:4]):
            content = path.read_bytes()
            (folder / path.name).write_bytes(content[:100] if number == 1 else content)
    source = imagefolder.build(imagefolder.Options(root=str(tmp_path)), "train", None)
    for on_corrupt in ("error", "skip"):
        views = Views(source, Train(16, 0.35, 0.5, 0.3), 16, 0, on_corrupt=on_corrupt)
        milliseconds, ids = loading_ms(views)
        assert ids == [0, 2, 3, 4, 6, 7]
        assert 0 < milliseconds < 1000
    for path in (tmp_path / "train").glob("*/*.jpg"):
        path.write_text("not an image")
    assert loading_ms(Views(source, Train(16, 0.35, 0.5, 0.3), 16, 0)) == (0.0, [])


# --------------------------------------------------------------------------------------------------------- runs


class Lines(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("", quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines += [text] if text else []


def started(settings, *overrides: str, pinned: dict[str, str] | None = None):
    chosen = config.load(settings, overrides)
    data, backend = build.data(chosen), build.backend(chosen)
    teacher = build.teacher_model(chosen, data.train.classes, False)
    lines = Lines()
    run, facts = build.run(chosen, data, backend, teacher, Memory(), lines, pinned or {})
    return run, facts, [line for line in lines.lines if line.startswith("workers: ")]


AUTO = ("data.workers=auto",)


@pytest.mark.parametrize("cores", [1, 2])
def test_auto_is_measured_said_and_recorded(settings, monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    run, facts, lines = started(settings, *AUTO)
    assert len(lines) == 1
    count = int(facts["choices"]["workers"])
    assert run.loader.workers == run.evaluator.loader.workers == count  # type: ignore[attr-defined]
    if cores == 1:
        assert lines == ["workers: 0 (one core a rank: it loads between steps)"]
    else:
        assert re.match(rf"workers: {count} \(loading \S+ ms an image, step \S+ ms[:;]", lines[0])
    assert torch.get_num_threads() == 1  # backend.threads is the user's
    assert "threads" not in facts["choices"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_number_is_a_number(settings, count):
    run, facts, lines = started(settings, f"data.workers={count}")
    assert run.loader.workers == count  # type: ignore[attr-defined]
    assert "workers" not in facts["choices"]
    assert lines == []


def test_a_resumed_run_takes_what_it_began_with(settings, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)), raising=False)
    run, facts, lines = started(settings, *AUTO, pinned={"workers": "3"})
    assert run.loader.workers == 3  # type: ignore[attr-defined]
    assert facts["choices"]["workers"] == "3"
    assert lines == ["workers: 3 (as this run began)"]


def test_a_run_resumed_on_fewer_cores_measures_anew(settings, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    assert started(settings, *AUTO, pinned={"workers": "3"})[1]["choices"]["workers"] == "0"


def test_threads_of_an_earlier_start_stay(settings, monkeypatch):
    """A run of before workers were measured has its threads in the manifest: other sums would follow from others."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    before = torch.get_num_threads()
    try:
        _, facts, _ = started(settings, *AUTO, "backend.threads=0", pinned={"threads": "2"})
        assert facts["choices"]["threads"] == "2"
        assert torch.get_num_threads() == 2
        _, facts, _ = started(settings, *AUTO, "backend.threads=0")
        assert facts["choices"]["threads"] == str(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)


def test_the_race_leaves_the_student_as_it_was(settings, monkeypatch):
    """Batch norm, whose statistics a forward changes; a step so short that loading is worth a race."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    args = "{embed_dim: 32, depth: 1, num_heads: 2, cls_attn_layers: 1}"
    norm = ("student.model=xcit_nano_12_p8_224", f"student.args={args}")
    one, other = started(settings, *norm)[0], started(settings, *norm, *AUTO)[0]
    state, raced = one.distillation.state_dict(), other.distillation.state_dict()
    assert all(torch.equal(state[name], raced[name]) for name in state)
    assert all(parameter.grad is None for parameter in other.distillation.parameters())
