"""Decode once: the same pixels with a store and without, from any process, and never a
torn one.
"""

import multiprocessing
import os
import pickle
import random
import re
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pieces import Ranks
from PIL import Image

from kd import config
from kd.core.errors import ConfigError, CorruptImage, DataError, RunError
from kd.core.types import Decoded, Loading, Plan
from kd.data.loader import LocalLoader, Share
from kd.data.store import (
    PIXELS,
    Shrunk,
    Slots,
    Stored,
    StoredViews,
    open_disk,
    open_ram,
)
from kd.data.views import EvalTransform, MixupCutmix, TrainTransform, Views, random_box
from kd.files.records import Records
from kd.parts.datasets import imagefolder
from kd.setup.build import build_backend
from kd.setup.data import workers_of
from kd.setup.open_store import open_pixel_store, record_bytes, store_views, view_bytes


class Pictures:
    """A source of noise that counts how often it is asked to decode; image 3 is damaged
    where told.
    """

    classes = ("a", "b")
    fingerprint = "of-noise"
    edition = 0
    """Of the noise: another one has the same names and sizes."""

    def __init__(
        self, sizes: list[tuple[int, int]], broken: bool = False, length: int = 0
    ) -> None:
        self.sizes = sizes
        self.broken = broken
        self.length = length or len(sizes)
        self.decoded = 0

    def __len__(self) -> int:
        return self.length

    def label(self, id: int) -> int:
        return id % 2

    def name(self, id: int) -> str:
        return f"noise/{id}"

    def prepare(self) -> None:
        pass

    def decode(self, id: int) -> Decoded:
        if self.broken and id == 3:
            raise CorruptImage(
                "data.root",
                "noise/3: the image is truncated",
                "Whole images",
                "Delete it",
            )
        self.decoded += 1
        width, height = self.sizes[id % len(self.sizes)]
        noise = np.random.default_rng(id + 1000 * self.edition).integers(
            0, 256, (height, width, 3), np.uint8
        )
        return Decoded(Image.fromarray(noise), zlib.crc32(noise))


def opened(kind: str, folder: Path, count: int, pixels: int) -> Slots:
    if kind == "ram":
        return open_ram(pixels, "train")
    return open_disk(folder / "store", {"images": count, "split": "train"}, pixels)


RULE = Shrunk(16, 0.5)


def open_at(
    folder: Path, source, kind: str = "disk", rule: Shrunk | EvalTransform = RULE
) -> Stored:
    slots = opened(kind, folder, len(source), rule.max_pixels)
    return Stored(source, rule, slots)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def test_a_small_image_is_kept_as_it_is():
    """4/3 x 64^2 / 0.4 = 13,653 pixels are the least of which every crop has 64
    a side.
    """
    rule = Shrunk(64, 0.4)
    small = Image.new("RGB", (116, 117))
    large = Image.new("RGB", (118, 118))
    assert rule(small) is small
    assert rule(large).size == (117, 117)
    # no random crop: the shorter side
    assert Shrunk(64, 1.0)(Image.new("RGB", (640, 480))).size == (
        86,
        64,
    )


def test_no_random_crop_of_what_is_kept_is_smaller_than_training_needs():
    rng = random.Random(0)
    least = []
    for _ in range(1500):
        size = rng.choice((8, 17, 32))
        crop = rng.choice((0.08, 0.35, 0.7, 1.0))
        width, height = (round(size * 10 ** rng.uniform(0, 1.2)) for _ in range(2))
        shrunk = Shrunk(size, crop)(Image.new("RGB", (width, height)))
        left, top, right, bottom = random_box(*shrunk.size, crop, rng)
        shorter = min(right - left, bottom - top)
        if shrunk.size == (width, height):  # never enlarged
            continue
        least.append(shorter / size)
        assert shorter >= size * (1 - 1e-9)
    assert len(least) > 500
    assert min(least) < 1.02  # no larger than it must be


