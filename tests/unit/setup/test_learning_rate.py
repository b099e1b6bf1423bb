"""The learning rate follows the batch size as `optimizer.lr_scaling` says."""

import json
import re

import pytest

from kd import config
from kd.core.errors import ConfigErrors
from kd.jobs.description import describe
from kd.jobs.train import train
from kd.setup.recipe import resolve


@pytest.mark.parametrize(
    ("scaling", "lr", "batch", "expected"),
    [
        # "0.1 ... 256 images" to "3.2" at 8,192: arXiv:1706.02677, section 5.1
        ("linear", 0.1, (256, 8192), 3.2),
        # a ratio of kappa^2 in the batch is kappa in Adam's rate: arXiv:2205.10343
        ("sqrt", 1e-3, (256, 4096), 4e-3),
        ("linear", 1e-3, (1024, 1152), 1.125e-3),
        ("sqrt", 1e-3, (32, 8), 5e-4),
        ("none", 0.1, (256, 8192), 0.1),
    ],
)
def test_the_rate_is_that_of_the_papers(settings, scaling, lr, batch, expected):
    keys = [f"optimizer.lr={lr}", f"optimizer.lr_scaling={scaling}"]
    keys += [f"optimizer.lr_batch={batch[0]}", f"data.batch_size={batch[1]}"]
    assert resolve(config.load(settings, keys)).lr == pytest.approx(expected, rel=1e-12)


def test_without_the_key_the_rate_stays_and_so_does_the_fit(settings):
    settings["teacher"] = {**settings["teacher"], "checkpoint": "", "fit": {"steps": 3}}
    keys = ["optimizer.lr=0.003", "optimizer.lr_scaling=sqrt", "optimizer.lr_batch=2"]
    plain = resolve(config.load(settings, keys[:1]))
    scaled = resolve(config.load(settings, keys))
    assert plain.lr == 0.003
    assert scaled.lr != 0.003
    (fit,) = plain.fits.values()
    assert scaled.fits == {"teacher": fit}


def test_a_scaled_run_trains_with_its_rate_and_records_it(settings):
    keys = ["run.epochs=1", "optimizer.warmup_ratio=0", "optimizer.schedule=constant"]
    scaled = [
        "optimizer.lr=0.004",
        "optimizer.lr_scaling=sqrt",
        "optimizer.lr_batch=32",
    ]
    scaled += ["data.batch_size=8", "run.name=scaled"]
    folder = train(config.load(settings, [*keys, *scaled])).folder
    assert json.loads((folder / "manifest.json").read_text())["lr"] == 0.002
    plain = ["optimizer.lr=0.002", "data.batch_size=8", "run.name=plain"]
    other = train(config.load(settings, [*keys, *plain])).folder
    first, second = (
        [
            json.loads(row)["loss"]
            for row in (run / "metrics.jsonl").read_text().splitlines()
            if "loss" in json.loads(row)
        ]
        for run in (folder, other)
    )
    assert first == second != []


def test_a_scaling_without_its_batch_is_one_error(settings):
    with pytest.raises(ConfigErrors) as refused:
        config.load(settings, ["optimizer.lr_scaling=linear"])
    assert re.match(r"optimizer\.lr_batch: .*lr_scaling is linear", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("batch", "keys", "words"),
    [
        (
            9,
            ["optimizer.lr_batch=8"],
            r"^rate .*0\.001 .*none.* 0\.001125.* 0\.001061$",
        ),
        (
            9,
            ["optimizer.lr_batch=8", "optimizer.lr_scaling=sqrt"],
            r"^rate +0\.001061 .*sqrt.* 0\.001125.* 0\.001061$",
        ),
        (8, ["optimizer.lr_batch=8"], ""),
        (8, [], ""),
    ],
)
def test_check_says_what_each_rule_gives(settings, batch, keys, words):
    settings["optimizer"] = {"lr": 1e-3}
    text = describe(resolve(config.load(settings, [f"data.batch_size={batch}", *keys])))
    rates = [line for line in text.splitlines() if line.startswith("rate")]
    assert len(rates) == bool(words)
    assert all(re.search(words, line) for line in rates)


def test_a_batch_beyond_the_default_is_not_left_in_silence(settings):
    settings["data"] = {"kind": "food_mini", "root": "unmade", "image_size": 16}
    settings["teacher"] = {}
    settings["losses"] = [{"kind": "ce"}]
    settings["optimizer"] = {"lr": 1e-3}
    recipe = resolve(config.load(settings, ["data.batch_size=1024"]))
    (line,) = [row for row in describe(recipe).splitlines() if row.startswith("rate")]
    assert "256" in line
    assert "0.004" in line
    assert "0.002" in line
