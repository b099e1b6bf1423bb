"""What a sweep tries, what is recorded, and what it refuses; tests/e2e/test_sweep.py runs one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pieces import wait_until

from kd import config
from kd.core.errors import ConfigError, Interrupted, RunError
from kd.core.scores import Column, Scored
from kd.core.types import State
from kd.files.checkpoint import write
from kd.files.run_dir import RunDir
from kd.setup.recipe import resolve
from kd.study.sweeps.space import Space, prepared_alike, sharing
from kd.study.sweeps.sweep import _table, luck, sweep
from kd.study.sweeps.trials import Processes, Trials, failure


def test_all_combinations_in_the_order_of_the_command(settings):
    space = Space.read(settings, ["losses=[{kind: kl}],[{kind: dkd}]", "run.epochs=3", "optimizer.lr=1e-3,0.01"])
    assert space.fixed == ["run.epochs=3"]
    loaded = [space.load(values) for values in space.combinations()]
    found = [(one.losses[0].kind, one.optimizer.lr, one.run.epochs) for one in loaded]
    assert found == [("kl", 1e-3, 3), ("kl", 1e-2, 3), ("dkd", 1e-3, 3), ("dkd", 1e-2, 3)]


def test_a_list_behind_a_value_is_what_counts(settings):
    space = Space.read(settings, ["optimizer.lr=5e-3", "optimizer.lr=1e-3,1e-2"])
    assert [space.load(values).optimizer.lr for values in space.combinations()] == [1e-3, 1e-2]


@pytest.mark.parametrize(
    "override", ["optimizer.betas=[0.9,0.99]", "data.root=${oc.env:HOME,nowhere}", "student.args={a: 1, b: 2}"]
)
def test_commas_inside_a_value_separate_nothing(override):
    assert Space.read({}, [override, "run.seed=0,1"]).fixed == [override]


def test_trials_share_teacher_cache_and_store(settings):
    settings["data"]["store"], settings["backend"]["threads"] = "ram", 0
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    shared = sharing(space.load({}), 3)
    assert shared == ["backend.threads=3", "data.store=disk", "teacher.cache.views=2"]  # two epochs
    one, other = [space.trial(values, "tiny_sweep", shared) for values in space.combinations()]
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


def test_the_luck_of_the_best_is_that_of_its_seed_and_nothing_more_is_claimed():
    """The last lines said "flatters by": the fresh seeds are scored on the images that chose."""
    rows, fresh = [{"score": 0.8}, {"score": 0.7}, {"score": 0.6}], [{"score": 0.75}, {"score": 0.65}]
    accuracy = Column("accuracy", "accuracy")
    text = luck(rows, fresh, {}, accuracy)
    assert "best of 3 trials has accuracy 80.0 %" in text
    assert "the seed's part of the best score is +10.0 points" in text
    assert "images' part is not known" in text
    assert "flatters" not in text
    kl = luck([{"score": 0.5}, {"score": 0.6}], [{"score": 0.75}], {}, Column("kl", "KL", "nats", smaller=True))
    assert "the seed's part of the best score is +0.2500 nats" in kl
    fresh = [{**row, "test": {"score": 0.7}} for row in fresh]
    tested = luck(rows, fresh, {"score": 0.72, "interval": [0.6, 0.8]}, accuracy)
    assert "On test images, which chose nothing, the best has 72.0 % (60.0 to 80.0), the others 70.0 % and" in tested
    assert "not known" not in tested


ROW = {"by": "", "key": "accuracy", "score": 0.5, "data": "a", "interval": [0.4, 0.6], "test": {"score": 0.4}}


@pytest.fixture
def journal(settings, tmp_path):
    """Return a function that writes a row of the first of two trials, and reads it."""
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations()]

    def read(text: str, by: str = "") -> Trials:
        (tmp_path / "journal.jsonl").write_text(text.replace("TRIAL", trials[0].name) + "\n")
        return Trials(tmp_path, trials, by)

    return read


def test_a_row_of_the_journal_is_read(journal):
    tried = journal(json.dumps({"trial": "TRIAL", **ROW, "values": {"optimizer.lr": "9"}}))
    (row,) = tried.rows.values()
    assert {key: row[key] for key in ROW} == ROW
    assert row["values"] == {"optimizer.lr": "0.001"}, "of the trial, not of the file"
    assert journal(json.dumps({"trial": "another", **ROW})).rows == {}
    assert journal('{"trial": "TRIAL", "by": ""').rows == {}, "cut short: it is trained again"


@pytest.mark.parametrize(("written", "read"), [([-0.328, 1.244], [0.0, 1.0]), ([1.1, 1.2], [1.0, 1.0]), ([], None)])
def test_ends_of_a_share_that_an_earlier_version_wrote_are_cut(journal, written, read):
    """A sweep of several labels per image, made again, said "1.244 is no mAP"."""
    test = {"score": 0.4, "interval": written}
    (row,) = journal(json.dumps({"trial": "TRIAL", **ROW, "interval": written, "test": test})).rows.values()
    assert row.get("interval") == row["test"].get("interval") == read


@pytest.mark.parametrize(
    "edit",
    [
        {"score": None},
        {"score": "0.5"},
        {"score": True},
        {"score": float("nan")},
        {"score": float("inf")},
        {"score": 50.0},
        {"score": -0.1},
        {"score": [0.5]},
        {"key": "speed"},
        {"key": None},
        {"key": ["accuracy"]},
        {"key": {}},
        {"interval": [0.4]},
        {"interval": [0.4, float("inf")]},
        {"interval": [0.4, "x"]},
        {"interval": 0.4},
        {"interval": None},
        {"data": 5},
        {"data": ["a"]},
        {"test": 0.5},
        {"test": {}},
        {"test": {"score": "x"}},
        {"trial": ["TRIAL"]},
    ],
)
def test_an_edited_row_of_the_journal_is_one_line(journal, edit):
    """8 of 22 were a traceback, or a rank by what is no score."""
    with pytest.raises(RunError, match=r"^run\.folder: '.*journal\.jsonl', row 1 is damaged .* Remove that line"):
        journal(json.dumps({"trial": "TRIAL", **ROW, **edit}))


@pytest.mark.parametrize("missing", ["trial", "by", "key", "score"])
def test_a_row_that_lacks_a_key_is_one_line(journal, missing):
    row = {key: value for key, value in {"trial": "TRIAL", **ROW}.items() if key != missing}
    with pytest.raises(RunError, match=r"^run\.folder: '.*journal\.jsonl', row 1 is damaged"):
        journal(json.dumps(row))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_processes_of_a_killed_sweep_end(tmp_path):
    """It went on training for nobody."""
    code = (
        "import pathlib, sys, time\n"
        "from kd.study.sweeps.trials import Processes\n"
        "with Processes() as processes:\n"
        "    processes.start('served', ['serve', sys.argv[1]], pathlib.Path(sys.argv[1], 'log'))\n"
        "    print(processes.running['served'][0].pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as sweeping:
        assert sweeping.stdout is not None
        started = int(sweeping.stdout.readline())
        sweeping.kill()
    wait_until(lambda: not is_running(started))


def is_running(process: int) -> bool:
    """Return whether a process exists that has not ended; one without a parent may wait to be collected."""
    file = Path(f"/proc/{process}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("overrides", "where", "words"),
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
        (["optimizer.lr=1e-3,1e-2", "optimizer.lr=1e-4,1e-1"], "optimizer.lr", "stands again"),
        (["losses.0.weight=1,2", "losses[0].weight=3"], "losses.0.weight", "stands again"),
        (["optimizer.lr=1,1.0"], "optimizer.lr", "'1' and '1.0' make the same run"),
        (["run.baseline=true,false"], "run.baseline", "changes no weight of a student"),
    ],
)
def test_wrong_sweeps_are_one_line_and_write_nothing(overrides, where, words, written, refused, tmp_path):
    line = refused("sweep", written(), *overrides)
    assert line.startswith(f"{where}: ")
    assert words in line
    assert not list(tmp_path.rglob("*_sweep"))


@pytest.mark.parametrize("wrong", [{"jobs": 0}, {"jobs": "2"}])
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
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations()]
    folder = tmp_path / trials[0].name
    write(folder / "checkpoints" / "step_00000006", State(step=6, best=0.5), {}, {}, best=True)
    row = {"kind": "val", "step": 6, "epoch": 1, "accuracy": 0.5, "agreement": 0.4}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"^--by: is 'agreement_ece', .* Allowed: accuracy, agreement\. "):
        Trials(tmp_path, trials, "agreement_ece")._record(trials[0])


@pytest.mark.parametrize("split", ["test", "val", ""])
def test_the_row_of_a_run_has_scores_of_validation_images(settings, tmp_path, split):
    """Beside those of other trials; the run may have a score on test images, or on validation images again."""
    folder = tmp_path / "labels_only"
    write(folder / "checkpoints" / "step_00000006", State(step=6, best=0.5), {}, {}, best=True)
    row = {"kind": "val", "step": 6, "epoch": 1, "accuracy": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    if split:
        RunDir(folder).write_scored(Scored(split, 6, "of-these", 9, 1, {"accuracy": 0.75}, {}))
    space = Space.read(settings, ["optimizer.lr=1e-3,1e-2"])
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations()]
    found = Trials(tmp_path, trials, "").last_row("labels_only")
    assert found["accuracy"] == (0.75 if split == "val" else 0.5)


def test_a_failed_process_is_reported_by_its_last_line(tmp_path):
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
    words = "import sys; print('this is a bug in kd; please report it with the lines above'); sys.exit(1)"
    with Processes() as processes, output.open("wb") as file:
        processes.running["one"] = subprocess.Popen([sys.executable, "-c", words], stdout=file), output
        while not (ended := processes.ended()):
            time.sleep(0.01)
    assert str(failure(ended["one"])) == f"kd-sweep: ended with a traceback, which '{output}' has."


@pytest.mark.parametrize("kind", ["relative", "none"])
def test_trials_that_sift_have_their_work_in_the_table(settings, tmp_path, kind):
    space = Space.read(settings, [f"sifter.kind={kind}", "run.seed=0,1"])
    trials = [space.trial(values, "tiny_sweep", []) for values in space.combinations()]
    rows = []
    for trial, trained in zip(trials, (40.0, 20.0), strict=True):
        folder = tmp_path / trial.name
        folder.mkdir()
        epoch = {"kind": "epoch", "step": 2, "trained": trained, "candidates": 40.0, "effective": 9.0}
        metrics = [{"kind": "train", "step": 2, "cpu_seconds": trained / 2}, epoch]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics))
        (folder / "manifest.json").write_text(json.dumps({"images": 40}))
        rows.append({"trial": trial.name, "values": dict(trial.values), "by": "", "key": "accuracy", "score": 0.5})
    (tmp_path / "journal.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = _table(rows, Trials(tmp_path, trials, ""), Column("accuracy", "accuracy"), {})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    work = [row[2:4] for row in (cells[0], *cells[2:])]
    if kind == "relative":
        assert work == [["images trained", "training, CPU s"], ["100.0 %", "20"], ["50.0 %", "10"]]
    else:
        assert "images trained" not in text
