"""Small images in the first part of a run: which steps have them, what a teacher sees,
resume, caches, sifters.
"""

import io
import shutil
from dataclasses import replace

import pytest
import torch
from pieces import slow
from PIL import Image
from test_cached import curve, keys, taught
from test_loop import killed_and_resumed, read_rows, same, weights, without_clocks

from kd import config
from kd.core.errors import ModelError
from kd.core.every import Intervals
from kd.core.types import Plan, State
from kd.engine.loop import train
from kd.engine.run import RunLength
from kd.jobs import fill_cache as job
from kd.jobs.check import check
from kd.jobs.description import describe
from kd.jobs.estimate import Bench, estimate, measure
from kd.jobs.stopwatch import Timing
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.recipe import fit_folders, resolve
from kd.setup.student import best_student

SMALL = (
    "data.progressive.size=8",
    "data.progressive.until=0.6",
    "run.every.log=1",
    "data.augment.crop_scale=0.5",
)
RELATIVE = ("sifter.kind=relative", "sifter.sift_delay=3", "sifter.beta_value=0.5")
MIXED = ("data.augment.mixup=0.8", "data.augment.cutmix=1.0", "data.augment.erase=0.5")


def sides(module: torch.nn.Module) -> list[int]:
    """Return a list that grows by the side of each batch of images that a module is
    given.
    """
    batch_sides: list[int] = []
    module.register_forward_pre_hook(
        lambda _, inputs: batch_sides.append(inputs[0].shape[-1])
    )
    return batch_sides


def test_the_student_sees_small_images_first_and_its_teacher_whole_ones(make):
    """36 images in batches of 8, 4 epochs: the middles of the first 10 of 16 steps lie
    before 0.6 of the run.
    """
    built = make(*SMALL, "run.epochs=4", "run.every.evaluate=16", "data.micro_batch=4")
    student = built.run.distillation.student.network
    student_sides = sides(student)
    teacher_sides = sides(built.run.teacher.model.network)
    train(built.run)
    trained = [side for side in student_sides if side == 8]
    assert student_sides[:20] == trained == [8] * 20
    assert set(student_sides[20:]) == {16}
    assert set(teacher_sides) == {16}
    assert built.run.distillation.student.input_size == 16


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(4, 0, [4, 4, 2, 0]), (1, 0, [2]), (0, 10, [4, 2, 0])],
)
def test_the_share_of_the_run_decides_step_by_step(epochs, steps, expected):
    length = RunLength(epochs, steps, 8, 0, Intervals(), small_until=0.6)
    plan = Plan(torch.arange(32), torch.ones(32))
    small_steps = []
    for epoch in range(len(expected)):
        begun = State(step=4 * epoch, epoch=epoch)
        resumed = replace(begun, step=begun.step + 3, step_in_epoch=3)
        assert length.small_steps(begun, plan) == length.small_steps(resumed, plan)
        small_steps.append(length.small_steps(begun, plan))
        middles = [
            length.progress(replace(begun, step=4 * epoch + at, step_in_epoch=at), 4)
            for at in range(4)
        ]
        assert small_steps[-1] == sum(middle < 0.6 for middle in middles)
    assert small_steps == expected
    assert replace(length, small_until=0.0).small_steps(State(), plan) == 0


def test_a_sifted_epoch_is_measured_in_its_own_steps():
    """Ten epochs of 2 of 4 steps, 0.52 of the run: the sixth epoch's second step would
    be small by 4.
    """
    length = RunLength(10, 0, 8, 0, Intervals(), small_until=0.52)
    plan = Plan(torch.arange(32), torch.ones(32), steps=2)
    small_steps = [
        length.small_steps(State(step=2 * epoch, epoch=epoch), plan)
        for epoch in range(10)
    ]
    middles = [
        [(epoch + (step + 0.5) / 2) / 10 < 0.52 for step in range(2)]
        for epoch in range(10)
    ]
    assert small_steps == [4 if 2 * sum(small) >= 2 else 0 for small in middles]
    assert small_steps == [4] * 5 + [0] * 5


@pytest.mark.parametrize("mixing", [(), MIXED], ids=["plain", "mixed"])
def test_live_filled_as_it_goes_and_filled_ahead_are_the_same_run(
    make, settings, steady, tmp_path, mixing
):
    overrides = (
        *SMALL,
        *mixing,
        f"teacher.model={steady}",
        "data.batch_size=12",
        "run.epochs=4",
    )
    live = make(*overrides, "data.views=2")
    train(live.run)
    filling = make(*overrides, *keys(tmp_path / "one"))
    train(filling.run)
    job.cache(config.load(settings, [*overrides, *keys(tmp_path / "two")]))
    ahead = make(*overrides, *keys(tmp_path / "two"), "data.store=views")
    train(ahead.run)
    assert curve(live) == curve(filling) == curve(ahead)
    assert all(
        same(weights(live.run), weights(built.run)) for built in (filling, ahead)
    )
    assert taught(filling) == [12.0] * 6 + [0.0] * 6
    assert taught(ahead) == [0.0] * 12


SIFTERS = {
    "none": (),
    "history": ("sifter.kind=history", "sifter.keep=0.5"),
    "relative, live": RELATIVE,
    "relative, cached": (*RELATIVE, "teacher.cache.views=2"),
}


