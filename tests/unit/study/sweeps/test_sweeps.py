"""What a sweep tries, which trials end early, and what it refuses; tests/e2e/test_sweep.py runs one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time

import pytest

from kd import config
from kd.core.errors import ConfigError, Interrupted
from kd.core.scores import Column
from kd.setup.recipe import resolve
from kd.study.sweeps.median import BEGIN, LEAST, Point, judge
from kd.study.sweeps.processes import Processes, failure
from kd.study.sweeps.space import Space, prepared_alike, sharing
from kd.study.sweeps.sweep import flattery, sweep
from kd.study.sweeps.trials import Trials

# ----------------------------------------------------------------------------------------------------- what is tried


def test_all_combinations_in_the_order_of_the_command(settings):
    space = Space.read(settings, ["losses=[{kind: kl}],[{kind: dkd}]", "run.epochs=3", "optimizer.lr=1e-3,0.01"])
    assert space.fixed == ["run.epochs=3"]
    loaded = [space.load(values) for values in space.combinations(0)]
    found = [(one.losses[0].kind, one.optimizer.lr, one.run.epochs) for one in loaded]
    assert found == [("kl", 1e-3, 3), ("kl", 1e-2, 3), ("dkd", 1e-3, 3), ("dkd", 1e-2, 3)]


def test_a_list_behind_a_value_is_what_counts(settings):
    space = Space.read(settings, ["optimizer.lr=5e-3", "optimizer.lr=1e-3,1e-2"])
    assert [space.load(values).optimizer.lr for values in space.combinations(0)] == [1e-3, 1e-2]


@pytest.mark.parametrize(
    "override", ["optimizer.betas=[0.9,0.99]", "data.root=${oc.env:HOME,nowhere}", "student.args={a: 1, b: 2}"]
)
def test_commas_inside_a_value_separate_nothing(override):
    assert Space.read({}, [override, "run.seed=0,1"]).fixed == [override]


def test_draws_are_uniform_in_the_logarithm_and_the_first_stay_the_same():
    space = Space.read({}, ["optimizer.lr=1e-4..1e-1", "data.batch_size=8..64", "run.seed=0,1"])
    few, many = space.combinations(5), space.combinations(400)
    assert many[:5] == few
    assert {one["run.seed"] for one in few[:2]} == {"0", "1"}
    assert {8, 64} <= {int(one["data.batch_size"]) for one in many} <= set(range(8, 65))
    logs = sorted(math.log10(float(one["optimizer.lr"])) for one in many)
    expected = [-4 + 3 * (i + 0.5) / 400 for i in range(400)]
    assert max(abs(a - b) for a, b in zip(logs, expected, strict=True)) < 3 * 1.63 / 20  # Kolmogorov, 1 %


def test_draws_of_lists_alone_are_different_combinations():
    space = Space.read({}, ["optimizer.lr=1,2,3", "run.seed=0,1"])
    assert {tuple(one.values()) for one in space.combinations(99)} == {
        tuple(one.values()) for one in space.combinations(0)
    }
    assert len(space.combinations(4)) == 4


def test_trials_share_teacher_cache_and_store(settings):
    settings["data"]["store"], settings["backend"]["threads"] = "ram", 0
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    shared = sharing(space.load({}), 3)
    assert shared == ["backend.threads=3", "data.store=disk", "teacher.cache.views=2"]  # two epochs
    one, other = [space.trial(values, "tiny_sweep", shared) for values in space.combinations(0)]
    assert one.name != other.name
    assert prepared_alike(one) == prepared_alike(other)
    assert resolve(one.config).record.path.relative_to(one.config.run.folder).as_posix() == f"tiny_sweep/{one.name}"
    assert one.config.run.folder == settings["run"]["folder"]
    more = space.trial(one.values, "tiny_sweep", sharing(space.load({}), 1))
    assert more.name == one.name, "--jobs changes threads, and makes no other trial of it"
    assert space.trial(one.values, "tiny_sweep", [*shared, "run.epochs=1"]).name != one.name
    assert prepared_alike(space.trial(one.values, "tiny_sweep", [*shared, "run.seed=1"])) != prepared_alike(one)


def test_a_cache_that_was_chosen_stays(settings):
    assert sharing(config.load(settings, ["teacher.cache.views=7"]), 1) == []
    assert sharing(config.load(settings, ["run.steps=7"]), 1) == []
    assert sharing(config.load(settings, ["losses=[{kind: tokens}]"]), 1) == []


# ------------------------------------------------------------------------------------------------------- median rule


def curves_of(draw: random.Random, smaller: bool) -> list[list[Point]]:
    """Return curves of eight trials with up to six evaluations, two of them at other steps."""
    found = []
    for number in range(8):
        apart, best, curve = (5 if number in (2, 5) else 10), None, []
        for i in range(1, draw.randint(4, 7)):
            score = draw.random()
            best = score if best is None else (min if smaller else max)(best, score)
            curve.append(Point(apart * i, i / 6, best))
        found.append(curve)
    return found


def ended_by_definition(curves: list[list[Point]], smaller: bool) -> list[int | None]:
    """Return the step at which each trial ends: written once more, from the definition."""
    ends: list[int | None] = []
    for number, curve in enumerate(curves):
        end = None
        for point in curve:
            others = []
            for j in range(number):
                at = [p.score for p in curves[j] if p.step == point.step]
                others += at if ends[j] is None or ends[j] >= point.step else []
            worse = len(others) >= LEAST and (
                point.score > statistics.median(others) if smaller else point.score < statistics.median(others)
            )
            if end is None and worse and BEGIN <= point.share < 1:
                end = point.step
        ends.append(end)
    return ends


@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_median_rule_is_that_of_its_definition_and_knows_no_clock(seed, smaller):
    draw = random.Random(seed)
    curves = curves_of(draw, smaller)
    final = judge(curves, [True] * len(curves), smaller=smaller)
    assert [one.end and one.end.step for one in final] == ended_by_definition(curves, smaller)
    assert all(one.until == math.inf for one in final)
    for _ in range(20):  # a moment at which each trial has come so far
        seen = [draw.randint(0, len(curve)) for curve in curves]
        known = [curve[:count] for curve, count in zip(curves, seen, strict=True)]
        done = [count == len(curve) for count, curve in zip(seen, curves, strict=True)]
        now = judge(known, done, smaller=smaller)
        for verdict, last in zip(now, final, strict=True):
            if verdict.until == math.inf:
                assert verdict == last
            else:
                assert last.end is None or last.end.step > verdict.until
        recorded = {i for i, verdict in enumerate(now) if verdict.until == math.inf}
        last = [math.inf if one.end is None else one.end.step for one in now]
        cut = [[point for point in curve if point.step <= last[i]] for i, curve in enumerate(known)]
        again = judge(cut, done, recorded, smaller)
        assert [again[i] for i in range(8) if i not in recorded] == [now[i] for i in range(8) if i not in recorded]


def test_some_trials_end():
    ends = [one for seed in range(20) for one in ended_by_definition(curves_of(random.Random(seed), False), False)]
    assert 20 < sum(end is not None for end in ends) < 120


# ---------------------------------------------------------------------------------------------- what is said, refused


def test_by_how_much_the_best_flatters():
    rows, fresh = [{"score": 0.8}, {"score": 0.7}, {"score": 0.6}], [{"score": 0.75}, {"score": 0.65}]
    assert "best of 3 flatters by +10.0 points" in flattery(rows, fresh, Column("accuracy", "accuracy"))
    text = flattery([{"score": 0.5}, {"score": 0.6}], [{"score": 0.75}], Column("kl", "KL", "nats", smaller=True))
    assert "flatters by +0.2500 nats" in text


@pytest.mark.parametrize(
    ("overrides", "where", "words"),
    [
        (["optimizer.lrr=1e-3,1e-2"], "optimizer.lrr", "no such key"),
        (["optimizer.lr=,"], "optimizer.lr", "a value is missing"),
        (["optimizer.lr=1e-3,"], "optimizer.lr", "a value is missing"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr", "stands twice"),
        (["optimizer.lr=1e-3"], "kd-sweep", "no key has several values"),
        ([], "kd-sweep", "no key has several values"),
        (["optimizer.lr=1e-3,-1"], "optimizer.lr", "is -1"),
        (["run.name=one,two"], "run.name", "changes no weight"),
        (["run.folder=one,two"], "run.folder", "changes no weight"),
        (["optimizer.lr=1e-3..1e-1"], "optimizer.lr", "--trials N"),
        (["optimizer.lr=1e-1..1e-3", "--trials", "2"], "optimizer.lr", "LOW < HIGH"),
        (["optimizer.lr=1e-3,1e-2", "--by", "speed"], "--by", "agreement"),
        (["optimizer.lr=1e-3,1e-2", "optimizer.lr=1e-4,1e-1"], "optimizer.lr", "stands again"),
        (["losses.0.weight=1,2", "losses[0].weight=3"], "losses.0.weight", "stands again"),
        (["optimizer.lr=1,1.0"], "optimizer.lr", "'1' and '1.0' make the same run"),
        (["run.baseline=true,false"], "run.baseline", "make the same run"),
    ],
)
def test_wrong_sweeps_are_one_line_and_write_nothing(overrides, where, words, written, refused, tmp_path):
    line = refused("sweep", written(), *overrides)
    assert line.startswith(f"{where}: ")
    assert words in line
    assert not list(tmp_path.rglob("*_sweep"))


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"jobs": "2"}, {"trials": -1}])
def test_a_wrong_number_is_named(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: is .* A whole number >= "):
        sweep({}, "optimizer.lr=1,2", **wrong)


def test_trials_of_a_name_with_a_slash_lie_below_the_sweep(settings, monkeypatch):
    seen = []

    def train(tried, jobs):
        seen.extend((resolve(one.config).record.path, tried.folder / one.name) for one in tried.trials)
        raise Interrupted

    monkeypatch.setattr(Trials, "train", train)
    with pytest.raises(Interrupted):
        sweep(settings, "optimizer.lr=1e-3,1e-2", "run.name=mine/first")
    assert len(seen) == 2
    assert all(path == expected for path, expected in seen)


def test_a_score_that_the_runs_do_not_have_is_refused(settings, tmp_path):
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations(0)]
    (tmp_path / trials[0].name).mkdir()
    row = {"kind": "val", "step": 6, "epoch": 1, "accuracy": 0.5, "agreement": 0.4}
    (tmp_path / trials[0].name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"^--by: is 'agreement_ece', .* Allowed: accuracy, agreement\. "):
        Trials(tmp_path, trials, "agreement_ece")._judged(set(), final=False)


def test_a_process_that_is_killed_is_told_by_the_signal(tmp_path):
    with Processes() as processes:
        processes.start("served", ["serve", str(tmp_path)], tmp_path / "log")
        (tmp_path / "log").write_text("step 12\n")
        processes.running["served"][0].kill()
        processes.running["served"][0].wait()
        assert processes.ended() == {"served": "was ended by signal 9"}


def test_a_process_that_fails_is_told_by_its_last_line(tmp_path):
    found: dict[str, str] = {}
    with Processes() as processes:
        processes.start("good", ["--version"], tmp_path / "good.log")
        processes.start("bad", ["trian"], tmp_path / "bad.log")
        while processes.running:
            found |= processes.ended()
            time.sleep(0.05)
    assert found["good"] == ""
    assert found["bad"].startswith("kd: no command 'trian'.")
    assert str(failure(found["bad"])) == found["bad"] == (tmp_path / "bad.log").read_text().strip()
    assert failure("Killed").exit_code == 2


def test_a_process_that_somebody_else_stops_interrupts_the_sweep(tmp_path):
    with Processes() as processes:
        processes.start("served", ["serve", str(tmp_path)], tmp_path / "log")
        os.kill(processes.running["served"][0].pid, signal.SIGTERM)
        processes.running["served"][0].wait()
        with pytest.raises(Interrupted, match="the same command resumes"):
            processes.ended()


def test_an_override_without_a_value_is_refused_as_elsewhere(settings):
    with pytest.raises(ConfigError, match="not an override"):
        Space.read(settings, ["optimizer", "run.seed=0,1"]).load({})


def test_a_command_that_ends_with_a_traceback_names_the_file_that_has_it(tmp_path):
    output = tmp_path / "one.log"
    words = "import sys; print('this is a bug in kd; please report it with the lines above'); sys.exit(1)"
    with Processes() as processes, output.open("wb") as file:
        processes.running["one"] = subprocess.Popen([sys.executable, "-c", words], stdout=file), output
        while not (ended := processes.ended()):
            time.sleep(0.01)
    assert str(failure(ended["one"])) == f"kd-sweep: ended with a traceback, which '{output}' has."