@pytest.mark.parametrize("crop", [0.08, 0.35, 1.0])
def test_every_image_up_to_four_times_as_long_as_wide_has_room(crop):
    rule = Shrunk(32, crop)
    for width, height in [
        (4000, 1000),
        (999, 3996),
        (1000, 1000),
        (401, 397),
        (33, 132),
        (4032, 3024),
    ]:
        shrunk = rule(Image.new("RGB", (width, height)))
        assert shrunk.width * shrunk.height <= rule.max_pixels


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_an_image_is_the_same_from_its_slot_and_decoded_once(tmp_path, kind):
    source = Pictures([(20, 14), (90, 50), (300, 31), (9, 70)] * 2)
    stored = open_at(tmp_path, source, kind)
    expected = [
        pixels(RULE(Pictures(source.sizes).decode(id).image))
        for id in range(len(source))
    ]
    for _ in range(3):
        for id in random.Random(0).sample(range(8), 8):
            image = stored.decode(id).image
            assert image.mode == "RGB"
            assert np.array_equal(pixels(image), expected[id])
    kept_not = [id for id in range(8) if expected[id].size > 3 * RULE.max_pixels]
    assert source.decoded == 8 + 2 * len(kept_not)
    assert (len(stored), stored.label(3), stored.name(2)) == (8, 1, "noise/2")
    assert (stored.classes, stored.fingerprint) == (source.classes, source.fingerprint)


@pytest.mark.parametrize(
    "mixing", [None, MixupCutmix(0.8, 1.0, 0.7)], ids=["plain", "mixed"]
)
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_views_of_small_images_are_those_without_a_store(
    photos, tmp_path, kind, mixing
):
    """What is not larger than training needs is not touched: bit-identical views, from
    the first time on.
    """
    source = imagefolder.build(imagefolder.Options(root=str(photos)), "train", None)
    rule = Shrunk(16, 0.35)
    stored = open_at(tmp_path, source, kind, rule)
    plain, cached = (
        Views(dataset, TrainTransform(16, 0.35, 0.5, 0.3), 16, 7, mixing)
        for dataset in (source, stored)
    )
    for view in range(2):
        for id in range(len(source)):
            expected = plain.load(id, view)
            sample = cached.load(id, view)
            assert torch.equal(expected.pixels, sample.pixels)
            assert expected[1:] == sample[1:]


@pytest.mark.parametrize("crop", [1.0, 0.9, 0.6])
def test_evaluation_is_bit_identical_for_every_image(tmp_path, crop):
    source = Pictures([(20, 14), (90, 50), (300, 31), (9, 70), (16, 16)])
    rule = EvalTransform(16, crop)
    stored = open_at(tmp_path, source, "disk", rule)
    plain = Views(source, EvalTransform(16, crop), 16, 0)
    cached = Views(stored, EvalTransform(16, 1.0), 16, 0)
    for _ in range(2):
        assert all(
            torch.equal(plain.load(id, 0).pixels, cached.load(id, 0).pixels)
            for id in range(len(source))
        )


def test_without_slots_the_pixels_are_the_same():
    source = Pictures([(90, 50)])
    assert np.array_equal(
        pixels(Stored(source, RULE).decode(0).image),
        pixels(RULE(source.decode(0).image)),
    )


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_workers_share_what_they_decode(tmp_path, kind):
    source = Pictures([(90, 50), (60, 70)] * 12)
    stored = open_at(tmp_path, source, kind)
    plan = Plan(torch.arange(24), torch.ones(24))
    views = Views(stored, TrainTransform(16, 0.5, 0.5, 0.0), 16, 1)
    filled, again = (
        list(LocalLoader(views, Share(6, 1, 0, 1), workers).epoch(plan, 0))
        for workers in (2, 0)
    )
    assert source.decoded == 0  # not in this process, though all of them are here
    assert all(
        torch.equal(first.image, second.image)
        for first, second in zip(filled, again, strict=True)
    )


def test_a_disk_store_travels_to_workers_that_are_started_anew_and_ram_says_why_not(
    tmp_path,
):
    source = Pictures([(90, 50)] * 4)
    stored = open_at(tmp_path, source)
    first = pixels(stored.decode(2).image)
    travelled = pickle.loads(pickle.dumps(stored))
    before = travelled.source.decoded
    assert np.array_equal(pixels(travelled.decode(2).image), first)
    assert travelled.source.decoded == before
    with pytest.raises(
        DataError,
        match=(
            r"data\.store: is ram, but worker .* Set data\.store=disk or"
            r" data\.workers=0"
        ),
    ):
        pickle.dumps(open_at(tmp_path, source, "ram"))


def _fill(folder: str, count: int, ready, go) -> None:
    stored = open_at(Path(folder), Pictures([(90, 50), (60, 70)], length=count))
    ready.set()
    go.wait()
    for id in range(count):
        stored.decode(id)


