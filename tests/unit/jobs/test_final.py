"""The last score of a run: once, of the best checkpoint, on images on which nothing was
chosen.
"""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pieces import base, teacher_at

from kd import config
from kd.core.errors import ModelError
from kd.core.intervals import paired_interval, wilson_interval
from kd.jobs.distill import require_teacher
from kd.jobs.evaluate import evaluate
from kd.jobs.train import train
from kd.models.answer_table import AnswerTable, write_answers
from kd.setup.data import open_sources
from kd.setup.recipe import resolve


@pytest.fixture(scope="module")
def run(photos, teacher, tmp_path_factory) -> Path:
    """A finished run whose best checkpoint is not the last, with the same student on
    labels alone.
    """
    settings = base(photos, tmp_path_factory.mktemp("tested"))
    settings["teacher"] = teacher_at(teacher)
    settings["run"] |= {"epochs": 3, "baseline": True}
    settings["optimizer"]["lr"] = 0.02
    return train(config.load(settings, ["data.test_fraction=0.5"])).folder


def scored(folder: Path) -> dict:
    return json.loads((folder / "scored.json").read_text())


def test_a_run_scores_its_best_checkpoint_on_the_test_images(run):
    data = open_sources(resolve(config.load(str(run / "config.yaml"))).data)
    assert data.test is not None
    assert len(data.test) + len(data.val) == 13
    for folder in (run, run / "labels_only"):
        test_score = scored(folder)
        assert (test_score["split"], test_score["images"], test_score["data"]) == (
            "test",
            len(data.test),
            data.test.fingerprint,
        )
    test_score = scored(run)
    by_hand = evaluate(run, split="test")
    assert test_score["row"] == pytest.approx(by_hand.row)
    assert (
        test_score["samples"]["accuracy"]["right"]
        == by_hand.record()["samples"]["accuracy"]["right"]
    )
    assert "teacher_accuracy" not in scored(run / "labels_only")["row"]
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if row["kind"] == "val"]
    best = max(row["accuracy"] for row in rows)
    error = math.sqrt(best * (1 - best) / len(data.val))
    chosen = [row for row in rows if row["accuracy"] >= best - error][-1]
    assert test_score["step"] == chosen["step"]
    assert evaluate(run).row["accuracy"] == pytest.approx(chosen["accuracy"])


def test_the_report_says_what_the_intervals_say(run):
    text = (run / "report.md").read_text()
    evaluation = evaluate(run, split="test")
    accuracy = evaluation.row["accuracy"]
    images = evaluation.images
    low, high = wilson_interval(accuracy, images)
    assert f"On {images} test images:" in text
    assert f"{100 * accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f})" in text
    assert f"Scored once, on {images} test images on which nothing was chosen." in text
    student = evaluation.samples["accuracy"].right
    teacher = evaluation.samples["teacher_accuracy"].right
    ends = paired_interval(
        int((student & ~teacher).sum()), int((teacher & ~student).sum()), images
    )
    expected = "({:+.1f} to {:+.1f})".format(*(100 * end for end in ends))
    assert (
        next(
            line for line in text.splitlines() if "against teacher: accuracy" in line
        ).count(expected)
        == 1
    )
    assert "against student, labels only: accuracy" in text


def test_it_is_scored_once(run, monkeypatch):
    """The command that is given again reads what was scored, also where the score would
    be another one now.
    """
    before = (run / "scored.json").read_bytes()

    def scored_again(*_):
        raise AssertionError

    monkeypatch.setattr("kd.jobs.distill.score", scored_again)
    train(config.load(str(run / "config.yaml")))
    assert (run / "scored.json").read_bytes() == before


def test_a_score_of_other_weights_is_not_believed(run, tmp_path):
    from kd.files.run_dir import RunDir

    shutil.copytree(run, tmp_path / "copy")
    assert RunDir(tmp_path / "copy").scored() is not None
    content = scored(tmp_path / "copy") | {"weights": "0" * 64}
    (tmp_path / "copy" / "scored.json").write_text(json.dumps(content))
    assert RunDir(tmp_path / "copy").scored() is None


