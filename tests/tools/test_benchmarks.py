"""Benchmarks that take hours: their configurations are checked before, not in the middle of a night."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from kd import config
from kd.config.flat import plain
from kd.models.load import load
from kd.models.spec import Spec
from kd.study.sweeps.space import Space

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import frontier
import full_labels
import proof
import variants


@pytest.mark.parametrize("arm", full_labels.ARMS)
def test_each_arm_of_full_labels_is_a_configuration(arm, tmp_path):
    losses, overrides, _ = full_labels.ARMS[arm]
    options = full_labels.arguments(["run.steps=9", "--data", str(tmp_path), "--work", str(tmp_path), "--arms", arm])
    assert options.overrides == ["run.steps=9"]
    assert options.arms == [arm]
    options.teachers = [tmp_path / name / "export" for name in ("one", "other")]
    for export in options.teachers:
        export.mkdir(parents=True)
        (export.parent / "manifest.json").write_text('{"modes": {"student": "bf16+unfused"}}')
    content = {**full_labels.settings(options), "losses": losses}
    loaded = config.load(content, [*overrides, *options.overrides])
    assert (loaded.teacher.precision, loaded.backend.precision) == ("bf16", "bf16")  # not by a trial of each run
    weights = [one.checkpoint for one in (loaded.teacher, *loaded.teacher.also)]  # else each run fits its own
    assert weights == [str(export / "model.safetensors") for export in options.teachers]


@pytest.mark.parametrize(("experiment", "arm"), [(e, arm) for e, arms in proof.EXPERIMENTS.items() for arm in arms])
def test_each_arm_of_the_proof_is_a_configuration(experiment, arm, tmp_path):
    options = proof.arguments(["--data", str(tmp_path), "--weights", str(tmp_path), "--work", str(tmp_path)])
    own, labels = proof.EXPERIMENTS[experiment][arm], 25 if experiment == "few_labels" else 0
    loaded = config.load(proof.settings(options, experiment, arm, 0 if own.labels == "every" else labels, 2))
    assert loaded.data.labels_per_class == (0 if own.labels == "every" else labels)
    whole = config.load(proof.ROOT / "configs" / f"{experiment}.yaml")
    assert loaded.run.steps == round(whole.run.steps * own.share)
    assert loaded.teacher.fitted == own.teacher
    assert loaded.data.augment.crop == own.over.get("data", {}).get("augment", {}).get("crop", whole.data.augment.crop)


def test_the_proof_goes_seed_by_seed_and_has_one_ceiling(tmp_path):
    options = proof.arguments(["--data", ".", "--weights", ".", "--only", "few_labels"])
    keys = proof.wanted(options)
    assert keys[0] == ("few_labels", "soft", 100, 0)
    assert [key for key in keys if key[1] == "ceiling"] == [("few_labels", "ceiling", 0, seed) for seed in (0, 1, 2)]
    assert len(keys) == len(set(keys)) == 3 * (3 * 5 + 1)


def test_the_table_and_the_picture_of_the_proof_take_the_best_arm_on_labels_alone():
    rows = []
    for labels, scores in ((25, (60, 30, 35)), (100, (80, 50, 45))):
        for arm, accuracy in zip(("soft", "labels only, a third", "labels only, strong"), scores, strict=True):
            own = {"teacher_accuracy": 75.0 * (arm == "soft"), "cpu_minutes": 1.0, "teacher_minutes": 2.0}
            rows.append({"labels": labels, "arm": arm, "accuracy": accuracy, "validation": accuracy, **own})
    rows.append({**rows[-1], "labels": 0, "arm": "ceiling", "accuracy": 90.0})
    best = [proof.best_alone([row for row in rows if row["labels"] == labels]) for labels in (25, 100)]
    assert [own[0]["accuracy"] for own in best] == [35, 50]
    assert "80.0" in proof.report("few_labels", rows)
    picture = proof.drawn(rows)
    assert picture.count("<polyline") == 4
    assert "every label" in picture
    assert "var(" not in picture
    bars = proof.barred([row for row in rows if row["labels"] == 100])
    assert [f"{score}.0 %" in bars for score in (50, 80, 75, 45)] == [True, True, True, False]


def test_wrong_labels_are_planted_once_and_named_as_the_audit_names_them(tmp_path):
    for split, count in (("train", 50), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "cifar10" / split / name).mkdir(parents=True)
            for i in range(count):
                (tmp_path / "cifar10" / split / name / f"{i}.jpg").write_bytes(b"picture")
    options = proof.arguments(["--data", str(tmp_path), "--weights", ".", "--work", str(tmp_path / "work")])
    planted = proof.plant(options)
    assert planted == proof.plant(options)
    assert 30 <= len(planted) <= 50
    train = tmp_path / "work" / "wrong" / "train"
    made = {path.relative_to(train).as_posix() for path in train.glob("*/*")}
    assert len(made) == 100
    assert planted == {name for name in made if not name.split("/")[1].startswith(name.split("/")[0])}
    assert len([*tmp_path.glob("work/wrong/test/*/*")]) == 6


def test_a_run_that_fails_does_not_end_the_others_and_rows_count_for_their_teacher(tmp_path, monkeypatch):
    export = tmp_path / "teachers" / "one" / "export"

    def call(options, command, content, name, overrides):
        (options.work / f"{name}.log").write_text(f"some line\n{export}\n")
        return {"wall_minutes": 0.0, "cpu_minutes": 0.0}

    def filled(options, seed):
        (options.work / f"cache-{seed}.json").touch()

    def one(options, arm, seed):
        assert options.teachers == [export, export]
        made.append(arm)
        if arm in failing:
            raise SystemExit(f"{arm} failed")
        numbers = ("images", "accuracy", "low", "high", "agreement", "ece", "teacher_share", "cpu_minutes", "resumed")
        fields = {"arm": arm, "seed": seed, "split": "test", **dict.fromkeys(numbers, 0.0)}
        return {**fields, "teacher": full_labels.digest([export, export]), "commit": "1234e56"}

    made: list[str] = []
    failing = {"kl"}
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(full_labels, "HERE", tmp_path)
    monkeypatch.setattr(full_labels, "call", call)
    monkeypatch.setattr(full_labels, "filled", filled)
    monkeypatch.setattr(full_labels, "one", one)
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(b"weights")
    words = ["--data", str(tmp_path), "--jobs", "1", "--seeds", "0", "--arms", "kl", "wttm", "--work"]
    with pytest.raises(SystemExit, match="kl failed"):
        full_labels.main([*words, str(tmp_path / "work")])
    assert made == ["kl", "wttm"]
    assert (tmp_path / "work" / "cache-0.json").is_file()

    failing.clear()
    full_labels.main([*words, str(tmp_path / "later")])  # only the CSV is left of the work
    assert made == ["kl", "wttm", "kl"]
    full_labels.main([*words, str(tmp_path / "later")])
    assert made == ["kl", "wttm", "kl"]
    (export / "model.safetensors").write_bytes(b"other weights")
    full_labels.main([*words, str(tmp_path / "later")])
    assert made == ["kl", "wttm", "kl", "kl", "wttm"]


@pytest.mark.parametrize("name", variants.STUDENTS)
def test_each_student_of_variants_can_be_built(name):
    file, keys = variants.STUDENTS[name]
    content = variants.CONFIGS / file if file else yaml.safe_load(variants.ON_LABELS)
    loaded = config.load(content, keys)
    student = loaded.student
    load(Spec("student", student.model, dict(student.args), variants.LABELS), loaded.data.image_size)


@pytest.mark.parametrize("name", list(frontier.STUDENTS))
def test_each_student_of_the_frontier_is_a_configuration(name):
    student, every = frontier.STUDENTS[name], ",".join(map(json.dumps, frontier.STUDENTS.values()))
    space = Space.read(plain("cifar10"), [*frontier.KEYS, f"student={every}"])
    (one,) = (space.load(values) for values in space.combinations() if json.loads(values["student"]) == student)
    assert (one.student.model, one.student.args) == (student["model"], student.get("args", {}))
    assert (one.data.image_size, one.teacher.options.input_size, one.run.name) == (64, 32, "frontier_cifar10")


def test_the_command_of_the_frontier_names_no_path_of_this_machine():
    argv = [
        "x.py",
        "data.root=/data/c",
        "teacher.checkpoint=~/t.pth",
        "run.folder=/tmp/x",
        "run.epochs=1",
        "--jobs",
        "2",
    ]
    assert frontier.shown(argv) == (
        "x.py data.root=PATH/cifar10 teacher.checkpoint=FILE run.folder=FOLDER run.epochs=1 --jobs 2"
    )