def test_several_runs_begin_and_fill_one_store_together(tmp_path):
    context = multiprocessing.get_context("fork")
    go = context.Event()
    ready = [context.Event() for _ in range(3)]
    runs = [
        context.Process(target=_fill, args=(str(tmp_path), 40, event, go))
        for event in ready
    ]
    for run in runs:
        run.start()
    assert all(event.wait(30) for event in ready)
    go.set()
    for run in runs:
        run.join(30)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    source = Pictures([(90, 50), (60, 70)], length=40)
    stored = open_at(tmp_path, source)
    filled = [pixels(stored.decode(id).image) for id in range(40)]
    assert source.decoded == 0
    assert all(
        np.array_equal(filled[id], pixels(RULE(source.decode(id).image)))
        for id in range(40)
    )


@pytest.mark.parametrize("damage", ["pixel", "nonsense size"])
def test_a_slot_that_is_not_whole_is_decoded_again(tmp_path, damage):
    source = Pictures([(90, 50)] * 3)
    stored = open_at(tmp_path, source)
    expected = [pixels(stored.decode(id).image) for id in range(3)]
    assert stored.slots is not None
    stride = stored.slots.records.stride
    path = tmp_path / "store" / PIXELS
    content = bytearray(path.read_bytes())
    if damage == "pixel":
        content[stride + Records.HEAD.size + 100] ^= 1
    else:
        content[stride : stride + Records.HEAD.size] = Records.HEAD.pack(7, 2**31)
    path.write_bytes(content)
    again = open_at(tmp_path, source)
    before = source.decoded
    assert all(
        np.array_equal(pixels(again.decode(id).image), expected[id]) for id in range(3)
    )
    assert source.decoded == before + 1
    assert again.slots is not None
    assert np.array_equal(pixels(again.slots.read(1).image), expected[1])  # type: ignore[union-attr]


def test_a_file_that_was_cut_short_is_made_whole(tmp_path):
    source = Pictures([(90, 50)] * 3)
    expected = pixels(open_at(tmp_path, source).decode(2).image)
    os.truncate(tmp_path / "store" / PIXELS, 100)
    assert np.array_equal(pixels(open_at(tmp_path, source).decode(2).image), expected)


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_corrupt_image_is_what_it_was_without_a_store(tmp_path, kind):
    source = Pictures([(90, 50)] * 5, broken=True)
    stored = open_at(tmp_path, source, kind)
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"data\.root: noise/3: the image is truncated"
        ):
            stored.decode(3)
        sample = Views(
            stored, TrainTransform(16, 0.5, 0.5, 0.0), 16, 0, on_corrupt="skip"
        ).load(3, 0)
        assert not sample.readable
        assert sample.pixels.unique().tolist() == [127]
    assert stored.slots is not None
    assert stored.slots.read(3) is None


def test_a_slot_remembers_the_bytes_that_it_came_from(tmp_path):
    source = Pictures([(90, 50)] * 4)
    dated = open_at(tmp_path, source)
    first = [dated.decode(id).crc for id in range(4)]
    assert first == [Pictures(source.sizes).decode(id).crc for id in range(4)]
    assert [dated.decode(id).crc for id in range(4)] == first
    assert source.decoded == 4


def test_a_store_of_images_that_have_changed_is_filled_again(chosen, caplog):
    """The names and the sizes are equal, and so is the fingerprint."""
    source = Pictures([(90, 50)] * 40)
    first = stored(chosen, "disk", source)
    before = [pixels(first.decode(id).image) for id in range(40)]
    unchanged = stored(chosen, "disk", source)
    assert not [text for text in caplog.messages if "have changed" in text]
    assert np.array_equal(pixels(unchanged.decode(7).image), before[7])
    source.edition = 1
    again = stored(chosen, "disk", source)
    assert [text for text in caplog.messages if "have changed" in text] == [
        "data.store: 16 of 16 sampled training images have changed since they were"
        " decoded: all are decoded again"
    ]
    assert not any(
        np.array_equal(pixels(again.decode(id).image), before[id]) for id in range(40)
    )


def bitmaps(root: Path, count: int = 12) -> Path:
    """Files of one size: what they show is in the bytes alone."""
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(noise).save(root / "ab"[number % 2] / f"{number:02d}.bmp")
    return root


def listed(root: Path):
    return imagefolder.build(
        imagefolder.Options(root=str(root), val_fraction=0.2), "train", None
    )


