"""Which pairs of images are found to show one photograph, compared with formulas in
float64.
"""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from kd.core.types import Decoded
from kd.study.audit import copies
from kd.study.audit.copies import (
    MIRRORED,
    SPANS,
    Album,
    box_inside_bars,
    frequencies,
    hashes,
    spectra,
)


def photograph(seed: int, size: int = 96) -> Image.Image:
    """Return smooth shapes with some detail: no two are alike."""
    rng = np.random.default_rng(seed)
    layers = [rng.normal(size=(n, n)) * 3 / n**0.5 for n in (3, 6, 12, 24)]
    grown = [
        np.asarray(Image.fromarray(layer.astype(np.float32)).resize((size, size), 3))
        for layer in layers
    ]
    return Image.fromarray(
        (128 + 30 * sum(grown)).clip(0, 255).astype(np.uint8)
    ).convert("RGB")


def encoded(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def album(images: list[Image.Image]) -> Album:
    images_album = Album(len(images))
    for id, image in enumerate(images):
        images_album.add(0, id, Decoded(image, 0))
    return images_album


def paired(images: list[Image.Image]) -> set[tuple[int, int]]:
    pairs = copies.copies(album(images))
    assert len({*zip(pairs.first, pairs.second, strict=True)}) == len(pairs.first)
    assert (np.diff(pairs.score) <= 0).all()
    return {
        (int(min(pair)), int(max(pair)))
        for pair in zip(pairs.first, pairs.second, strict=True)
    }


@pytest.mark.parametrize(
    "change", ["same", "encoded", "cropped", "mirrored", "mirrored crop", "black bars"]
)
def test_a_changed_copy_is_found_among_others_and_nothing_else(change: str):
    images = [photograph(seed) for seed in range(300)]
    rng = np.random.default_rng(7)
    changed = []
    for id, image in enumerate(images[:40]):
        x, y = rng.uniform(0, 9.6, 2).round()
        crop = image.crop((x, y, x + 86, y + 86))
        changed.append(
            {
                "same": image,
                "encoded": encoded(image, 70),
                "cropped": encoded(crop, 90),
                "mirrored": ImageOps.mirror(image),
                "mirrored crop": encoded(ImageOps.mirror(crop), 90),
                "black bars": encoded(
                    ImageOps.expand(
                        image, (0, 4 + round(x)) if id % 2 else (4 + round(x), 0)
                    ),
                    90,
                ),
            }[change]
        )
    expected = {(id, 300 + id) for id in range(40)}
    pairs = paired([*images, *changed])
    assert len(pairs & expected) >= (36 if "crop" in change else 40)
    assert pairs <= expected


def test_many_equal_images_and_empty_ones_are_paired_without_all_their_pairs(
    monkeypatch,
):
    monkeypatch.setattr(copies, "WINDOW", 4)
    monkeypatch.setattr(copies, "TABLES", 4)
    equal = [photograph(1)] * 400
    plain = [Image.new("RGB", (40, 40), "white")] * 3
    pairs = paired([*equal, *plain])
    assert {row for pair in pairs for row in pair} == set(range(403))
    assert len(pairs) < 403 * 402 / 2 / 3
    assert all((first < 400) == (second < 400) for first, second in pairs)


def test_a_dark_picture_is_not_cut_for_bars():
    """Without what is darker than a bar nothing of it would be left to compare."""
    dark = Image.new("RGB", (200, 100), (10, 10, 10))
    lamp = Image.new("RGB", (20, 10), "white")
    assert box_inside_bars(dark) == (0, 0, 200, 100)
    dark.paste(lamp, (90, 45))
    assert box_inside_bars(dark) == (0, 0, 200, 100)
    barred = ImageOps.expand(Image.new("RGB", (200, 100), "white"), (0, 30))
    assert box_inside_bars(barred) == pytest.approx((0, 30, 200, 130), abs=1)


def test_one_image_or_none_has_no_copy():
    assert paired([]) == paired([photograph(0)]) == set()


def test_spectra_are_a_cosine_transform_of_each_part():
    """The reference integrates the cosine over each pixel in small steps, float64."""
    luma = album([photograph(3)]).luma
    for low, high in SPANS:
        points = np.linspace(low, high, 48_001)
        points = (points[1:] + points[:-1]) / 2
        waves = np.cos(np.pi * np.arange(8)[:, None] * (points - low) / (high - low))
        pixels = np.minimum((points * 24).astype(int), 23)
        expected = np.stack([np.bincount(pixels, wave, 24) for wave in waves]) / len(
            points
        )
        np.testing.assert_allclose(frequencies(low, high), expected, atol=2e-5)
    basis = frequencies(0.0, 1.0).astype(np.float64)
    waves = (basis @ luma[0] @ basis.T).ravel()[1:]
    (vector,) = spectra(luma, 0)
    assert vector[1:] == pytest.approx(waves * vector[0] / copies._DULL, abs=1e-4)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(spectra(luma, MIRRORED), spectra(luma[:, :, ::-1], 0))
    bits = np.unpackbits(hashes(luma)[:, :1].copy().view(np.uint8))
    assert (bits[1:] == (waves > 0)).all()


def test_a_score_is_the_mean_of_two_correlations():
    """Of the pictures in 12 x 12 cells and of what a blur of 3 x 3 takes away from
    them, as NumPy correlates them.
    """
    images = [photograph(5), photograph(6)]
    pictures = album(images)
    first, second = (
        luma.astype(np.float64).reshape(12, 2, 12, 2).mean((1, 3))
        for luma in pictures.luma
    )

    def detail(cells: np.ndarray) -> np.ndarray:
        blurred = np.empty_like(cells)
        for y in range(12):
            for x in range(12):
                blurred[y, x] = cells[
                    max(0, y - 1) : y + 2, max(0, x - 1) : x + 2
                ].mean()
        return cells - blurred

    expected = [
        np.corrcoef(a.ravel(), b.ravel())[0, 1]
        for a, b in ((first, second), (detail(first), detail(second)))
    ]
    means = copies.cell_means(0.0, 1.0)
    details = [
        copies._standardized(means @ luma[None].astype(np.float32) @ means.T)
        for luma in pictures.luma
    ]
    measured = [(a * b).sum() for a, b in zip(*details, strict=True)]
    assert measured == pytest.approx(expected, abs=0.03)  # what is flat counts as less
