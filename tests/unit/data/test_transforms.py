"""Crops, jitter and policies: inside the image whatever its shape, and random only by
the generator passed in.
"""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter
from timm.data.random_erasing import RandomErasing

from kd.data.views import (
    EvalTransform,
    TrainTransform,
    build_policy,
    cut,
    erase,
    jitter,
    random_box,
)

POLICIES = [
    "rand-m9-mstd0.5",
    "rand-m15-n3-mstd0.5-inc1",
    "original",
    "originalr",
    "v0",
    "v0r",
    "3a",
    "augmix-m5-w4-d2",
]
SIZES = [(1, 1), (1, 2), (2, 1), (1, 500), (500, 1), (3, 3), (64, 48), (7, 400)]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    )


def test_random_boxes_have_uniform_areas_and_aspects():
    """Where every aspect fits, area and log aspect are uniform: compare means and
    ranges over 4,000 draws.
    """
    rng = random.Random(0)
    width = 400
    height = 400
    smallest = 0.25
    shares = []
    aspects = []
    centres = []
    for _ in range(4000):
        left, top, right, bottom = random_box(width, height, smallest, rng)
        shares.append((right - left) * (bottom - top) / (width * height))
        aspects.append(math.log((right - left) / (bottom - top)))
        centres.append(((left + right) / 2 / width, (top + bottom) / 2 / height))
    assert min(shares) == pytest.approx(smallest, abs=0.01)
    assert max(shares) == pytest.approx(1.0, abs=0.01)
    # 4 deviations of the mean
    assert np.mean(shares) == pytest.approx((1 + smallest) / 2, abs=0.01)
    assert np.mean(aspects) == pytest.approx(0.0, abs=0.01)
    # every aspect up to 4:3 fits below that
    fits = [a for a, s in zip(aspects, shares, strict=True) if s < 3 / 4]
    assert max(fits) == pytest.approx(math.log(4 / 3), abs=0.01)
    assert min(fits) == pytest.approx(math.log(3 / 4), abs=0.01)
    assert np.std(fits) == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)
    assert np.mean(centres, axis=0) == pytest.approx([0.5, 0.5], abs=0.01)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_random_box_lies_inside_and_keeps_its_area(width, height):
    rng = random.Random(1)
    for _ in range(300):
        left, top, right, bottom = random_box(width, height, 0.3, rng)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        assert (
            0.3 - 1e-9 <= (right - left) * (bottom - top) / (width * height) <= 1 + 1e-9
        )


def test_no_random_crop_takes_everything():
    assert random_box(30, 20, 1.0, random.Random(0)) == (0.0, 0.0, 30.0, 20.0)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_any_image_becomes_a_square(width, height):
    image = noise(width, height)
    for seed in range(20):
        for transform in (
            TrainTransform(16, 0.1, 0.5, 0.5),
            EvalTransform(16, 0.3),
            EvalTransform(16, 1.0),
        ):
            result = transform(image, random.Random(seed))
            assert (result.size, result.mode) == ((16, 16), "RGB")


def test_evaluation_crops_the_centre():
    image = Image.new("RGB", (60, 40))
    # the middle 20 x 20: half of the shorter side
    image.paste((255, 255, 255), (20, 10, 40, 30))
    inner = np.asarray(EvalTransform(10, 0.5)(image, random.Random()))
    assert inner.min() > 200
    uncropped = np.asarray(EvalTransform(40, 1.0)(image, random.Random()))[..., 0]
    # same size: nothing is resampled
    assert np.array_equal(uncropped, np.asarray(image)[:, 10:50, 0])


def test_flip_has_the_configured_frequency():
    image = noise(8, 8)
    plain = image.tobytes()
    turned = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    results = [
        TrainTransform(8, 1.0, 0.3, 0.0)(image, random.Random(seed)).tobytes()
        for seed in range(1000)
    ]
    assert set(results) == {plain, turned}
    assert results.count(turned) / 1000 == pytest.approx(0.3, abs=0.06)  # 4 deviations


def test_jitter_changes_colours_within_its_strength():
    # contrast and saturation do not change a grey plane
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    values = {
        TrainTransform(4, 1.0, 0.0, 0.2)(grey, random.Random(seed)).getpixel((0, 0))[0]
        for seed in range(300)
    }
    assert min(values) == pytest.approx(80, abs=2)
    assert max(values) == pytest.approx(120, abs=2)
    assert len(values) > 20


@pytest.mark.parametrize("seed", range(6))
def test_jitter_is_its_three_steps_in_one(seed):
    """Against Pillow's own enhancers in the order and with the factors drawn, on
    colours that no step cuts off.
    """
    # as many as the mean is taken of
    pixels = np.random.default_rng(seed).integers(90, 150, (28, 28, 3), np.uint8)
    image = Image.fromarray(pixels)
    rng = random.Random(seed)
    steps: list[Any] = [
        ImageEnhance.Brightness,
        ImageEnhance.Contrast,
        ImageEnhance.Color,
    ]
    rng.shuffle(steps)
    expected = image
    for step in steps:
        expected = step(expected).enhance(rng.uniform(0.7, 1.3))
    jittered = jitter(image, 0.3, random.Random(seed))
    # Pillow rounds down after each step
    assert np.abs(np.asarray(jittered, int) - np.asarray(expected, int)).max() <= 3


