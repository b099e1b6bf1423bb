"""The painted dishes: same seed, same bits; whole or absent; noise only where it is
asked for.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kd.core.errors import DataError
from kd.parts.datasets import food_mini
from kd.parts.datasets._dishes import main as paint_share
from kd.parts.datasets._dishes import render
from kd.parts.datasets.food_mini import (
    FoodMini,
    Options,
    build,
    folder_name,
    list_images,
)


def small(root: Path, **changes: object) -> Options:
    return Options(
        **{
            "root": str(root),
            "train_images": 2,
            "val_images": 1,
            "pixels": 32,
            **changes,
        }
    )  # type: ignore


def files(source: FoodMini) -> dict[str, bytes]:
    return {
        str(path.relative_to(source.folder)): path.read_bytes()
        for path in source.folder.rglob("*.jpg")
    }


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> FoodMini:
    source = build(small(tmp_path_factory.mktemp("food")), "train", None)
    source.prepare()
    return source


def test_listing_needs_no_files_and_painting_makes_them_all(
    tmp_path: Path, painted: FoodMini
):
    source = build(small(tmp_path), "train", None)
    assert len(source) == 24
    assert len(source.classes) == 12
    assert not list(tmp_path.iterdir())
    assert source.fingerprint == painted.fingerprint
    assert len(files(painted)) == 36
    for id in range(len(painted)):
        image = painted.decode(id).image
        assert (image.mode, image.size) == ("RGB", (32, 32))
        assert painted.classes[painted.label(id)] == Path(painted.name(id)).parent.name


def test_pictures_do_not_depend_on_the_number_of_painters(
    tmp_path: Path, painted: FoodMini
):
    listed = {split: list_images(painted.options, split) for split in ("train", "val")}
    work = {"folder": str(tmp_path / "one"), "seed": 0, "size": 32, "pictures": listed}
    (tmp_path / "work.json").write_text(json.dumps(work))
    paint_share(tmp_path / "work.json", painters=1, number=0)
    alone = {
        str(p.relative_to(tmp_path / "one")): p.read_bytes()
        for p in (tmp_path / "one").rglob("*.jpg")
    }
    assert alone == files(painted)


def test_pictures_differ_within_a_dish_and_with_the_seed(
    tmp_path: Path, painted: FoodMini
):
    assert len(set(files(painted).values())) == 36
    reseeded = build(small(tmp_path, art_seed=1), "train", None)
    reseeded.prepare()
    assert not set(files(reseeded).values()) & set(files(painted).values())
    assert reseeded.fingerprint != painted.fingerprint


def test_other_settings_get_another_folder(tmp_path: Path):
    settings = [
        {},
        {"art_seed": 1},
        {"pixels": 48},
        {"train_images": 3},
        {"val_images": 2},
        {"label_noise": 0.5},
    ]
    settings += [{"redundancy": 2}, {"imbalance": 2}]
    assert len(
        {folder_name(small(tmp_path, **changes)) for changes in settings}
    ) == len(settings)
    assert folder_name(small(tmp_path / "elsewhere")) == folder_name(small(tmp_path))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
def test_label_noise_is_exact_in_training_and_absent_in_validation(
    tmp_path: Path, noise: float
):
    options = small(tmp_path, train_images=40, label_noise=noise)
    classes = build(options, "train", None).classes
    for split, expected in (("train", noise), ("val", 0.0)):
        listed = list_images(options, split)
        wrong = [dish for label, dish, *_ in listed if classes[label] != dish]
        assert len(wrong) == round(expected * len(listed))
        assert len({(dish, plate) for _, dish, plate, _ in listed}) == len(listed)


def test_sizes_fall_geometrically_and_large_classes_repeat_their_plates(tmp_path: Path):
    options = small(
        tmp_path, train_images=100, val_images=3, imbalance=10, redundancy=4
    )
    listed = list_images(options, "train")
    sizes = Counter(label for label, *_ in listed)
    plates = Counter(label for label, _, plate, shot in listed if shot == 0)
    assert [sizes[label] for label in range(12)] == [
        round(100 * 10 ** (-label / 11)) for label in range(12)
    ]
    assert [plates[label] for label in range(12)] == [
        min(25, sizes[label]) for label in range(12)
    ]
    assert len(set(listed)) == len(listed)
    assert Counter(label for label, *_ in list_images(options, "val")) == dict.fromkeys(
        range(12), 3
    )


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        build(Options(root="~/food"), "train", None).folder.parent == tmp_path / "food"
    )


def test_an_interrupted_painting_is_not_taken_for_whole(
    tmp_path: Path, painted: FoodMini
):
    source = build(small(tmp_path), "train", None)
    torn = source.folder / "train" / "pizza"
    torn.mkdir(parents=True)
    (torn / "pizza_0000.jpg").write_bytes(b"torn")
    source.prepare()
    assert files(source) == files(painted)


def test_a_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        DataError, match=r"^data.root: cannot paint into .*Free space or set data.root"
    ):
        build(small(tmp_path / "file"), "train", None).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failing_painter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        food_mini, "list_images", lambda options, split: [(0, "no such dish", 0, 0)]
    )
    with pytest.raises(DataError, match="no such dish"):
        food_mini.paint(small(tmp_path), tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_a_tray_has_one_dish_or_several_and_a_set_of_labels(tmp_path: Path):
    source = build(small(tmp_path, dishes=3, label_noise=0.5), "train", None)
    assert (
        folder_name(small(tmp_path, dishes=1))
        == folder_name(small(tmp_path))
        != source.folder.name
    )
    counts = set()
    for id, (label, dish, *_) in enumerate(list_images(source.options, "train")):
        dishes = {
            source.classes[position] for position in np.flatnonzero(source.label(id))
        }
        assert dishes == {source.classes[label], *dish.split("+")[1:]}
        # Also where the first label is wrong.
        assert len(dishes) == len(dish.split("+"))
        counts.add(len(dishes))
    assert counts == {1, 2, 3}
    tray = render("pizza+sushi", "train", 0, 0, 64)
    assert tray.size == (64, 64)
    assert tray.tobytes() == render("pizza+sushi", "train", 0, 0, 64).tobytes()
    assert tray.tobytes() != render("pizza", "train", 0, 0, 64).tobytes()
