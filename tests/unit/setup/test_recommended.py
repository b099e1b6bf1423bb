"""Recommended lengths: `auto`, a factor of the file's length, and the table of measured
runs behind `--check`.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kd
from kd import config
from kd.core import recommended
from kd.core.errors import KdError
from kd.setup import measured
from kd.setup.data import open_sources
from kd.setup.measured import (
    Measured,
    Situation,
    comparable,
    comparison_text,
    contrast,
    contrast_text,
    pays_from,
)
from kd.setup.recipe import resolve

ROOT = Path(__file__).parents[3]

ROW = Measured(
    title="fruit",
    pictures=1000,
    labelled=100,
    classes=10,
    teacher=0.7,
    task="softmax",
    student="small",
    pretrained=False,
    arm="distilled",
    views=8,
    epochs=40,
    other="",
    accuracy=0.6,
    seconds=100.0,
    before=60.0,
    curve=((10.0, 0.3), (20.0, 0.5), (30.0, 0.45), (40.0, 0.6)),
)


# --------------------------------------------------------------------------------
# auto


def test_the_images_times_the_epochs_are_the_visits_unless_there_are_too_few_or_too_many():
    for images in (700, 2_500, 9_000):
        assert recommended.length(
            images, False, False
        ).epochs * images == pytest.approx(recommended.VISITS, rel=0.05)
    assert recommended.length(50_000, False, False).epochs == 10
    assert recommended.length(100, False, False).epochs == 300
    assert recommended.length(50_000, True, False).epochs == 20
    assert recommended.length(2_500, False, True).epochs == 14
    assert [
        recommended.length(count, False, False).batch_size for count in (9, 100, 5_000)
    ] == [8, 32, 64]


def test_auto_is_a_number_in_the_record_of_the_run(settings):
    settings["run"].pop("epochs", None)
    settings["teacher"]["cache"] = {"views": "auto"}
    recipe = resolve(config.load(settings))
    epochs = recipe.length.epochs
    images = len(open_sources(recipe.data).train)
    assert (
        recipe.record.keys["run.epochs"]
        == epochs
        == recommended.length(images, False, False).epochs
    )
    assert (
        recipe.data.views
        == recipe.teacher.cache.views
        == recommended.stored_views(epochs)
    )


def test_auto_follows_the_epochs_or_steps_that_are_given(settings):
    settings["teacher"]["cache"] = {"views": "auto"}
    assert resolve(config.load(settings, ["run.epochs=50"])).data.views == 10
    settings["run"].pop("epochs", None)
    short = resolve(config.load(settings, ["run.steps=1"]))
    assert (short.data.views, short.length.steps) == (1, 1)
    assert (
        resolve(config.load(settings, ["data.views=3", "run.epochs=50"])).data.views
        == 3
    )


def test_the_fit_of_a_teacher_takes_auto_by_the_number_of_labelled_images(settings):
    settings["teacher"] = {
        "model": "tf_efficientnet_lite0",
        "pretrained": True,
        "fit": {"epochs": "auto"},
    }
    recipe = resolve(config.load(settings))
    labelled = len(open_sources(recipe.data).with_labels().train)
    epochs = recipe.fits["teacher"].run.epochs
    assert epochs == round(recommended.FIT_VISITS / labelled)
    longer = resolve(config.load(settings, ["run.epochs=3x"]))
    assert longer.record.keys["teacher.fit.epochs"] == epochs
    settings["teacher"]["pretrained"] = False
    scratch = resolve(config.load(settings, ["run.epochs=50"]))
    assert scratch.record.keys["teacher.fit.epochs"] == 25
    steps = resolve(config.load(settings, ["teacher.fit.steps=7"]))
    assert steps.fits["teacher"].run.steps == 7


def test_auto_keeps_no_features_and_nothing_without_a_teacher(settings):
    settings["teacher"]["cache"] = {"views": "auto"}
    assert (
        resolve(
            config.load(settings, ["losses=[{kind: kl}, {kind: cosine}]"])
        ).data.views
        == 0
    )
    settings["teacher"]["model"] = ""
    assert resolve(config.load(settings, ["losses=[{kind: ce}]"])).data.views == 0


def test_distill_takes_auto_by_the_number_of_its_images():
    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))

    torch.manual_seed(0)
    data = [(torch.rand(3, 8, 8), number % 2) for number in range(16)]
    result = kd.distill(
        teacher=network(),
        student=network(),
        train=data,
        val=data,
        epochs="auto",
        batch_size=16,
        progress=False,
    )
    assert round(result.rows[-1]["step"]) == recommended.length(16, False, False).epochs


@pytest.mark.parametrize("value", ["-1", "0", "often", "1.5"])
def test_no_other_word_or_number_is_a_length(settings, value):
    with pytest.raises(KdError, match="auto or a whole number"):
        config.load(settings, [f"run.epochs={value}"])


def test_three_times_the_length_is_another_run_with_the_same_views(settings):
    settings["run"] |= {"epochs": 20, "name": "food"}
    settings["teacher"]["cache"] = {"views": "auto"}
    short, longer = (
        resolve(config.load(settings, overrides))
        for overrides in ([], ["run.epochs=3x"])
    )
    assert (longer.length.epochs, longer.record.name, longer.data.views) == (
        60,
        "food-3x",
        short.data.views,
    )
    assert longer.record.keys["run.times"] == 1
    with_name = config.load(settings, ["run.epochs=2.5X", "run.name=mine"])
    assert (with_name.run.name, resolve(with_name).length.epochs) == ("mine", 50)
    settings["run"] = {"steps": 100}
    assert resolve(config.load(settings, ["run.steps=3x"])).length.steps == 300


def test_a_factor_of_auto_is_a_factor_of_its_number(settings):
    settings["run"].pop("epochs", None)
    short, longer = (
        resolve(config.load(settings, overrides))
        for overrides in ([], ["run.epochs=3x"])
    )
    assert longer.length.epochs == 3 * short.length.epochs


def test_a_factor_of_the_length_that_does_not_decide_is_refused(settings):
    with pytest.raises(
        KdError, match=r"run\.epochs: is 3x, but run\.steps decides.*run\.steps=3x"
    ):
        config.load(settings, ["run.epochs=3x", "run.steps=7"])
    with pytest.raises(KdError, match=r"run\.epochs: is 0x.*above 0"):
        config.load(settings, ["run.epochs=0x"])


@pytest.mark.parametrize(
    "run", [3, [1], {"steps": "${oc.env:KD_NOT_SET}"}, {"name": "${oc.env:KD_NOT_SET}"}]
)
@pytest.mark.parametrize("overrides", [[], ["run.epochs=3x"]])
def test_a_factor_of_a_section_that_is_wrong_is_one_line(settings, run, overrides):
    with pytest.raises(KdError, match="run"):
        config.load({**settings, "run": run}, overrides)


def test_the_name_of_a_longer_run_keeps_its_reference(settings, monkeypatch):
    monkeypatch.setenv("KD_RUN", "s3cret")
    settings["run"] = {"name": "${oc.env:KD_RUN}", "epochs": 2}
    longer = config.load(settings, ["run.epochs=3x"])
    assert longer.run.name == "s3cret-3x"
    assert "s3cret" not in config.dump(longer)
    assert config.load(config.to_dict(longer)).run.name == "s3cret-3x"


# --------------------------------------------------------------------------------
# measured runs


def test_the_table_is_that_of_the_study():
    files = sorted((ROOT / "benchmarks" / "results" / "quality").glob("curves_*.csv"))
    lines = [
        line for line in files[-1].read_text().splitlines() if not line.startswith("#")
    ]
    study = list(csv.DictReader(lines))
    table = measured.rows()
    assert len(study) == len(table)
    for row, of_study in zip(table, study, strict=True):
        assert row.accuracy == float(of_study["accuracy"])
        assert row.seconds == float(of_study["cpu_seconds"])
        assert row.seconds - row.before == pytest.approx(
            float(of_study["student_seconds"]), abs=1.5
        )
        assert row.arm == of_study["arm"]
        assert (row.labelled < row.pictures) == (
            of_study["setup"] not in ("tiny50_all", "fruit_all", "trays")
        )


def test_the_weight_of_the_labels_is_that_of_the_study():
    accuracies = {
        row.other: row.accuracy
        for row in measured.rows()
        if (row.teacher, row.epochs) == (0.7146, 10)
    }
    texts = [
        f"{accuracies[overrides]:.1%}".replace("%", " %")
        for overrides in ("losses.1.weight=1.0", "", "losses.1.weight=0.0")
    ]
    assert (
        "weight 1 reached {}, 0.1 reached {}, no labels {}".format(*texts)
        == recommended.WEIGHED
    )


def test_runs_are_comparable_if_pictures_and_labels_are_within_a_factor_of_four():
    situation = Situation(pictures=2_000, labelled=200, classes=10, pretrained=False)
    far = replace(ROW, title="many", pictures=9_000, labelled=200)
    assert comparable(situation, [ROW, far]) == [ROW]
    assert comparable(replace(situation, pictures=4_001), [ROW]) == []
    assert comparable(replace(situation, labelled=9), [ROW]) == []
    all_labelled = replace(situation, labelled=2_000)
    assert comparable(all_labelled, [ROW]) == []
    assert comparable(replace(situation, pretrained=True), [ROW]) == []
    assert comparable(situation, []) == []


def test_two_runs_are_contrasted_that_differ_in_nothing_else():
    two_views = replace(ROW, views=2, accuracy=0.5)
    long = replace(ROW, epochs=120, accuracy=0.8)
    unlike = replace(ROW, views=2, epochs=120, accuracy=0.1)
    assert contrast([ROW, long, two_views], "views", 2, 8) == (two_views, ROW)
    assert contrast([ROW, long, two_views], "epochs", 30, 120) == (ROW, long)
    assert contrast([ROW, unlike], "views", 2, 8) is None
    assert contrast([ROW, two_views], "views", 2, 40) is None  # no row is near
    text = contrast_text((two_views, ROW), "views")
    assert all(
        phrase in text
        for phrase in (
            "8 views reached 60.0 %",
            "2 views reached 50.0 %",
            "fruit",
            "one seed",
        )
    )


def test_it_pays_from_the_last_crossing_on_after_the_teacher():
    assert pays_from(ROW, 0.2) == 60 + 10
    assert pays_from(ROW, 0.47) == 60 + 40  # it fell below once more
    assert pays_from(ROW, 0.6) is None
    alone = replace(
        ROW,
        arm="labels",
        teacher=0.0,
        accuracy=0.4,
        seconds=90.0,
        before=0.0,
        curve=((90.0, 0.47),),
    )
    assert all(
        phrase in comparison_text([ROW, alone])
        for phrase in ("40.0 % at most", "1 min 40 s on", "60.0 %", "70.0 %")
    )
    assert comparison_text([ROW]) == comparison_text([alone]) == ""


def test_a_situation_without_labels_has_no_comparable_run():
    assert math.isinf(Situation(1_000, 0, 10, False).distance(ROW))