@pytest.mark.parametrize("size", [5, 16, 40])
def test_a_cut_is_the_resized_box(size):
    """Against Pillow's bilinear filter on the pixels of the box; a box of five times
    the size is averaged first.
    """
    image = noise(200, 170).filter(ImageFilter.GaussianBlur(4))
    box = (11.3, 20.6, 110.0, 129.2)
    expected = image.crop((11, 20, 110, 130)).resize(
        (size, size), Image.Resampling.BILINEAR, reducing_gap=2.0
    )
    assert (
        np.abs(np.asarray(cut(image, box, size), int) - np.asarray(expected, int)).max()
        <= 2
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_run_and_are_a_function_of_the_generator(policy):
    image = noise(24, 24)
    transform = TrainTransform(24, 0.5, 0.5, 0.0, policy)
    first = []
    for seed in range(
        25
    ):  # enough draws for Posterize to be asked for 0 bits, which Pillow 13 refuses
        random.seed(seed + 1000)
        np.random.seed(seed + 1000)
        first.append(transform(image, random.Random(seed)).tobytes())
    random.seed(5)
    np.random.seed(5)
    again = [
        transform(image, random.Random(seed)).tobytes() for seed in reversed(range(25))
    ]
    assert again[::-1] == first
    assert len(set(first)) > 20


def test_posterize_to_no_bits_keeps_one():
    from timm.data import auto_augment

    build_policy("rand-m9", 16)
    image = noise(16, 16)
    for name in ("PosterizeIncreasing", "PosterizeOriginal", "Posterize"):
        if name in auto_augment.NAME_TO_OP:
            result = auto_augment.NAME_TO_OP[name](image, 0)
            assert set(np.unique(np.asarray(result))) == {0, 128}


@pytest.mark.parametrize(
    "policy", ["foo", "rand-q9", "rand-mhigh3", "augmix-wide5", "-"]
)
def test_policies_that_timm_does_not_know(policy):
    with pytest.raises(ValueError, match="is not a policy that timm knows"):
        build_policy(policy, 16)


def test_an_erased_rectangle_is_timms_pixel_mode():
    """Area, aspect, place and noise of 500 draws against what timm's RandomErasing
    draws on normalized black images.
    """
    size = 96
    rng = random.Random(0)
    black = Image.new("RGB", (size, size))
    ours = []
    values = []
    for _ in range(500):
        pixels = np.asarray(erase(black, rng)).astype(float)
        ours.append(rectangle(np.abs(pixels).sum(2) > 0))
        values.append(pixels[pixels.sum(2) > 0])
    random.seed(0)
    torch.manual_seed(0)
    erasing = RandomErasing(1.0, mode="pixel", device="cpu")
    theirs = []
    for _ in range(500):
        theirs.append(
            rectangle(erasing(torch.zeros(3, size, size)).abs().sum(0).numpy() > 0)
        )
    assert np.asarray(black).sum() == 0  # what was passed in is left alone
    for our_values, their_values in zip(
        np.array(ours).T, np.array(theirs).T, strict=True
    ):
        assert np.mean(our_values) == pytest.approx(
            np.mean(their_values),
            abs=4 * np.hypot(np.std(our_values), np.std(their_values)) / 500**0.5,
        )
        assert np.std(our_values) == pytest.approx(np.std(their_values), rel=0.15)
    shares = [height * width / size**2 for _, _, height, width in ours]
    assert 0.015 < min(shares) < 0.05 < 0.3 < max(shares) < 0.35
    noise = np.concatenate(values)
    assert noise.mean(0) == pytest.approx([123.7, 116.3, 103.5], abs=2)
    # cut off at 0 and 255
    assert noise.std(0) == pytest.approx([58.4, 57.1, 57.4], abs=3)


def rectangle(erased: np.ndarray) -> tuple[int, int, int, int]:
    """Return top, left, height and width of what was erased, which must be one
    rectangle.
    """
    rows = np.flatnonzero(erased.any(1))
    columns = np.flatnonzero(erased.any(0))
    height = rows[-1] - rows[0] + 1
    width = columns[-1] - columns[0] + 1
    assert erased.sum() > 0.99 * height * width  # noise may be black
    return rows[0], columns[0], height, width


def test_erasing_is_a_function_of_the_generator_and_leaves_other_draws_alone():
    picture = noise(64, 48)
    plain, some, every = (
        TrainTransform(32, 0.35, 0.5, 0.3, erase=share) for share in (0.0, 0.5, 1.0)
    )
    erased = 0
    for seed in range(40):
        images = [
            np.asarray(each(picture, random.Random(seed)))
            for each in (plain, some, some, every)
        ]
        assert np.array_equal(images[1], images[2])
        changed = (images[0] != images[3]).any(2)
        assert 0.01 < changed.mean() < 0.36
        rectangle(changed)
        assert np.array_equal(images[1], images[0]) or np.array_equal(
            images[1], images[3]
        )
        erased += not np.array_equal(images[1], images[0])
    assert 10 < erased < 30