def swap(path: Path, other_path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other_path.read_bytes())
    other_path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_one_size_that_were_exchanged_are_decoded_again(
    tmp_path, caplog, workers
):
    """In place, so that only their times tell; and with the times of the contents put
    back, as `cp -p` does.
    """
    root = bitmaps(tmp_path / "photos")

    def read_all() -> tuple[str, dict[str, bytes]]:
        source = listed(root)
        cached = open_at(tmp_path, source)
        loader = LocalLoader(
            Views(cached, EvalTransform(16, 1.0), 16, 0), Share(2, 1, 0, 1), workers
        )
        plan = Plan(torch.arange(len(source)), torch.ones(len(source)))
        for _ in range(2):
            batches = list(loader.epoch(plan, 0))
        by_name = {
            source.name(i): pixels(cached.decode(i).image).tobytes()
            for i in range(len(source))
        }
        assert by_name == {
            source.name(i): pixels(RULE(source.decode(i).image)).tobytes()
            for i in range(len(source))
        }
        assert len(batches) == len(source) // 2
        return source.fingerprint, by_name

    before, contents = read_all()
    first, second, third = (root / name for name in list(contents)[:3])
    times = first.stat()
    swap(first, second)
    swap(first, third)
    for path in (first, second, third):
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, again = read_all()
    assert after == before  # the store is the same one
    assert sum(contents[name] != again[name] for name in contents) == 3
    assert "has changed since it was decoded" in caplog.text or workers


class Dated(Pictures):
    """Noise in files that have times."""

    times = 1

    def stamp(self, id: int) -> int:
        return self.times


def test_files_that_were_only_touched_are_compared_once_a_run(tmp_path, caplog):
    """So it is where hosts with copies of their own share a store: the times differ,
    the bytes do not.
    """
    sources = (Dated([(90, 50)] * 8), Dated([(90, 50)] * 8))
    sources[1].times = 2
    hosts = [open_at(tmp_path, source) for source in sources]
    expected = [pixels(hosts[0].decode(id).image) for id in range(8)]
    for _ in range(3):
        for host in reversed(hosts):
            assert all(
                np.array_equal(pixels(host.decode(id).image), image)
                for id, image in enumerate(expected)
            )
    assert [source.decoded for source in sources] == [8 + 8, 8]
    assert not caplog.messages


@pytest.fixture
def chosen(settings):
    return config.load(settings)


def stored(chosen, kind: str, source, **keys):
    """Open a store before such a source; return its training source."""
    section = replace(chosen.data, store=kind, **keys)
    splits = source, Pictures([(90, 50)] * 4)
    return open_pixel_store(
        section, splits, chosen.run.folder, build_backend(chosen.backend)
    )[0]


@pytest.mark.parametrize(
    ("kind", "instead"), [("ram", "of memory are left here"), ("disk", "are free at")]
)
def test_a_store_larger_than_the_space_is_refused_with_both_sizes(
    chosen, tmp_path, kind, instead
):
    """100 million images of 975 pixels, a page of 4 KiB each; and four of the
    validation split.
    """
    with pytest.raises(RunError) as refused:
        stored(chosen, kind, Pictures([(90, 50)], length=100_000_000))
    message = str(refused.value)
    assert message.startswith(
        f"data.store: is {kind}, and the decoded images take about 381.5 GiB; "
    )
    assert instead in message
    assert ("data.store=disk" in message) == (kind == "ram")
    # what does not fit is not offered again
    assert not re.search(rf"\b{kind}\b", message.partition(instead)[2])
    assert not (tmp_path / "runs").exists()  # nothing half-written


@pytest.mark.parametrize("kind", ["ram", "views"])
def test_each_rank_of_a_host_holds_a_store_in_memory_of_its_own(
    chosen, monkeypatch, kind
):
    """There is room for one and a half."""
    backend = build_backend(chosen.backend)
    source = Pictures([(90, 50)], length=1000)
    section = replace(chosen.data, store=kind)
    views = Views(source, TrainTransform(64, 0.35, 0.5, 0.3), 64, 7)
    needed = (
        4096 * 1004 / 2**20
        if kind == "ram"
        else 8 * 1000 * record_bytes(view_bytes(views)) / 2**20
    )
    monkeypatch.setattr("kd.setup.open_store.free_mib", lambda: 1.5 * needed)
    for ranks in (1, 2):
        with (
            pytest.raises(RunError, match="of memory are left")
            if ranks == 2
            else nullcontext()
        ):
            if kind == "views":
                store_views(views, 8, Ranks(backend, ranks))
            else:
                open_pixel_store(
                    section,
                    (source, Pictures([(90, 50)] * 4)),
                    chosen.run.folder,
                    Ranks(backend, ranks),
                )


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 1), (4, 0)])
def test_the_ranks_of_a_host_share_its_cores(chosen, monkeypatch, ranks, workers):
    """A CPU's rank has a worker if it has more than two cores."""
    monkeypatch.setattr("kd.setup.data.cores", lambda: 8)
    assert (
        workers_of(
            replace(chosen.data, workers="auto"),
            Ranks(build_backend(chosen.backend), ranks),
        )
        == workers
    )


