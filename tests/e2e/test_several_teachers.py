"""Several teachers as a user sees them: fitted, checked one by one, averaged, cached;
and what is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pieces import tiny

from kd.config.yaml_text import read_yaml

FIT = {"epochs": 3, "lr": 3e-3}


@pytest.fixture
def several(written, tmp_path):
    """A configuration of two teachers of other widths, both fitted on the labels."""
    second = {**{key: tiny(2, 32)[key] for key in ("model", "args")}, "license": "mit"}
    return written(
        teacher={
            **tiny(2, 48),
            "also": [second],
            "fit": {**FIT, "folder": str(tmp_path / "teachers")},
        }
    )


def test_two_teachers_are_fitted_checked_and_averaged(several, command, tmp_path):
    taught = command("teach", several)
    assert taught.code == 0, taught
    assert (
        len([line for line in taught.out.splitlines() if line.endswith("export")]) == 2
    )
    trained = command("train", several, "teacher.cache.views=1", "run.every.log=1")
    assert trained.code == 0, trained
    assert len(re.findall(r"^teacher: reusing ", trained.out, re.MULTILINE)) == 2
    alone = re.findall(
        r"^(teacher\S*): 'vit_tiny_patch16_224' alone \d+\.\d %$",
        trained.out,
        re.MULTILINE,
    )
    assert alone == ["teacher", "teacher.also[0]"]
    rows = [
        json.loads(line)
        for line in (
            (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
        )
    ]
    taught_images = [row["teacher_images"] for row in rows if row["kind"] == "train"]
    assert (
        sum(taught_images) == 36
    )  # one record an image, whatever the number of teachers
    evaluated = command("evaluate", tmp_path / "runs" / "tiny")
    assert evaluated.code == 0, evaluated
    checked = command("train", several, "--check")
    assert checked.out.count("teacher   vit_tiny_patch16_224") == 2
    assert (
        command(
            "train",
            several,
            "teacher.cache.views=1",
            "teacher.also.0.license=bsd-3-clause",
        ).code
        == 0
    )  # again


def test_the_licence_of_each_stands_in_card_chain_and_report(
    several, command, tmp_path
):
    run = tmp_path / "runs" / "tiny"
    assert command("train", several).code == 0
    assert command("export", run).code == 0
    card = (run / "export" / "README.md").read_text()
    reported = command("report", run).out
    cells = {
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in card.splitlines()
    }
    for config_path, licence in (
        ("teacher", "none: random weights"),
        ("teacher.also[0]", "mit"),
    ):
        assert (config_path.replace("[", r"\[").replace("]", r"\]"), licence) in cells
        line = f"{config_path}  vit_tiny_patch16_224 (fitted on the labels), licence {licence}"
        for text in (card, reported, (run / "report.html").read_text()):
            assert line in text
    assert (
        "  | compared: the same prediction on 13 of 13 images, largest difference "
        in reported
    )
    assert "graph  model.onnx " in reported


def test_one_that_comes_again_is_fitted_with_another_seed(several, command, tmp_path):
    taught = command(
        "teach", several, "teacher.also.0.args.embed_dim=48", "teacher.fit.seed=3"
    )
    assert taught.code == 0, taught
    first, second = (
        Path(line) for line in taught.out.splitlines() if line.endswith("export")
    )
    assert first != second
    seeds = [
        read_yaml(folder.parent / "config.yaml")["run"]["seed"]
        for folder in (first, second)
    ]
    assert seeds == [3, 4]
    alone = command("teach", several, "teacher.also=[]", "teacher.fit.seed=4")
    assert Path(alone.out.splitlines()[-1]) == second  # the same fit, found again


def test_another_weight_is_another_cache(several, command, tmp_path, refused):
    place = ("teacher.cache.views=1", f"teacher.cache.path={tmp_path / 'cache'}")
    assert command("cache", several, *place).code == 0
    assert "was made with another shares" in refused(
        "cache", several, *place, "teacher.also.0.weight=2"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.shard=true"], "teacher.also: does not go with teacher.shard"),
        (["teacher.also=[{weight: 2}]"], "teacher.also[0].model: is missing"),
        (["teacher.also.0.weight=0"], "teacher.also[0].weight: is 0"),
        (
            ["teacher.also.0.model=vit_tinny"],
            "teacher.also[0].model: no model 'vit_tinny'",
        ),
        (["teacher.also.0.checkpoint=no/such"], "teacher.also[0].checkpoint: no file"),
        (
            ["teacher.also.0.args.embed_dim=48", "teacher.fit.epochs=0"],
            "teacher.also[0]: repeats an earlier teacher",
        ),
    ],
)
def test_invalid_further_teachers_are_refused(several, refused, overrides, message):
    assert refused("train", several, *overrides).startswith(message)
