"""One image, one view, one seed: the same bits whoever asks, in whatever order."""

import itertools
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from kd.core.types import Loading
from kd.data.views import EvalTransform, MixupCutmix, TrainTransform, Views, erase, mix
from kd.parts.datasets.imagefolder import Options, build

AUGMENTS = {
    "plain": (TrainTransform(16, 0.35, 0.5, 0.3), None),
    "policy": (TrainTransform(16, 0.35, 0.5, 0.3, "rand-m9-mstd0.5"), None),
    "mixup": (TrainTransform(16, 0.35, 0.5, 0.3), MixupCutmix(0.8, 0.0, 1.0)),
    "cutmix": (TrainTransform(16, 0.35, 0.5, 0.3), MixupCutmix(0.0, 1.0, 1.0)),
    "both": (TrainTransform(16, 0.35, 0.5, 0.0), MixupCutmix(0.8, 1.0, 0.5)),
}


@pytest.fixture(scope="module")
def source(photos):
    return build(Options(root=str(photos)), "train", None)


def views(source, name: str, seed: int = 7) -> Views:
    transform, mixing = AUGMENTS[name]
    return Views(source, transform, size=16, seed=seed, mixing=mixing)


def bits(sample) -> tuple:
    return (
        sample.pixels.numpy().tobytes(),
        sample.label,
        sample.partner_label,
        sample.lam,
        sample.readable,
    )