def test_the_line_says_what_it_takes_and_what_is_there(chosen, tmp_path, caplog):
    """Of an image of 90 x 50 that shrinks to 16 px and crops of 0.35, 975 pixels are
    kept: a page; of 4 the crop.
    """
    caplog.set_level("INFO", "kd")
    source = Pictures([(90, 50)] * 100)
    train = stored(chosen, "disk", source)
    assert caplog.messages[-1].startswith(
        f"store: about 0.4 MiB of decoded images below '{tmp_path / 'runs'}/stores'"
    )
    assert caplog.messages[-1].endswith("0.0 MiB already stored")
    for id in range(100):
        train.decode(id)
    stored(chosen, "disk", source)
    assert caplog.messages[-1].endswith("0.4 MiB already stored")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(RunError, match=r"data\.store: cannot write '.*store.*'"):
        opened("disk", tmp_path, 3, 100)


class Sets(Pictures):
    """The same, of several labels an image."""

    def label(self, id: int) -> np.ndarray:
        return np.array([id % 2, 1 - id % 2, id == 3], np.int8)


def samples(dataset, workers: int, epochs: int = 4, views: int = 2) -> list:
    plan = Plan(torch.arange(len(dataset)), torch.ones(len(dataset)))
    loader = LocalLoader(dataset, Share(4, 1, 0, 1), workers)
    return [
        batch for epoch in range(epochs) for batch in loader.epoch(plan, epoch % views)
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "mixing", [None, MixupCutmix(0.8, 1.0, 0.7)], ids=["plain", "mixed"]
)
@pytest.mark.parametrize("kind", [Pictures, Sets])
def test_stored_views_are_those_that_are_made(kind, mixing, workers):
    """Pixels, labels, weights and checksums; each view is made once, whoever
    makes it.
    """
    live, backing = (
        Views(
            kind([(40, 30), (20, 60)], length=12),
            TrainTransform(16, 0.35, 0.5, 0.3),
            16,
            7,
            mixing,
        )
        for _ in "ab"
    )
    stored = StoredViews(backing, 2)
    for first, second in zip(
        samples(live, workers), samples(stored, workers), strict=True
    ):
        for name in ("ids", "image", "label", "partner_label", "lam", "weight"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
        assert (first.crc, first.view) == (second.crc, second.view)
    if not workers:
        assert (stored.spent.decoding > 0, live.source.decoded) == (
            True,
            2 * backing.source.decoded,
        )
    before = backing.source.decoded
    for view in (0, 1, 2, 2):  # the third one is not kept
        stored.load(0, view)
    assert backing.source.decoded - before >= 2
    assert mixing or backing.source.decoded - before == 2


def test_a_partial_stored_view_is_made_again_and_a_corrupt_image_decoded_each_time():
    views = Views(
        Pictures([(40, 30)], broken=True, length=4),
        TrainTransform(16, 0.35, 0.5, 0.3),
        16,
        7,
        on_corrupt="skip",
    )
    stored = StoredViews(views, 1)
    assert [stored.load(3, 0).readable for _ in range(2)] == [False, False]
    first = stored.load(1, 0).pixels
    decoded = views.source.decoded
    os.pwrite(stored.records._file, b"x", stored.records.stride + 100)
    assert torch.equal(stored.load(1, 0).pixels, first)
    assert views.source.decoded == decoded + 1
    assert stored.spent.minus(Loading()) == views.spent


def test_stored_views_need_room_and_views_that_repeat(chosen, caplog):
    backend = build_backend(chosen.backend)
    views = Views(
        Pictures([(40, 30)], length=10**9), TrainTransform(64, 0.35, 0.5, 0.3), 64, 7
    )
    with pytest.raises(
        RunError,
        match=(
            r"^data\.store: is views, and 900 views of 1000000000 .* GiB of memory are"
            r" left"
        ),
    ):
        store_views(views, 900, backend)
    with caplog.at_level("INFO", "kd"):
        store_views(
            Views(Pictures([(40, 30)]), TrainTransform(64, 0.35, 0.5, 0.3), 64, 7),
            8,
            backend,
        )
    assert (
        "0.1 MiB of views in memory, once all 8 of each image are made" in caplog.text
    )
    with pytest.raises(
        ConfigError, match=r"^data\.store: is views, but no view is shown twice"
    ):
        config.load(
            {"data": {"kind": "imagefolder", "root": "x"}},
            ["data.store=views", "student.model=resnet18"],
        )
