"""Benchmarks that take hours: their configurations are checked before, not in the
middle of a night.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import yaml

from kd import config
from kd.config.flat import plain
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.study.sweeps.space import Space

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import frontier
import full_labels
import make_run
import proof
import still_learning
import story
import variants

import _record


@pytest.mark.parametrize("arm", full_labels.ARMS)
def test_each_arm_of_full_labels_is_a_configuration(arm, tmp_path):
    losses, overrides, _ = full_labels.ARMS[arm]
    options = full_labels.arguments(
        ["run.steps=9", "--data", str(tmp_path), "--work", str(tmp_path), "--arms", arm]
    )
    assert options.overrides == ["run.steps=9"]
    assert options.arms == [arm]
    options.teachers = [tmp_path / name / "export" for name in ("one", "other")]
    for export in options.teachers:
        export.mkdir(parents=True)
        (export.parent / "manifest.json").write_text(
            '{"modes": {"student": "bf16+unfused"}}'
        )
    content = {**full_labels.settings(options), "losses": losses}
    loaded = config.load(content, [*overrides, *options.overrides])
    assert (loaded.teacher.precision, loaded.backend.precision) == (
        "bf16",
        "bf16",
    )  # not by a trial of each run
    weights = [
        teacher.checkpoint for teacher in (loaded.teacher, *loaded.teacher.also)
    ]  # else each run fits its own
    assert weights == [str(export / "model.safetensors") for export in options.teachers]


def test_the_labels_arms_of_make_run_are_the_student_of_the_run_without_its_teacher():
    full = config.load("vit_food")
    for overrides in ([], make_run.STRONG):
        alone = config.load("vit_food", [*make_run.ALONE, *overrides])
        assert (alone.student, alone.optimizer) == (full.student, full.optimizer)
        assert alone.data.batch_size == full.data.batch_size
        assert (alone.data.labels, alone.data.labels_per_class) == (
            "all",
            10,
        )  # the others are left out
        assert (alone.teacher.model, alone.teacher.fitted, alone.run.baseline) == (
            "",
            False,
            False,
        )
        assert [(loss.kind, loss.options.label_smoothing) for loss in alone.losses] == [
            ("ce", 0.1)
        ]
        assert bool(alone.data.augment.policy) == bool(overrides)
    assert config.load("vit_food", make_run.FULL).teacher.fitted


@pytest.mark.parametrize("experiment", proof.EXPERIMENTS)
def test_each_arm_of_the_proof_is_a_configuration(experiment, tmp_path):
    options = proof.arguments(
        ["--data", str(tmp_path), "--weights", str(tmp_path), "--work", str(tmp_path)]
    )
    for name in (
        "efficientnet-lite0-57934424.pth",
        "efficientnet-lite2.pth",
        "vit_small.safetensors",
    ):
        (tmp_path / name).touch()
    full = config.load(proof.ROOT / "configs" / f"{proof.configured(experiment)}.yaml")
    for arm, arm_settings in proof.EXPERIMENTS[experiment].items():
        labels = (
            25 if experiment == "few_labels" and arm_settings.labels != "every" else 0
        )
        loaded = config.load(proof.settings(options, experiment, arm, labels, 2))
        assert loaded.data.labels_per_class == labels
        assert loaded.run.steps == round(full.run.steps * arm_settings.share)
        assert bool(loaded.teacher.model) == arm_settings.teacher
        assert loaded.teacher.fitted == (arm_settings.teacher and full.teacher.fitted)
        crop = (
            arm_settings.over.get("data", {})
            .get("augment", {})
            .get("crop_scale", full.data.augment.crop_scale)
        )
        assert loaded.data.augment.crop_scale == crop


def test_the_proof_goes_seed_by_seed_and_has_one_ceiling(tmp_path):
    options = proof.arguments(["--data", ".", "--weights", ".", "--only", "few_labels"])
    keys = proof.planned(options)
    assert keys[0] == ("few_labels", "soft", 100, 0)
    assert [key for key in keys if key[1] == "ceiling"] == [
        ("few_labels", "ceiling", 0, seed) for seed in (0, 1, 2)
    ]
    assert len(keys) == len(set(keys)) == 3 * (3 * 12 + 3)


def test_committed_rows_come_back_as_they_were_written(tmp_path, monkeypatch):
    rows = [{"arm": "soft, a third", "seed": 1, "accuracy": 46.9, "commit": "59e10202"}]
    monkeypatch.setattr(_record, "RESULTS", tmp_path)
    path = _record.write("theme", "command", rows, tmp_path)
    path.write_text(path.read_text().replace("arm,seed", "# note: by hand\narm,seed"))
    assert _record.newest("theme")[1] == rows
    assert (
        "# note: by hand"
        in _record.write("theme", "other command", rows, tmp_path)
        .read_text()
        .splitlines()
    )
    assert _record.newest("other") == ([], [])


def test_wrong_labels_are_planted_once_and_named_as_the_audit_names_them(tmp_path):
    for split, count in (("train", 50), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / "cifar10" / split / name).mkdir(parents=True)
            for i in range(count):
                (tmp_path / "cifar10" / split / name / f"{i}.jpg").write_bytes(
                    b"picture"
                )
    options = proof.arguments(
        ["--data", str(tmp_path), "--weights", ".", "--work", str(tmp_path / "work")]
    )
    planted = proof.plant(options)
    assert planted == proof.plant(options)
    assert 30 <= len(planted) <= 50
    train = tmp_path / "work" / "wrong" / "train"
    files = {path.relative_to(train).as_posix() for path in train.glob("*/*")}
    assert len(files) == 100
    assert planted == {
        f"train/{name}"
        for name in files
        if not name.split("/")[1].startswith(name.split("/")[0])
    }
    assert len([*tmp_path.glob("work/wrong/test/*/*")]) == 6


@pytest.mark.parametrize("name", variants.STUDENTS)
def test_each_student_of_variants_can_be_built(name):
    file, keys = variants.STUDENTS[name]
    content = variants.CONFIGS / file if file else yaml.safe_load(variants.ON_LABELS)
    loaded = config.load(content, keys)
    student = loaded.student
    load(
        Spec("student", student.model, dict(student.args), variants.LABELS),
        loaded.data.image_size,
    )


def test_each_student_of_the_frontier_is_a_configuration():
    every = ",".join(map(json.dumps, frontier.STUDENTS.values()))
    space = Space.read(plain("cifar10"), [*frontier.KEYS, f"student={every}"])
    students = []
    for values in space.combinations():
        student = json.loads(values["student"])
        loaded = space.load(values)
        assert (loaded.student.model, loaded.student.args) == (
            student["model"],
            student.get("args", {}),
        )
        assert (
            loaded.data.image_size,
            loaded.teacher.options.input_size,
            loaded.run.name,
        ) == (
            64,
            32,
            "frontier_cifar10",
        )
        students.append(student)
    assert students == list(frontier.STUDENTS.values())


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
    expected = (
        "x.py data.root=PATH/cifar10 teacher.checkpoint=FILE run.folder=FOLDER"
        " run.epochs=1 --jobs 2"
    )
    assert frontier.printable(argv) == expected


def test_each_row_of_the_story_is_a_configuration_that_changes_what_it_says(tmp_path):
    options = argparse.Namespace(work=tmp_path, images=640, overrides=[])
    rows = [
        config.load(
            str(story.CONFIG),
            story.keys_of(number, options, tmp_path / "teacher" / "export"),
        )
        for number in range(len(story.STEPS))
    ]
    assert [row.data.workers for row in rows] == [16] + 6 * [1]
    assert [row.backend.precision for row in rows] == 2 * ["fp32"] + 5 * ["bf16"]
    assert [row.teacher.cache.views for row in rows] == 3 * [0] + 4 * [2]
    assert [row.optimizer.zero for row in rows] == 4 * [False] + 3 * [True]
    assert {row.run.steps * row.data.batch_size for row in rows} == {640}
    assert [row.data.progressive.size for row in rows] == 6 * [0] + [112]
    assert len({row.run.name for row in rows}) == 7
    assert all(row.profile.steps[1] < row.run.steps for row in rows)


def test_the_story_is_told_by_the_files_of_its_runs(tmp_path):
    """The page keeps its text around the table; a row's share of time is that of its
    parts.
    """
    texts = {
        "data_ms": 10.0,
        "teacher_ms": 60.0,
        "student_ms": 30.0,
        "update_ms": 0.0,
        "other_ms": 0.0,
    }
    row = {
        "step": 0,
        "name": "as it was",
        "change": "",
        "ranks": 1,
        "steady_images_per_second": 10.0,
        "optimizer_mib": 42.0,
        "accuracy": 50.0,
    }
    row |= {
        "low": 40.0,
        "high": 60.0,
        "finding": "Precision: float32. Set it | Teacher: 60 %. Set it",
        **texts,
    }
    text = story.table_of(
        [
            row,
            row
            | {
                "step": 1,
                "change": "backend.precision=bf16",
                "ranks": 2,
                "steady_images_per_second": 25.0,
                "finding": "",
            },
        ]
    )
    assert "10, 60, 30" in text
    assert "as it was" in text
    assert "`backend.precision=bf16`, 2 ranks" in text
    assert "Precision Teacher" in text
    assert "2.50" in text
    assert story.BEGIN in story.PAGE.read_text()
    assert story.END in story.PAGE.read_text()
    assert "var(" not in story.drawn([row])


def test_the_rule_of_learning_is_judged_by_the_longer_run_of_the_same_kind():
    """A pair differs in its length alone; 5.5 of 1,300 pictures in a hundred are more
    than chance, 1 is not.
    """
    rising = " ".join(f"{i}:{0.3 + 0.02 * i:.4f}" for i in range(20))
    level = " ".join(f"{i}:0.5000" for i in range(20))
    row = {
        "setup": "tiny10",
        "seed": 0,
        "student": "s",
        "test_images": 1300,
        "arm": "distilled",
    }

    def cell(name, steps, accuracy, curve, **changes):
        return {
            **row,
            "cell": name,
            "steps": steps,
            "accuracy": accuracy,
            "curve": curve,
            **changes,
        }

    rows = [
        cell("as kd-init writes it", 3120, 0.56, rising, keys=""),
        cell(
            "8 views, 120 epochs",
            9360,
            0.615,
            level,
            keys="run.epochs=120 teacher.cache.views=8",
        ),
        cell(
            "8 views, 300 epochs",
            23400,
            0.62,
            level,
            keys="run.epochs=300 teacher.cache.views=8",
        ),
        cell(
            "fresh, 300 epochs",
            23400,
            0.62,
            level,
            keys="run.epochs=300 teacher.cache.views=300",
        ),
        cell(
            "labels",
            1000,
            0.4,
            f"{level} 20:0.5800",
            keys="run.steps=1000",
            arm="labels",
        ),
    ]
    judged = [
        (pair["cell"], pair["longer"], pair["gave"], pair["rule"], pair["cut"])
        for pair in still_learning.pairs(rows)
    ]
    assert judged == [
        ("as kd-init writes it", "3x", "more", "right", ""),
        ("as kd-init writes it", "7.5x", "more", "right", ""),
        ("8 views, 120 epochs", "2.5x", "no more", "right", "0.0 after 11"),
        ("8 views, 300 epochs", "", "", "", "0.0 after 11"),
        ("fresh, 300 epochs", "", "", "", "0.0 after 11"),
        ("labels", "", "", "", "8.0 after 12"),
    ]