def shake(number: int) -> None:
    """Leave every global generator in another state."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("name", AUGMENTS)
def test_a_view_does_not_depend_on_the_caller(source, name):
    ids = list(range(len(source)))
    shake(1)
    first = {id: bits(views(source, name).load(id, 3)) for id in ids}
    shake(2)
    later = views(source, name)
    random.Random(0).shuffle(ids)
    for id in ids:
        later.load(id, 4)  # another view in between
        assert bits(later.load(id, 3)) == first[id]


@pytest.mark.parametrize("name", [*AUGMENTS, "erased", "erased and cut"])
def test_a_small_view_is_the_whole_one_of_fewer_pixels(tmp_path, name):
    """Its pixels are near the means of 2 x 2 of the whole view, which another crop,
    flip, box or partner is not.
    """
    for number in range(6):  # smooth, and no two alike
        rows, columns = np.mgrid[0:96, 0:80] / 80
        picture = np.stack(
            [rows, columns, np.abs(np.sin(3 * rows + number * columns))], -1
        )
        (tmp_path / "train" / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        file = tmp_path / "train" / f"c{number % 2}" / f"{number}.png"
        Image.fromarray((255 * np.minimum(picture, 1)).astype(np.uint8)).save(file)
    transform, mixing = AUGMENTS.get(
        name, AUGMENTS["cutmix" if "cut" in name else "plain"]
    )
    share = 1.0 if "erased" in name else 0.0
    common = {"seed": 7, "mixing": mixing, "drawn": 32}
    source = build(Options(root=str(tmp_path)), "train", None)
    large, small = (
        Views(
            source, replace(transform, size=side, erase=share, drawn=32), side, **common
        )
        for side in (32, 16)
    )
    gaps = []
    unrelated = []
    for id, view in itertools.product(range(6), range(8)):
        view_large = large.load(id, view)
        view_small = small.load(id, view)
        another_view = large.load(id, view + 100)
        assert (
            view_large.label,
            view_large.partner_label,
            view_large.lam,
            view_large.crc,
        ) == (
            view_small.label,
            view_small.partner_label,
            view_small.lam,
            view_small.crc,
        )
        means, otherwise = (
            torch.nn.functional.avg_pool2d(sample.pixels.float(), 2)
            for sample in (view_large, another_view)
        )
        gaps.append((means - view_small.pixels).abs().median().item())
        unrelated.append((otherwise - view_small.pixels).abs().median().item())
    # a policy may sharpen or posterize
    assert np.quantile(gaps, 0.9 if name == "policy" else 1.0) <= 5
    assert np.median(unrelated) > 4 * max(1.0, np.median(gaps))


def test_an_erased_box_is_the_same_share_of_a_small_view():
    grey = {side: Image.new("RGB", (side, side), (9, 9, 9)) for side in (64, 32)}
    for seed in range(40):
        states = []
        boxes = []
        for side, image in grey.items():
            rng = random.Random(seed)
            changed = np.asarray(erase(image, rng, 64)).mean(-1) != 9
            boxes.append(
                [
                    edge / side
                    for axis in changed.nonzero()
                    for edge in (axis.min(), axis.max() + 1)
                ]
            )
            states.append(rng.getstate())
        assert states[0] == states[1]  # what is drawn next is the same too
        assert np.abs(np.subtract(*boxes)).max() <= 1.5 / 32


@pytest.mark.parametrize("name", AUGMENTS)
def test_loading_leaves_the_global_generators_alone(source, name):
    shake(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    shake(3)
    views(source, name).load(0, 0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_loading_times_separate_decoding_and_resizing(tmp_path, kind):
    """A large JPEG is decoded reduced; a large PNG whole, which is counted."""
    for name in ("train/a/1", "train/b/2"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.effect_noise((400, 300), 40).convert("RGB").save(
            tmp_path / f"{name}.{kind.lower()}"
        )
    dataset = Views(
        build(Options(root=str(tmp_path)), "train", None),
        TrainTransform(16, 0.35, 0.5, 0.3),
        size=16,
        seed=7,
    )
    assert dataset.spent == Loading()
    dataset.load(0, 0)
    spent = dataset.spent
    assert spent.decoding > 0 < spent.resizing
    assert spent.whole == (0.0 if kind == "JPEG" else spent.decoding)
    dataset.load(1, 0)
    assert dataset.spent.minus(spent).decoding > 0 < dataset.spent.minus(spent).resizing


def test_seed_view_and_id_each_change_the_pixels(source):
    base = views(source, "plain")
    pixels = [
        base.load(0, 0).pixels,
        base.load(0, 1).pixels,
        base.load(1, 0).pixels,
        views(source, "plain", seed=8).load(0, 0).pixels,
    ]
    assert len({p.numpy().tobytes() for p in pixels}) == 4
    assert all(p.dtype == torch.uint8 and p.shape == (3, 16, 16) for p in pixels)


def test_pixels_are_the_decoded_image(source):
    # image 0 is 20 x 20: nothing is resampled
    val = Views(source, EvalTransform(20, 1.0), size=20, seed=0)
    expected = np.asarray(source.decode(0).image).transpose(2, 0, 1)
    assert np.array_equal(val.load(0, 0).pixels.numpy(), expected)


def planes(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, size, size)
    first, second = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return first, second


def test_mixup_is_the_weighted_mean_of_the_pixels():
    first, second = planes()
    for seed in range(50):
        mixed, lam = mix(first, second, MixupCutmix(0.8, 0.0, 1.0), random.Random(seed))
        expected = lam * first.numpy().astype(np.float64) + (
            1 - lam
        ) * second.numpy().astype(np.float64)
        assert mixed.dtype == torch.uint8
        assert 0 <= lam <= 1
        # rounding, and float32 in between
        assert np.abs(mixed.numpy() - expected).max() <= 0.5 + 1e-3


def test_cutmix_pastes_a_box_whose_share_is_one_minus_lam():
    first = torch.zeros(3, 16, 12, dtype=torch.uint8)
    second = torch.full((3, 16, 12), 255, dtype=torch.uint8)
    lams = []
    for seed in range(300):
        mixed, lam = mix(first, second, MixupCutmix(0.0, 1.0, 1.0), random.Random(seed))
        share = (mixed == 0).float().mean().item()
        assert lam == pytest.approx(share, abs=1e-6)
        rows = (mixed[0] > 0).any(1).nonzero()
        columns = (mixed[0] > 0).any(0).nonzero()
        if len(rows):  # a rectangle: every pixel between the outermost rows and columns
            area = (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
            assert area.item() == (mixed[0] > 0).sum().item()
        lams.append(lam)
    # A side s of a uniform centre keeps s - s^2/4 inside; with 1 - lam = s^2 uniform,
    # the mean of (s - s^2/4)^2 is 1/2 - 1/5 + 1/48 = 0.32: boxes cut off at the border
    # leave 0.68 of the first image.
    assert np.mean(lams) == pytest.approx(0.68, abs=0.05)
    assert min(lams) < 0.2
    assert max(lams) > 0.95


def test_with_both_on_each_gets_about_half():
    first = torch.zeros(3, 8, 8, dtype=torch.uint8)
    second = torch.full((3, 8, 8), 255, dtype=torch.uint8)
    cut = 0
    for seed in range(400):
        mixed, lam = mix(first, second, MixupCutmix(1.0, 1.0, 1.0), random.Random(seed))
        cut += set(mixed.unique().tolist()) <= {0, 255} and 0.01 < lam < 0.99
    assert 140 < cut < 240


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 100.0])
def test_any_alpha_gives_a_share(alpha):
    first, second = planes(4)
    for cut in (False, True):
        mixing = MixupCutmix(0.0, alpha, 1.0) if cut else MixupCutmix(alpha, 0.0, 1.0)
        for seed in range(100):
            mixed, lam = mix(first, second, mixing, random.Random(seed))
            assert 0.0 <= lam <= 1.0
            assert mixed.shape == first.shape


def test_the_partner_is_another_image_seen_through_the_transform(source):
    """Rebuild a mixed view from its parts: the own view, the partner's pixels and lam
    are all in the sample.
    """
    mixed = Views(
        source,
        EvalTransform(16, 1.0),
        size=16,
        seed=7,
        mixing=MixupCutmix(1.0, 0.0, 1.0),
    )
    plain = Views(source, EvalTransform(16, 1.0), size=16, seed=7)
    for id in range(6):
        sample = mixed.load(id, 0)
        pixels = plain.load(id, 0).pixels.double()
        candidates = [
            p for p in range(len(source)) if source.label(p) == sample.partner_label
        ]
        errors = [
            (
                sample.lam * pixels
                + (1 - sample.lam) * plain.load(p, 0).pixels.double()
                - sample.pixels
            )
            .abs()
            .max()
            .item()
            for p in candidates
        ]
        assert min(errors) <= 0.51
        assert sample.label == source.label(id)


def test_images_are_mixed_with_the_configured_probability(source):
    some = Views(
        source,
        EvalTransform(16, 1.0),
        size=16,
        seed=0,
        mixing=MixupCutmix(1.0, 0.0, 0.25),
    )
    mixed = sum(
        some.load(id, view).lam < 1 for id in range(len(source)) for view in range(20)
    )
    # 4 deviations of 720 draws
    assert mixed / (20 * len(source)) == pytest.approx(0.25, abs=0.065)
    assert (
        Views(source, EvalTransform(16, 1.0), 16, 0, MixupCutmix(1.0, 0.0, 0.0))
        .load(0, 0)
        .lam
        == 1.0
    )


@pytest.fixture
def damaged(photos, tmp_path):
    """Four images of two classes, one of them text."""
    for name in ("apple", "pear"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"{number}.jpg")
    (tmp_path / "train" / "pear" / "0.jpg").write_text("not an image")
    return build(Options(root=str(tmp_path)), "train", None)


def test_a_corrupt_image_is_grey_and_unreadable_where_skipped(damaged):
    sample = Views(damaged, EvalTransform(16, 1.0), 16, 0, on_corrupt="skip").load(2, 0)
    assert not sample.readable
    assert sample.label == 1
    assert sample.pixels.unique().tolist() == [127]


def test_a_corrupt_partner_leaves_the_image_unmixed(damaged):
    skipping = Views(
        damaged,
        EvalTransform(16, 1.0),
        16,
        0,
        mixing=MixupCutmix(1.0, 0.0, 1.0),
        on_corrupt="skip",
    )
    plain = Views(damaged, EvalTransform(16, 1.0), 16, 0)
    samples = [skipping.load(0, view) for view in range(60)]
    unmixed = [sample for sample in samples if sample.lam == 1.0]
    # one partner in four cannot be read
    assert len(unmixed) == pytest.approx(15, abs=13)
    assert all(
        sample.readable and torch.equal(sample.pixels, plain.load(0, 0).pixels)
        for sample in unmixed
    )


def test_a_sample_knows_the_bytes_that_it_came_from(source, photos):
    files = sorted((photos / "train").glob("*/*.jpg"))
    expected = [zlib.crc32(file.read_bytes()) for file in files]
    plain = views(source, "plain")
    assert [plain.load(id, 0).crc for id in range(len(source))] == expected


def test_a_mixed_sample_knows_those_of_both_images(source):
    plain = views(source, "plain")
    mixed = views(source, "mixup")
    plain_crcs = [plain.load(id, 0).crc for id in range(len(source))]
    mixed_crcs = [mixed.load(id, 0).crc for id in range(len(source))]
    pairs = {
        zlib.crc32(partner_crc.to_bytes(4, "little"), crc)
        for crc in plain_crcs
        for partner_crc in plain_crcs
    }
    assert set(mixed_crcs) <= pairs
    assert not set(mixed_crcs) & set(plain_crcs)
