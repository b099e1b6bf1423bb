"""Benchmarks that take hours: their configurations are checked before, not in the middle of a night."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from kd import config
from kd.config.flat import plain
from kd.models.load import load
from kd.models.spec import Spec
from kd.study.sweeps.space import Space

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import few_labels
import frontier
import proof
import variants


@pytest.mark.parametrize("arm", proof.ARMS)
def test_each_arm_of_the_proof_is_a_configuration(arm, tmp_path):
    losses, overrides, _ = proof.ARMS[arm]
    options = proof.arguments(["run.steps=9", "--data", str(tmp_path), "--work", str(tmp_path), "--arms", arm])
    assert options.overrides == ["run.steps=9"]
    assert options.arms == [arm]
    options.teachers = [tmp_path / name / "export" for name in ("one", "other")]
    for export in options.teachers:
        export.mkdir(parents=True)
        (export.parent / "manifest.json").write_text('{"modes": {"student": "bf16+unfused"}}')
    content = {**proof.settings(options), "losses": losses}
    loaded = config.load(content, [*overrides, *options.overrides])
    assert (loaded.teacher.precision, loaded.backend.precision) == ("bf16", "bf16")  # not by a trial of each run
    weights = [one.checkpoint for one in (loaded.teacher, *loaded.teacher.also)]  # else each run fits its own
    assert weights == [str(export / "model.safetensors") for export in options.teachers]


@pytest.mark.parametrize("arm", few_labels.ARMS)
def test_each_arm_of_few_labels_is_a_configuration(arm, tmp_path):
    options = Namespace(work=tmp_path, data=tmp_path, weights=tmp_path / "lite0.pth", steps=0, fit=0)
    loaded = config.load(few_labels.settings(options, arm, 25, 2))
    assert loaded.data.labels_per_class == (0 if arm == "ceiling" else 25)
    assert loaded.run.steps == (1276 if arm.endswith("third") else 3828)
    assert loaded.teacher.fitted == (arm in ("soft", "hard"))


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
        return {**fields, "teacher": proof.digest([export, export]), "commit": "1234e56"}

    made: list[str] = []
    failing = {"kl"}
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(proof, "HERE", tmp_path)
    monkeypatch.setattr(proof, "call", call)
    monkeypatch.setattr(proof, "filled", filled)
    monkeypatch.setattr(proof, "one", one)
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(b"weights")
    words = ["--data", str(tmp_path), "--jobs", "1", "--seeds", "0", "--arms", "kl", "wttm", "--work"]
    with pytest.raises(SystemExit, match="kl failed"):
        proof.main([*words, str(tmp_path / "work")])
    assert made == ["kl", "wttm"]
    assert (tmp_path / "work" / "cache-0.json").is_file()

    failing.clear()
    proof.main([*words, str(tmp_path / "later")])  # only the CSV is left of the work
    assert made == ["kl", "wttm", "kl"]
    proof.main([*words, str(tmp_path / "later")])
    assert made == ["kl", "wttm", "kl"]
    (export / "model.safetensors").write_bytes(b"other weights")
    proof.main([*words, str(tmp_path / "later")])
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