def test_without_a_test_split_the_report_says_that_the_best_was_counted(settings):
    result = train(config.load(settings, ["run.epochs=2"]))
    assert (
        "Chosen from 2 evaluations on the same 13 validation images, which flatters it"
        in result.report
    )
    assert result.scored.row["accuracy"] == pytest.approx(result.metrics["accuracy"])


def test_a_table_teacher_has_outputs_for_test_images(settings, photos, tmp_path):
    sources = open_sources(resolve(config.load(settings)).data)
    names = [
        source.name(id)
        for source in (sources.train, sources.val)
        for id in range(len(source))
    ]
    right = [
        source.label(id)
        for source in (sources.train, sources.val)
        for id in range(len(source))
    ]
    logits = 5 * torch.eye(3)[torch.tensor(right)]
    write_answers(
        tmp_path / "table.safetensors",
        AnswerTable("logits", names, logits[None], sources.train.classes),
    )
    settings["teacher"] = {
        "kind": "answers",
        "model": str(tmp_path / "table.safetensors"),
    }
    result = train(
        config.load(
            settings, ["run.epochs=1", "data.test_fraction=0.4", "data.augment.mixup=0"]
        )
    )
    assert result.scored.split == "test"
    assert result.scored.row["teacher_accuracy"] == 1


def test_a_run_to_which_a_test_split_was_added_can_still_be_read(
    settings, photos, tmp_path
):
    shutil.copytree(photos, tmp_path / "later")
    shutil.copytree(photos / "val", tmp_path / "later/exam")
    settings["data"]["root"] = str(tmp_path / "later")
    folder = train(config.load(settings, ["run.epochs=1"])).folder
    assert (
        train(
            config.load(settings, ["run.epochs=1", "data.test_split=exam"])
        ).scored.split
        == "test"
    )
    assert evaluate(folder).split == "val"
    assert evaluate(folder, ["data.test_split=exam"], split="test").split == "test"


def test_a_run_without_a_test_split_says_how_to_name_one(refused, distilled):
    assert refused("evaluate", distilled, "--split", "test").startswith(
        "--split: is test, but the data of the run"
    )


def test_test_images_can_be_left_to_a_later_start(photos, teacher, tmp_path):
    """As `kd-train --no-test` does, for runs of which one is chosen."""
    settings = base(photos, tmp_path)
    settings["teacher"] = teacher_at(teacher)
    loaded = config.load(settings, ["data.test_fraction=0.5", "run.epochs=1"])
    first = train(loaded, final="val")
    data = open_sources(resolve(loaded).data)
    assert data.test is not None
    assert (scored(first.folder)["split"], scored(first.folder)["data"]) == (
        "val",
        data.val.fingerprint,
    )
    assert first.scored is not None
    assert first.scored.row["accuracy"] == pytest.approx(first.metrics["accuracy"])
    second = train(loaded)
    assert (scored(second.folder)["split"], scored(second.folder)["data"]) == (
        "test",
        data.test.fingerprint,
    )


@pytest.mark.parametrize(
    ("least", "score", "refused"),
    [
        (-1.0, 0.5, True),
        (-1.0, 0.52, False),
        (0.5, 0.5, False),
        (0.5, 0.49, True),
        (0.0, 0.0, False),
    ],
)
def test_a_teacher_must_be_above_twice_chance_or_as_good_as_was_asked(
    make, least, score, refused
):
    """A perfect one, its classes in the order of text, has 2 of 12 right: exactly twice
    chance.
    """
    run = make().run
    assert min(max(0.5, run.evaluator.chance), 2 * run.evaluator.chance) == 0.5
    recipe = SimpleNamespace(
        teacher=SimpleNamespace(min_accuracy=least), task=run.distillation.task
    )
    with (
        pytest.raises(ModelError, match="in the data's order")
        if refused
        else nullcontext()
    ):
        require_teacher("teacher", score, recipe, run)
    for chance in (
        (0.0, 1.0) if least < 0 else ()
    ):  # unknown, as of embeddings; every image shows every class
        run.evaluator.chance = chance
        require_teacher("teacher", chance, recipe, run)