@pytest.mark.parametrize(
    "name", ["none", slow("history"), slow("relative, live"), "relative, cached"]
)
def test_a_run_that_was_killed_in_either_part_is_the_run_that_was_not(
    make, tmp_path, name
):
    overrides = (*SMALL, "run.epochs=4", "run.every.checkpoint=1", *SIFTERS[name])
    cache = "teacher.cache.path={}/cache"  # each run fills its own
    uninterrupted = make(
        *overrides, cache.format(tmp_path / "whole"), folder=tmp_path / "whole"
    )
    student_sides = sides(uninterrupted.run.distillation.student.network)
    final_state = train(uninterrupted.run)
    assert {8, 16} == set(student_sides)
    for at in (3, final_state.step - 2):
        folder = tmp_path / f"killed {at}"
        resumed, _ = killed_and_resumed(
            make, at, folder, *overrides, cache.format(folder)
        )
        assert same(weights(resumed.run), weights(uninterrupted.run)), at
        actual, expected = (
            [
                {k: v for k, v in row.items() if k != "teacher_images"}
                for row in without_clocks(read_rows(run_folder))
            ]
            for run_folder in (folder, tmp_path / "whole")
        )
        assert actual == expected


def test_an_epoch_of_a_scoring_sifter_has_one_size(make):
    built = make(*SMALL, *RELATIVE, "run.epochs=3", "run.every.evaluate=99")
    student_sides = sides(built.run.distillation.student.network)
    train(built.run)
    training = student_sides[: student_sides.index(16)]
    assert set(training) == {8}
    assert 8 not in student_sides[len(training) :]


def test_an_image_that_changed_while_images_are_small_ends_the_run(
    make, photos, settings, tmp_path
):
    """Its stored answer no longer holds, and its teacher would be asked about the small
    view.
    """
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    overrides = (*SMALL, f"data.root={data}", *keys(tmp_path / "cache", views=1))
    job.cache(config.load(settings, overrides))
    file = data / "train" / "fig" / "03.jpg"
    size = file.stat().st_size
    quality = next(q for q in range(89, 0, -1) if len(_jpeg(file, q)) <= size)
    file.write_bytes(_jpeg(file, quality).ljust(size, b"\0"))
    with pytest.raises(
        ModelError,
        match=r"teacher\.cache\.path: .* has changed since its record.*kd-cache",
    ):
        train(make(*overrides, "run.epochs=4").run)


def _jpeg(file, quality: int) -> bytes:
    buffer = io.BytesIO()
    Image.open(file).rotate(180).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def test_patience_begins_where_images_have_their_size(make):
    # no evaluation is better than the first
    overrides = (
        "run.epochs=8",
        "run.patience=1",
        "optimizer.lr=1e-12",
    )
    assert train(make(*overrides).run).epoch == 2
    assert train(make(*overrides, *SMALL).run).epoch == 5  # 0.6 of 8 epochs are 4.8


def test_a_vit_takes_other_sizes_and_its_export_is_as_ever(make, settings, tmp_path):
    """Position embeddings are resampled in training alone: the folder holds a network
    of one size.
    """
    built = make(*SMALL, folder=tmp_path / "run")
    train(built.run)
    recipe = resolve(config.load(settings, SMALL))
    exported, _ = best_student(built.store, recipe, ["apple", "fig", "pear"])
    assert not exported.network.dynamic_img_size
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    trained = built.run.distillation.student.eval()
    torch.testing.assert_close(
        trained(pixels).logits, exported.eval()(pixels).logits, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("data.progressive.size=12",),
            r"size: is 12, but .* takes no images of 12 px\. Sizes that it takes: 8\.",
        ),
        (
            ("student.args.dynamic_img_size=false",),
            r"takes no images of 8 px\. It takes 16 px alone",
        ),
    ],
    ids=["a part of a patch", "a network of one size"],
)
def test_sizes_that_a_student_cannot_take_are_refused_before_step_one(
    settings, make, overrides, words
):
    small_overrides = (*SMALL, *overrides)
    for refuse in (
        lambda: check(resolve(config.load(settings, small_overrides))),
        lambda: make(*small_overrides),
    ):
        with pytest.raises(ModelError, match=words):
            refuse()


def test_a_fitted_teacher_is_the_same_one(settings):
    settings["teacher"] = {
        **settings["teacher"],
        "model": "vit_tiny_patch16_224",
        "fit": {"epochs": 2},
    }
    plain, small = (
        resolve(config.load(settings, overrides)) for overrides in ((), SMALL[:2])
    )
    first, second = (fit_folders(recipe, "data") for recipe in (plain, small))
    assert [path for _, path in first.values()] == [path for _, path in second.values()]
    assert all(not recipe.data.progressive.size for recipe, _ in second.values())


def test_a_check_estimates_both_parts(settings):
    recipe = resolve(
        config.load(
            settings,
            [
                *SMALL,
                "run.steps=100",
                "run.every.evaluate=100",
                *keys("cache", views=1),
            ],
        )
    )
    assert "at 8 px until 60% of them" in describe(recipe)
    with distributed(recipe.backend) as backend:
        bench = Bench.of(recipe, open_sources(recipe.data), backend)
        timings = measure(bench)
        assert min(timings["small step"].ms, timings["small load"].ms) > 0
        durations_ms = {
            "step": 40.0,
            "small step": 10.0,
            "load": 4.0,
            "small load": 2.0,
            "score": 0.0,
            "teacher": 0.0,
        }
        assumed = {
            name: Timing(ms, ms, 8) for name, ms in {**durations_ms, "fit": 0.0}.items()
        }
        speed = next(
            line for line in estimate(bench, assumed) if line.startswith("speed")
        )
    once = 36 / 800  # images are also loaded whole where the teacher is run
    ms_per_image = 0.4 * (40 + 4) + 0.6 * (10 + 2 + once * 4)
    assert f" {1000 / ms_per_image:.0f} images/s; " in speed
    assert (
        "student 40.000, loading 4.000, at 8 px, until 60%, student 10.000, loading"
        " then 2.000 ms" in speed
    )
