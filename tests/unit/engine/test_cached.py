"""A run with the teacher's cache: live, filled as it goes and filled ahead are one run;
then no forward at all.
"""

import shutil

import pytest
import torch
from PIL import Image
from test_loop import rows_of

from kd import config
from kd.core.errors import ConfigError, DataError
from kd.engine.loop import train
from kd.jobs import fill_cache as job
from kd.models.cache import Codec

LOG = "run.every.log=1"
VIEWS = ("run.epochs=4", LOG, "data.augment.crop_scale=0.5")


def curve(built) -> list[float]:
    return [row["loss"] for row in rows_of(built, "train")]


def taught(built) -> list[float]:
    return [row["teacher_images"] for row in rows_of(built, "train")]


def keys(path, dtype="fp32", views=2) -> list[str]:
    return [
        f"teacher.cache.views={views}",
        f"teacher.cache.path={path}",
        f"teacher.cache.dtype={dtype}",
    ]


@pytest.mark.parametrize(
    "mixing",
    [(), ("data.augment.mixup=0.8", "data.augment.cutmix=1.0")],
    ids=["plain", "mixed"],
)
def test_live_filled_as_it_goes_and_filled_ahead_are_the_same_run(
    make, settings, steady, tmp_path, mixing
):
    mixing = (*mixing, f"teacher.model={steady}", "data.batch_size=12")
    live = make(*VIEWS, *mixing, "data.views=2")
    train(live.run)
    filling = make(*VIEWS, *mixing, *keys(tmp_path / "one"))
    train(filling.run)
    filled = job.cache(
        config.load(settings, [*VIEWS, *mixing, *keys(tmp_path / "two")])
    )
    assert (filled.records, filled.missing, filled.computed) == (72, 0, 72)
    ahead = make(*VIEWS, *mixing, *keys(tmp_path / "two"))
    train(ahead.run)
    assert curve(live) == curve(filling) == curve(ahead)
    first_state, *other_states = (
        built.run.distillation.state_dict() for built in (live, filling, ahead)
    )
    assert all(
        torch.equal(first_state[name], state[name])
        for name in first_state
        for state in other_states
    )
    assert taught(live) == [12.0] * 12
    assert taught(filling) == [12.0] * 6 + [0.0] * 6
    assert taught(ahead) == [0.0] * 12


def test_when_a_view_comes_back_no_teacher_is_run(make, tmp_path):
    """36 images, 32 an epoch: what does not fill a batch is left out by view, not by
    epoch.
    """
    filling = make(*VIEWS, *keys(tmp_path))
    train(filling.run)
    assert taught(filling) == [8.0] * 8 + [0.0] * 8


def test_skipped_images_are_predicted_when_they_come(make, tmp_path):
    """Half of the images an epoch: a batch of hits and misses runs the teacher on the
    misses alone.
    """
    half = (
        *VIEWS,
        "sifter.kind=random",
        "sifter.keep=0.5",
        "sifter.warmup=0",
        "sifter.anneal=0",
    )
    live = make(*half, "data.views=2")
    filling = make(*half, *keys(tmp_path))
    train(live.run)
    train(filling.run)
    assert taught(filling)[:4] == [8.0] * 4
    assert 0 < sum(taught(filling)[4:]) < 32
    torch.testing.assert_close(
        torch.tensor(curve(filling)), torch.tensor(curve(live)), rtol=1e-5, atol=1e-7
    )


def test_a_cache_works_with_a_sifter(make, tmp_path):
    sifting = (*VIEWS, "sifter.kind=history", "sifter.keep=0.5", *keys(tmp_path))
    first = make(*sifting)
    second = make(*sifting)
    train(first.run)
    train(second.run)
    assert curve(first) == curve(second)
    assert [row["trained"] for row in rows_of(first, "epoch")] == [32, 16, 16, 16]
    assert sum(taught(second)) == 0


def test_stored_outputs_are_not_computed_again(settings, tmp_path, caplog):
    caplog.set_level("INFO", "kd")
    overrides = ["data.augment.crop_scale=0.5", *keys(tmp_path / "c")]
    chosen = config.load(settings, overrides)
    job.cache(chosen)
    again = job.cache(chosen)
    assert (again.computed, again.missing) == (0, 0)
    assert "view 1: 0 of 36" in caplog.text


def test_images_replaced_under_their_names_are_taught_anew(
    make, settings, photos, tmp_path, caplog
):
    """The check of an opened cache passes over them; the run finds all of them and
    computes them again.
    """
    root = shutil.copytree(photos, tmp_path / "photos")
    overrides = [f"data.root={root}", "data.batch_size=12", *keys(tmp_path, views=1)]
    job.cache(config.load(settings, overrides))
    for file in (root / "train").rglob("*.jpg"):
        size = file.stat().st_size
        Image.new("RGB", (20, 20), "white").save(file, quality=90)
        file.write_bytes(file.read_bytes().ljust(size, b"\0")[:size])
    built = make(LOG, *overrides)
    train(built.run)
    assert (
        "teacher.cache: view 0: 36 records are of images that have changed"
        in caplog.text
    )
    assert sum(taught(built)) == 36  # once, though there are two epochs


def test_checking_a_cache_leaves_unreadable_images_to_the_run(
    make, settings, photos, tmp_path
):
    root = shutil.copytree(photos, tmp_path / "photos")
    overrides = [f"data.root={root}", *keys(tmp_path)]
    job.cache(config.load(settings, overrides))
    first = sorted((root / "train").rglob("*.jpg"))[0]
    first.write_bytes(bytes(first.stat().st_size))
    make(*overrides)
    with pytest.raises(DataError, match="apple"):
        train(make(*overrides).run)


def test_only_the_kept_logits_and_the_mass_of_the_rest_are_compared():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    codec = Codec(40, "fp32", 3)
    stored = codec.compress(logits)
    assert codec.difference(stored, logits) == 0.0
    assert codec.difference(stored, logits + 0.25) == pytest.approx(0.25, abs=1e-5)
    changed = logits.clone()
    changed[2, logits[2].argmin()] += 9
    assert codec.difference(stored, changed) > 1
    assert Codec(40, "fp32", 0).difference([logits], changed) == pytest.approx(9)


def test_uncacheable_runs_are_refused(make, settings, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^teacher\.cache\.views: is 3, but data\.views is 2"
    ):
        make("data.views=2", *keys(tmp_path, views=3))
    with pytest.raises(
        ConfigError, match=r"^teacher\.cache\.views: there is nothing to cache"
    ):
        job.cache(config.load(settings))
