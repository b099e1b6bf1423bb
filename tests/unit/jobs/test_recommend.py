"""`--check` compares a hand-written configuration with the recommended one, and says
the plan from measured runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
from PIL import Image
from safetensors.torch import save_file

from kd import config
from kd.core import recommended
from kd.jobs.description import describe
from kd.setup.recipe import resolve

LABELLED = 15
WITHOUT = 1850
CLASSES = 10


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """Ten classes of 15 labelled pictures, and 1,850 without a label."""
    root = tmp_path_factory.mktemp("pictures")
    folders = {f"train/class_{number}": LABELLED for number in range(CLASSES)}
    folders |= {f"val/class_{number}": 1 for number in range(CLASSES)} | {
        "train/unlabelled": WITHOUT
    }
    for name, count in folders.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number % 256, 40, 90)).save(
                root / name / f"{number}.png"
            )
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(timm.create_model("test_efficientnet").state_dict(), file)
    return file


@pytest.fixture
def written(photographs, weights, tmp_path) -> dict[str, Any]:
    """A stranger's file: little of everything."""
    teacher = {
        "model": "test_efficientnet",
        "checkpoint": str(weights),
        "pretrained": True,
        "cache": {"views": 2},
    }
    overlay = {"pretrained_cfg_overlay": {"input_size": [3, 96, 96]}}
    return {
        "run": {"name": "mine", "folder": str(tmp_path / "runs"), "epochs": 20},
        "data": {
            "kind": "imagefolder",
            "root": str(photographs),
            "labels": "some",
            "image_size": 64,
            "batch_size": 16,
        },
        "teacher": {
            **teacher,
            "args": overlay,
            "fit": {"steps": 300, "batch_size": 16},
        },
        "student": {"model": "lcnet_050"},
        "losses": [{"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.1}],
    }


def lines(settings: dict[str, Any], *overrides: str) -> str:
    """Return the lines `recipe` and `plan` of `--check`."""
    text = describe(resolve(config.load(settings, overrides)))
    return text[text.index("recipe  ") : text.index("\nbackend")]


def test_labels_that_outweigh_the_teacher_where_few_pictures_have_one_are_named(
    written,
):
    assert f"losses[1].weight is 1, recommended 0.1: {recommended.WEIGHED}" in lines(
        written, "losses.1.weight=1.0"
    )
    assert "losses[1]" not in lines(written)
    assert "losses[1]" not in lines(written, "losses.1.weight=1.0", "data.labels=all")


def test_each_number_below_the_recommended_one_is_named_with_its_key(written):
    images = LABELLED * CLASSES + WITHOUT
    epochs = recommended.length(images, False, False).epochs
    text = lines(written)
    assert f"recommended run.epochs={epochs}" in text
    assert f"recommended teacher.cache.views={recommended.stored_views(epochs)}" in text
    assert f"recommended teacher.fit.steps={recommended.FIT_VISITS // 16}" in text
    assert "96 px, recommended 128" in text


def test_what_two_measured_runs_reached_stands_beside_it(written):
    """The pictures resemble those of the study, and the recommended number of epochs is
    near one of its lengths.
    """
    text = lines(written, "run.epochs=10", "teacher.cache.views=8")
    assert "epochs reached" in text
    assert "Tiny ImageNet" in text


def test_a_student_that_was_less_accurate_on_such_pictures_is_named(written):
    text = lines(written)
    assert "student.model is lcnet_050: xcit_nano_12_p8_224 reached" in text


def test_a_configuration_as_recommended_gets_one_line(written):
    side = "teacher.args.pretrained_cfg_overlay.input_size=[3, 128, 128]"
    text = lines(
        written,
        "run.epochs=auto",
        "teacher.cache.views=auto",
        "teacher.fit.steps=1250",
        side,
        "student.model=xcit_nano_12_p8_224",
    )
    assert (
        text.splitlines()[0]
        == "recipe    length and views as recommended for 2,000 images"
    )


def test_the_advice_names_the_key_that_decides_the_views(written):
    text = lines(written, "run.epochs=300", "data.views=5", "teacher.cache.views=auto")
    assert "recommended data.views=60" in text


def test_a_live_teacher_has_fresh_views_and_needs_no_more(written):
    assert "views" not in lines(written, "teacher.cache.views=0").split("plan  ")[
        0
    ].replace("length and views", "")


def test_the_plan_says_what_labels_alone_reached_and_from_when_on_distilling_was_better(
    written,
):
    plan = lines(written).split("plan  ")[1]
    assert all(
        word in plan
        for word in ("Tiny ImageNet", "labels alone reached", "distilling", "teacher")
    )


def test_a_pretrained_student_has_no_comparable_run_here(written, weights):
    written["student"] = {
        "model": "test_efficientnet",
        "checkpoint": str(weights),
        "init": "pretrained",
    }
    assert "no comparable run" in lines(written).split("plan  ")[1]


def test_labels_for_all_of_few_pictures_have_no_comparable_run(
    written, photographs, tmp_path
):
    root = tmp_path / "labelled"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for folder in (photographs / split).glob("class_*"):
            (root / split / folder.name).symlink_to(folder)
    data = {key: value for key, value in written["data"].items() if key != "labels"}
    assert (
        "no comparable run"
        in lines(written | {"data": {**data, "root": str(root)}}).split("plan  ")[1]
    )
