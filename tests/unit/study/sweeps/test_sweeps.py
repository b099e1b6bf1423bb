"""What a sweep tries, what is recorded, and what it refuses; tests/e2e/test_sweep.py
runs one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState, create_trial
from pieces import wait_until

from kd import config
from kd.config.reads import build_task
from kd.core.errors import ConfigError, Interrupted, MissingExtra
from kd.core.scores import Column, Scored
from kd.core.types import State
from kd.files.checkpoint import write
from kd.files.run_dir import RunDir
from kd.setup.recipe import resolve
from kd.study.sweeps.calls import parse_call
from kd.study.sweeps.conduct import plan_sweep
from kd.study.sweeps.processes import Processes, failure
from kd.study.sweeps.ranking import luck_text, trials_table
from kd.study.sweeps.search import Goal, open_study, sampler_of
from kd.study.sweeps.space import Space, prepared_alike, sharing_overrides
from kd.study.sweeps.sweep import sweep
from kd.study.sweeps.trials import Trials


def trials_of(
    settings: dict,
    overrides: list[str],
    folder: Path,
    by: str = "",
    pruner: str = "none",
) -> Trials:
    """Return the trials of a sweep whose study is a journal in a folder."""
    space = Space.read(settings, overrides)
    first = space.load(space.probes()[0])
    goal = Goal.read(build_task(first.task).scores, by, "")
    study = open_study("one", "", folder, goal, optuna.pruners.NopPruner())
    return Trials(
        folder, study, space, goal, partial(space.trial, name="tiny_sweep", shared=[])
    )


def end(
    trials: Trials,
    values: dict[str, str],
    score: float,
    state: TrialState = TrialState.COMPLETE,
) -> str:
    """Record a trial as if it had been trained; return the name of its run."""
    trial = trials.trial_of(values)
    facts = {"trial": trial.name, "key": trials.goal.by or "accuracy", "score": score}
    reports = {0: 0.1, 1: score} if state == TrialState.PRUNED else {}
    record = create_trial(
        state=state,
        value=score,
        params=values,
        distributions=trials.space.axes,
        user_attrs=facts,
        intermediate_values=reports,
    )
    trials.study.add_trial(record)
    return trial.name


def test_all_combinations_come_in_the_order_of_the_command(settings):
    space = Space.read(
        settings,
        ["losses=[{kind: kl}],[{kind: dkd}]", "run.epochs=3", "optimizer.lr=1e-3,0.01"],
    )
    assert space.fixed == ["run.epochs=3"]
    loaded = [space.load(values) for values in space.combinations()]
    combinations = [
        (
            loaded_config.losses[0].kind,
            loaded_config.optimizer.lr,
            loaded_config.run.epochs,
        )
        for loaded_config in loaded
    ]
    assert combinations == [
        ("kl", 1e-3, 3),
        ("kl", 1e-2, 3),
        ("dkd", 1e-3, 3),
        ("dkd", 1e-2, 3),
    ]


def test_a_list_behind_a_value_is_what_counts(settings):
    space = Space.read(settings, ["optimizer.lr=5e-3", "optimizer.lr=1e-3,1e-2"])
    assert [space.load(values).optimizer.lr for values in space.combinations()] == [
        1e-3,
        1e-2,
    ]


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.betas=[0.9,0.99]",
        "data.root=${oc.env:HOME,nowhere}",
        "student.args={a: 1, b: 2}",
    ],
)
def test_commas_inside_a_value_separate_nothing(override):
    assert Space.read({}, [override, "run.seed=0,1"]).fixed == [override]


def test_trials_share_teacher_cache_and_store(settings):
    settings["data"]["store"] = "ram"
    settings["backend"]["threads"] = 0
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    shared = sharing_overrides(space.load({}), 3)
    assert shared == [
        "backend.threads=3",
        "data.store=disk",
        "teacher.cache.views=2",
    ]  # two epochs
    first, second = [
        space.trial(values, "tiny_sweep", shared) for values in space.combinations()
    ]
    assert first.name != second.name
    assert prepared_alike(first) == prepared_alike(second)
    assert (
        resolve(first.config)
        .record.path.relative_to(first.config.run.folder)
        .as_posix()
        == f"tiny_sweep/{first.name}"
    )
    assert first.config.run.folder == settings["run"]["folder"]
    threaded = space.trial(
        first.values, "tiny_sweep", sharing_overrides(space.load({}), 1)
    )
    assert threaded.name == first.name, (
        "--jobs changes threads, and makes no other trial of it"
    )
    assert (
        space.trial(first.values, "tiny_sweep", [*shared, "run.epochs=1"]).name
        != first.name
    )
    assert prepared_alike(
        space.trial(first.values, "tiny_sweep", [*shared, "run.seed=1"])
    ) != prepared_alike(first)


def test_a_cache_that_was_chosen_stays(settings):
    assert sharing_overrides(config.load(settings, ["teacher.cache.views=7"]), 1) == []
    assert sharing_overrides(config.load(settings, ["run.steps=7"]), 1) == []
    assert (
        sharing_overrides(config.load(settings, ["losses=[{kind: tokens}]"]), 1) == []
    )


def test_the_luck_of_the_best_is_that_of_its_seed_and_nothing_more_is_claimed():
    """The last lines said "flatters by": the fresh seeds are scored on the images that
    chose.
    """
    rows = [{"score": 0.8}, {"score": 0.7}, {"score": 0.6}]
    fresh = [
        {"score": 0.75},
        {"score": 0.65},
    ]
    accuracy = Column("accuracy", "accuracy")
    text = luck_text(rows, fresh, {}, accuracy)
    assert "best of 3 trials has accuracy 80.0 %" in text
    assert "the seed's part of the best score is +10.0 points" in text
    assert "images' part is not known" in text
    assert "flatters" not in text
    kl = luck_text(
        [{"score": 0.5}, {"score": 0.6}],
        [{"score": 0.75}],
        {},
        Column("kl", "KL", "nats", smaller=True),
    )
    assert "the seed's part of the best score is +0.2500 nats" in kl
    fresh = [{**row, "test": {"score": 0.7}} for row in fresh]
    tested = luck_text(rows, fresh, {"score": 0.72, "interval": [0.6, 0.8]}, accuracy)
    assert (
        "On test images, which chose nothing, the best has 72.0 % (60.0 to 80.0), the"
        " others 70.0 % and" in tested
    )
    assert "not known" not in tested


def test_rows_are_those_that_ended_best_first_then_those_that_were_pruned(
    settings, tmp_path
):
    trials = trials_of(
        settings, ["optimizer.lr=1e-3,1e-2", "student.args.depth=1,2"], tmp_path
    )
    combinations = trials.space.combinations()
    end(trials, combinations[3], 0.5)
    end(trials, combinations[0], 0.9, TrialState.PRUNED)
    end(trials, combinations[2], 0.5)
    best = end(trials, combinations[1], 0.6)
    rows = trials.rows()
    assert rows[0] == {
        "trial": best,
        "key": "accuracy",
        "score": 0.6,
        "values": combinations[1],
    }
    assert [row["values"] for row in rows] == [combinations[i] for i in (1, 2, 3, 0)], (
        "equal ones by the command"
    )
    assert [row.get("pruned") for row in rows] == [None, None, None, 2]
    assert (
        trials_of(
            settings, ["optimizer.lr=1e-3,1e-2", "student.args.depth=1,2"], tmp_path
        ).rows()
        == rows
    )
    assert "pruned at evaluation 2" in trials_table(
        rows, trials, Column("accuracy", "accuracy"), {}
    )


def test_of_errors_the_smallest_is_the_best(settings, tmp_path):
    trials = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path, "ece")
    for values, score in zip(trials.space.combinations(), (0.2, 0.1), strict=True):
        end(trials, values, score)
    assert [row["score"] for row in trials.rows()] == [0.1, 0.2]
    assert trials.study.best_trial.value == 0.1


def test_a_trial_that_failed_is_tried_again_and_shown_until_then(settings, tmp_path):
    trials = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path)
    values = trials.space.combinations()[1]
    record = create_trial(
        state=TrialState.FAIL, params=values, distributions=trials.space.axes
    )
    trials.study.add_trial(record)
    assert trials.failed() == [(values, "was interrupted")]
    trials._begin(grid=False)
    trials._begin(grid=False)
    (waiting,) = trials.study.get_trials(states=(TrialState.WAITING,))
    assert waiting.user_attrs == {"values": values, "continues": 0}
    assert trials.failed() == []


def test_an_interrupted_trial_is_taken_once_its_process_is_gone(settings, tmp_path):
    """The first to take it holds the lock of its run; a kill frees that."""
    trials = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path)
    for values in trials.space.combinations():
        trials.study.enqueue_trial(values, {"values": values})
    first = trials._next(0, None)
    second = trials._next(0, None)
    assert first is not None
    assert second is not None
    assert trials._next(0, None) is None, "both are trained"
    first.claim.close()
    again = trials._next(0, None)
    assert again is not None
    assert again.trial == first.trial
    assert again.study_trial.params == first.study_trial.params
    states = [record.state for record in trials.study.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.RUNNING]
    again.claim.close()
    second.claim.close()


def test_equal_values_are_never_trained_at_the_same_time(settings, tmp_path):
    trials = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path)
    values = trials.space.combinations()[0]
    for _ in range(2):
        trials.study.enqueue_trial(values)
    first = trials._next(0, None)
    assert first is not None
    assert [trials._next(0, None) for _ in range(3)] == [None] * 3
    first.claim.close()
    trials.study.tell(first.study_trial, 0.5)
    again = trials._next(0, None)
    assert again is not None
    assert again.trial == first.trial
    again.claim.close()


def test_what_a_sampler_draws_depends_on_the_seed_and_the_number_alone(settings):
    space = Space.read(settings, ["optimizer.lr=loguniform(1e-4,1e-2)"])

    def rates(seed: int) -> list[float]:
        sampler = sampler_of("random", space, 9, seed)
        assert sampler is not None
        study = optuna.create_study()
        for number in range(3):
            study.sampler = sampler(number)
            study.ask(dict(space.axes))
        return [record.params["optimizer.lr"] for record in study.trials]

    assert rates(0) == rates(0)
    assert len({*rates(0), *rates(1)}) == 6
    assert all(1e-4 <= value <= 1e-2 for value in rates(2))


def test_ranges_become_values_of_a_run(settings):
    space = Space.read(
        settings,
        [
            "optimizer.lr=loguniform(1e-4,1e-2)",
            "student.args.depth=integers(1,3)",
            "run.seed=4,5",
        ],
    )
    assert space.ranges == ["optimizer.lr", "student.args.depth"]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    trials = [study.ask(dict(space.axes)) for _ in range(20)]
    loaded = [
        space.load({key: str(value) for key, value in trial.params.items()})
        for trial in trials
    ]
    assert {loaded_config.student.args["depth"] for loaded_config in loaded} == {
        1,
        2,
        3,
    }, "both ends"
    assert {loaded_config.run.seed for loaded_config in loaded} == {4, 5}
    assert [loaded_config.optimizer.lr for loaded_config in loaded] == [
        trial.params["optimizer.lr"] for trial in trials
    ]
    assert len(space.probes()) == 1 + 2 + 1 + 1
    rates = sorted(
        {
            loaded_config.optimizer.lr
            for loaded_config in map(space.load, space.probes())
        }
    )
    assert rates == pytest.approx([1e-4, 0.0034, 1e-2]), (
        "its ends, and one between them"
    )


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("median", ("median", [], {})),
        (
            "percentile(25, n_startup_trials=2)",
            ("percentile", [25], {"n_startup_trials": 2}),
        ),
        ("uniform(-1,2.5)", ("uniform", [-1, 2.5], {})),
        ("a,b", ("", [], {})),
        ("f(x)", ("", [], {})),
        ("f(1)(2)", ("", [], {})),
        ("f(1)+(2)", ("", [], {})),
        ("f(", ("", [], {})),
    ],
)
def test_calls_are_read_and_nothing_is_run(text, call):
    assert parse_call(text) == call


@pytest.mark.parametrize(
    "name", ["tpe", "random", "TPE(multivariate=True)", "nsga2", "nsga3", "qmc"]
)
def test_a_sampler_is_named_as_in_the_field(settings, name):
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    assert plan_sweep(space, 3, name, "none", "", "").sampler is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", "NopPruner"),
        ("median", "MedianPruner"),
        ("percentile(25)", "PercentilePruner"),
        ("successive_halving", "SuccessiveHalvingPruner"),
        ("SuccessiveHalving", "SuccessiveHalvingPruner"),
        ("hyperband", "HyperbandPruner"),
        ("threshold(lower=0.1)", "ThresholdPruner"),
        ("patient(None, 3)", "PatientPruner"),
    ],
)
def test_a_pruner_is_named_as_in_the_field(settings, name, kind):
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    assert type(plan_sweep(space, 0, "", name, "", "").pruner).__name__ == kind


def test_a_package_that_a_sampler_needs_is_named(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "cmaes", None)
    space = Space.read(
        settings,
        ["optimizer.lr=uniform(1e-3,1e-2)", "optimizer.weight_decay=uniform(0.01,0.1)"],
    )
    with pytest.raises(
        MissingExtra, match=r"^--sampler: .* not installed .* pip install cmaes\."
    ):
        plan_sweep(space, 3, "cmaes", "none", "", "")


def test_without_optuna_the_line_names_the_extra(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        MissingExtra,
        match=r"^kd-sweep: .* optuna is not installed\. pip install 'PATH/kd\[sweep\]'",
    ):
        sweep(settings, "optimizer.lr=1e-3,1e-2")


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's parent-death signal is Linux's"
)
def test_processes_of_a_killed_sweep_end(tmp_path):
    """It went on training for nobody."""
    code = (
        "import pathlib, sys, time\nfrom kd.study.sweeps.processes import"
        " Processes\nwith Processes() as processes:\n    processes.start('served',"
        " ['serve', sys.argv[1]], pathlib.Path(sys.argv[1], 'log'))\n   "
        " print(processes.running['served'][0].pid, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as sweeping:
        assert sweeping.stdout is not None
        started = int(sweeping.stdout.readline())
        sweeping.kill()
    wait_until(lambda: not is_running(started))


def is_running(process: int) -> bool:
    """Return whether a process exists that has not ended; one without a parent may wait
    to be collected.
    """
    file = Path(f"/proc/{process}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("overrides", "config_path", "words"),
    [
        (["optimizer.lrr=1e-3,1e-2"], "optimizer.lrr", "no such key"),
        (["optimizer.lr=,"], "optimizer.lr", "a value is missing"),
        (["optimizer.lr=1e-3,"], "optimizer.lr", "a value is missing"),
        (["optimizer.lr=1e-3,0.001"], "optimizer.lr", "repeated"),
        (["optimizer.lr=1e-3"], "kd-sweep", "no key has several values"),
        ([], "kd-sweep", "no key has several values"),
        (["optimizer.lr=1e-3,-1"], "optimizer.lr", "is -1"),
        (["run.name=one,two"], "run.name", "changes no weight"),
        (["run.folder=one,two"], "run.folder", "changes no weight"),
        (["optimizer.lr=1e-3,1e-2", "--by", "speed"], "--by", "agreement"),
        (
            ["optimizer.lr=1e-3,1e-2", "--sampler", "gird"],
            "--sampler",
            "Did you mean 'grid'",
        ),
        (["optimizer.lr=1e-3,1e-2", "--sampler", "tpe"], "--trials", "missing"),
        (
            ["optimizer.lr=1e-3,1e-2", "--sampler", "grid", "--trials", "3"],
            "--sampler",
            "grid",
        ),
        (
            ["optimizer.lr=1e-3,1e-2", "--sampler", "tpe(x=1)", "--trials", "3"],
            "--sampler",
            "refused",
        ),
        (
            ["optimizer.lr=1e-3,1e-2", "--pruner", "mean"],
            "--pruner",
            "successive_halving",
        ),
        (
            ["optimizer.lr=1e-3,1e-2", "--pruner", "percentile"],
            "--pruner",
            "percentile",
        ),
        (
            ["optimizer.lr=1e-3,1e-2", "--pruner", "percentile(101)"],
            "--pruner",
            "refused",
        ),
        (["optimizer.lr=uniform(1e-3,1e-2)"], "--trials", "missing"),
        (
            ["optimizer.lr=uniform(1e-3,1e-2)", "--sampler", "grid"],
            "--sampler",
            "range",
        ),
        (
            ["optimizer.lr=uniform(1e-2,1e-3)", "--trials", "3"],
            "optimizer.lr",
            "LOW is below HIGH",
        ),
        (
            ["optimizer.lr=uniform(1e-2)", "--trials", "3"],
            "optimizer.lr",
            "is no range",
        ),
        (
            ["optimizer.lr=uniform(a,b)", "--trials", "3"],
            "optimizer.lr",
            "'uniform(a,b)' is no range",
        ),
        (
            ["optimizer.lr=uniform(0.1,0.2", "--trials", "3"],
            "optimizer.lr",
            "is no range",
        ),
        (
            ["data.batch_size=uniform(8,16)", "--trials", "3"],
            "data.batch_size",
            "whole number",
        ),
        (
            [
                "optimizer.lr=uniform(1e-3,1e-2)",
                "--trials",
                "3",
                "--pruner",
                "percentile(x)",
            ],
            "--pruner",
            "arguments",
        ),
        (
            ["optimizer.lr=uniform(1,2,3)", "--trials", "3"],
            "optimizer.lr",
            "loguniform(LOW,HIGH)",
        ),
        (
            ["optimizer.lr=normal(1,2)", "--trials", "3"],
            "optimizer.lr",
            "loguniform(LOW,HIGH)",
        ),
        (["optimizer.lr=loguniform(0,2)", "--trials", "3"], "optimizer.lr", "refused"),
        (
            ["run.epochs=integers(1.5,3)", "--trials", "3"],
            "run.epochs",
            "whole numbers",
        ),
        (["optimizer.lr=uniform(-1,1)", "--trials", "3"], "optimizer.lr", "is -1"),
        (["optimizer.lr=1e-3,1e-2", "--objectives", "accuracy"], "--objectives", "Two"),
        (
            ["optimizer.lr=1e-3,1e-2", "--objectives", "accuracy,mss"],
            "--objectives",
            "Did you mean 'ms'",
        ),
        (
            [
                "optimizer.lr=1e-3,1e-2",
                "--objectives",
                "accuracy,ms",
                "--pruner",
                "median",
            ],
            "--pruner",
            "objectives",
        ),
        (
            ["optimizer.lr=1e-3,1e-2", "optimizer.lr=1e-4,1e-1"],
            "optimizer.lr",
            "stands again",
        ),
        (
            ["losses.0.weight=1,2", "losses[0].weight=3"],
            "losses.0.weight",
            "stands again",
        ),
        (["optimizer.lr=1,1.0"], "optimizer.lr", "'1' and '1.0' make the same run"),
        (["run.baseline=true,false"], "run.baseline", "changes no weight of a student"),
    ],
)
def test_wrong_sweeps_are_one_line_and_write_nothing(
    overrides, config_path, words, written, refused, tmp_path
):
    line = refused("sweep", written(), *overrides)
    assert line.startswith(f"{config_path}: ")
    assert words in line
    assert not list(tmp_path.rglob("*_sweep"))


def test_a_wrong_storage_is_one_line(written, refused):
    line = refused("sweep", written(), "optimizer.lr=1e-3,1e-2", "--storage", "nowhere")
    assert line.startswith("--storage: ")
    assert "sqlite:///" in line


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"jobs": "2"}, {"trials": -1}])
def test_a_wrong_number_is_named(wrong):
    with pytest.raises(
        ConfigError, match=f"^{next(iter(wrong))}: is .* A whole number >= "
    ):
        sweep({}, "optimizer.lr=1,2", **wrong)


def test_trials_of_a_name_with_a_slash_lie_below_the_sweep(settings, monkeypatch):
    paths = []

    def train(trials, *arguments):
        for trial in map(trials.trial_of, trials.space.combinations()):
            paths.append(
                (resolve(trial.config).record.path, trials.folder / trial.name)
            )
        raise Interrupted

    monkeypatch.setattr(Trials, "train", train)
    with pytest.raises(Interrupted):
        sweep(settings, "optimizer.lr=1e-3,1e-2", "run.name=mine/first")
    assert len(paths) == 2
    assert all(path == expected for path, expected in paths)


def test_a_score_that_the_runs_do_not_have_is_refused(settings, tmp_path):
    trials = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path, "agreement_ece")
    trial = trials.trial_of(trials.space.combinations()[0])
    folder = tmp_path / trial.name
    write(
        folder / "checkpoints" / "step_00000006",
        State(step=6, best=0.5),
        {},
        {},
        best=True,
    )
    row = {"kind": "val", "step": 6, "epoch": 1, "accuracy": 0.5, "agreement": 0.4}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        ConfigError,
        match=r"^--by: is 'agreement_ece', .* Allowed: accuracy, agreement\. ",
    ):
        trials._facts(trial)


@pytest.mark.parametrize("split", ["test", "val", ""])
def test_the_row_of_a_run_has_scores_of_validation_images(settings, tmp_path, split):
    """Beside those of other trials; the run may have a score on test images, or on
    validation images again.
    """
    folder = tmp_path / "labels_only"
    write(
        folder / "checkpoints" / "step_00000006",
        State(step=6, best=0.5),
        {},
        {},
        best=True,
    )
    row = {"kind": "val", "step": 6, "epoch": 1, "accuracy": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    if split:
        RunDir(folder).write_scored(
            Scored(split, 6, "of-these", 9, 1, {"accuracy": 0.75}, {})
        )
    last_row = trials_of(settings, ["optimizer.lr=1e-3,1e-2"], tmp_path).last_row(
        "labels_only"
    )
    assert last_row["accuracy"] == (0.75 if split == "val" else 0.5)


def test_a_failed_process_is_reported_by_its_last_line(tmp_path):
    errors: dict[str, str] = {}
    with Processes() as processes:
        processes.start("good", ["--version"], tmp_path / "good.log")
        processes.start("bad", ["trian"], tmp_path / "bad.log")
        while processes.running:
            errors |= processes.ended()
            time.sleep(0.05)
    assert errors["good"] == ""
    assert errors["bad"].startswith("kd: no command 'trian'.")
    assert (
        str(failure(errors["bad"]))
        == errors["bad"]
        == (tmp_path / "bad.log").read_text().strip()
    )
    assert failure("Killed").exit_code == 2


def test_a_process_stopped_from_outside_interrupts_the_sweep(tmp_path):
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
    words = (
        "import sys; print('this is a bug in kd; please report it with the lines"
        " above'); sys.exit(1)"
    )
    with Processes() as processes, output.open("wb") as file:
        processes.running["one"] = (
            subprocess.Popen([sys.executable, "-c", words], stdout=file),
            output,
        )
        while not (ended := processes.ended()):
            time.sleep(0.01)
    assert (
        str(failure(ended["one"]))
        == f"kd-sweep: ended with a traceback, which '{output}' has."
    )


@pytest.mark.parametrize("kind", ["relative", "none"])
def test_trials_that_sift_have_their_work_in_the_table(settings, tmp_path, kind):
    trials = trials_of(settings, [f"sifter.kind={kind}", "run.seed=0,1"], tmp_path)
    for values, trained in zip(
        [{"run.seed": "0"}, {"run.seed": "1"}], (40.0, 20.0), strict=True
    ):
        folder = tmp_path / end(trials, values, trained / 80)
        folder.mkdir()
        epoch = {
            "kind": "epoch",
            "step": 2,
            "trained": trained,
            "candidates": 40.0,
            "effective": 9.0,
        }
        metrics = [{"kind": "train", "step": 2, "cpu_seconds": trained / 2}, epoch]
        (folder / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in metrics)
        )
        (folder / "manifest.json").write_text(json.dumps({"images": 40}))
    text = trials_table(trials.rows(), trials, Column("accuracy", "accuracy"), {})
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
    ]
    work = [row[2:4] for row in (cells[0], *cells[2:])]
    if kind == "relative":
        assert work == [
            ["images trained", "training, CPU s"],
            ["100.0 %", "20"],
            ["50.0 %", "10"],
        ]
    else:
        assert "images trained" not in text
