"""Hugging Face datasets: saved tables, local folders, columns found or named, the hub
out of reach.
"""

import os
import sys

import pytest
from pieces import labels, png

from kd.core.errors import DataError, MissingExtra
from kd.parts.datasets.hf import Options, build, facts

hub = pytest.importorskip("datasets", reason="the extra hf is not installed")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(hub.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(labels: list, label=None, **columns_by_name):
    features = {
        "image": hub.Image(),
        "label": label or hub.ClassLabel(names=["pear", "apple"]),
    }
    columns = {
        "image": [{"bytes": png(id), "path": None} for id in range(len(labels))],
        "label": labels,
    }
    for name, (values, feature) in columns_by_name.items():
        columns[name] = values
        features[name] = feature
    return hub.Dataset.from_dict(columns, features=hub.Features(features))


def save(path, **splits) -> Options:
    hub.DatasetDict(splits).save_to_disk(str(path))
    return Options(path=str(path))


def test_a_test_split_is_read(tmp_path):
    save(tmp_path / "d", train=table([0, 1] * 5), exam=table([1, 0, 0]))
    chosen = Options(path=str(tmp_path / "d"), val_fraction=0.2, test_split="exam")
    test = build(chosen, "test", ("pear", "apple"))
    assert (test.name(0), labels(test), facts(chosen).test) == (
        "exam[0]",
        [1, 0, 0],
        "test_split",
    )
    with pytest.raises(DataError, match=r"data\.test_split: .* has no split 'exams'"):
        build(
            Options(path=str(tmp_path / "d"), val_fraction=0.2, test_split="exams"),
            "test",
            ("pear", "apple"),
        )
    with pytest.raises(ValueError, match="another split than train_split"):
        Options(path="d", val_fraction=0.2, test_split="train")


def test_the_stamp_is_made_of_the_times_of_the_files(tmp_path):
    """Of the table where it holds the images, of each image's own file where it names
    them.
    """
    chosen = save(tmp_path / "d", train=table([0, 1, 1]))
    before = build(chosen, "train", None)
    for file in (tmp_path / "d" / "train").glob("*.arrow"):
        os.utime(file, ns=(1, 1))
    after = build(chosen, "train", None)
    assert after.fingerprint == before.fingerprint
    assert [after.stamp(id) != before.stamp(id) for id in range(3)] == [True] * 3
    for name in ("train/a/1.png", "train/b/2.png", "validation/a/3.png"):
        (tmp_path / "named" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "named" / name).write_bytes(png(3))
    before = build(Options(path=str(tmp_path / "named")), "train", None)
    os.utime(tmp_path / "named" / "train" / "b" / "2.png", ns=(1, 1))
    after = build(Options(path=str(tmp_path / "named")), "train", None)
    assert [after.stamp(id) != before.stamp(id) for id in range(2)] == [False, True]


def test_a_file_that_was_replaced_and_keeps_its_time_is_read_anew(tmp_path):
    """The loader's own copy of the rows is found again by mtime alone."""
    file = tmp_path / "d" / "train-0.parquet"
    file.parent.mkdir()
    table([0, 1, 1]).to_parquet(str(file))
    chosen = Options(path=str(file.parent), val_split="train", val_fraction=0.5)
    before = build(chosen, "train", None)
    times = file.stat()
    rows = [png(9), png(8), png(7)]
    hub.Dataset.from_dict(
        {"image": [{"bytes": row, "path": None} for row in rows], "label": [0, 1, 1]},
        features=table([0]).features,
    ).to_parquet(str(file))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = build(chosen, "train", None)
    contents = (
        [before.encoded(id) for id in range(len(before))],
        [after.encoded(id) for id in range(len(after))],
    )
    assert {*contents[0]} <= {png(0), png(1), png(2)}
    assert {*contents[1]} <= {*rows}
    prepared = [
        cache_file["filename"] for cache_file in after.storage._table.cache_files
    ]
    times = [os.stat(cache_file).st_mtime_ns for cache_file in prepared]
    again = build(chosen, "train", None)
    assert [
        os.stat(cache_file["filename"]).st_mtime_ns
        for cache_file in again.storage._table.cache_files
    ] == times  # copied once


def test_one_saved_table_is_the_training_split(tmp_path):
    table([0, 1]).save_to_disk(str(tmp_path / "d"))
    assert len(build(Options(path=str(tmp_path / "d")), "train", None)) == 2


def test_a_selection_keeps_its_rows(tmp_path):
    save(tmp_path / "d", train=table([0, 1, 0, 1]).select([3, 0]))
    source = build(Options(path=str(tmp_path / "d")), "train", None)
    assert [source.decode(id).image.getpixel((0, 0))[0] for id in (0, 1)] == [3, 0]
    assert labels(source) == [1, 0]


def test_a_local_folder_of_images_is_read(tmp_path):
    for split in ("train", "validation"):
        for color, name in enumerate(("apple", "pear")):
            path = tmp_path / "d" / split / name / "1.png"
            path.parent.mkdir(parents=True)
            path.write_bytes(png(color))
    train = build(Options(path=str(tmp_path / "d")), "train", None)
    assert train.classes == ("apple", "pear")
    assert [train.decode(id).image.getpixel((0, 0))[0] for id in (0, 1)] == [0, 1]
    (tmp_path / "d/train/apple/1.png").unlink()
    with pytest.raises(
        DataError, match=r"image 'train\[0\]' \(1\.png\): it cannot be read"
    ):
        train.decode(0)


def test_text_labels_need_the_name_of_their_column(tmp_path):
    (tmp_path / "d").mkdir()
    table(["pear", "fig"], hub.Value("string")).to_parquet(
        str(tmp_path / "d/train.parquet")
    )
    with pytest.raises(
        DataError,
        match=(
            r"data\.label_key: no class-label column. Columns: image, label. Set data"
        ),
    ):
        build(Options(path=str(tmp_path / "d")), "train", None)
    source = build(Options(path=str(tmp_path / "d"), label_key="label"), "train", None)
    assert (source.classes, labels(source)) == (("fig", "pear"), [1, 0])


def test_integer_labels_count_up_to_the_largest(tmp_path):
    chosen = save(tmp_path / "d", train=table([2, 0], hub.Value("int64")))
    source = build(Options(path=chosen.path, label_key="label"), "train", None)
    assert (source.classes, labels(source)) == (("0", "1", "2"), [2, 0])


def test_val_may_order_the_classes_differently_but_not_have_others(tmp_path):
    other_classes = hub.ClassLabel(names=["apple", "pear"])
    chosen = save(
        tmp_path / "d", train=table([0, 1]), validation=table([0, 1], other_classes)
    )
    assert labels(build(chosen, "val", ("pear", "apple"))) == [1, 0]
    with pytest.raises(
        DataError, match="the split 'val' has the class 'apple', which is not among"
    ):
        build(chosen, "val", ("pear", "fig"))


def test_an_absent_split_is_named(tmp_path):
    chosen = save(tmp_path / "d", train=table([0, 1]), valid=table([1]))
    with pytest.raises(
        DataError,
        match=(
            r"data\.val_split: '.*' has no split 'validation'. Allowed: train, valid."
            r" Did you mean 'valid'"
        ),
    ):
        build(chosen, "val", ("pear", "apple"))
    chosen = save(tmp_path / "e", train=table([0, 1]))
    with pytest.raises(
        DataError, match=r"Allowed: train. Choose one, or set data\.val_fraction=0\.1"
    ):
        build(chosen, "val", ("pear", "apple"))


def test_columns_that_are_not_clear_must_be_named(tmp_path):
    coarse = ([0, 0], hub.ClassLabel(names=["fruit"]))
    note = ([0.5, 1.5], hub.Value("float64"))
    path = save(tmp_path / "d", train=table([0, 1], coarse=coarse, note=note)).path
    with pytest.raises(
        DataError, match=r"data\.label_key: several class-label columns: label, coarse"
    ):
        build(Options(path=path), "train", None)
    assert build(
        Options(path=path, label_key="label", image_key="image"), "train", None
    ).classes == ("pear", "apple")
    with pytest.raises(
        DataError,
        match=(
            r"data\.label_key: there is no column 'labl'. .* coarse, note. Did you mean"
            r" 'label'"
        ),
    ):
        build(Options(path=path, label_key="labl"), "train", None)
    with pytest.raises(
        DataError,
        match=r"data\.label_key: 2 labels are numbers with a fraction, such as 0\.5",
    ):
        build(Options(path=path, label_key="note"), "train", None)
    with pytest.raises(
        DataError,
        match=(
            r"data\.image_key: the column 'note' does not hold images. Allowed: image"
        ),
    ):
        build(Options(path=path, label_key="label", image_key="note"), "train", None)


def test_a_column_of_bytes_may_hold_the_images(tmp_path):
    features = hub.Features(
        {"data": hub.Value("binary"), "label": hub.ClassLabel(names=["a", "b"])}
    )
    path = save(
        tmp_path / "d",
        train=hub.Dataset.from_dict(
            {"data": [png(7), png(8)], "label": [0, 1]}, features
        ),
    ).path
    with pytest.raises(
        DataError, match=r"data\.image_key: no image column. Columns: data, label"
    ):
        build(Options(path=path), "train", None)
    assert build(Options(path=path, image_key="data"), "train", None).decode(
        1
    ).image.getpixel((0, 0)) == (8, 0, 0)


def test_corrupt_and_absent_images_are_named(tmp_path):
    broken = table([0, 1, 0]).map(
        lambda row, id: {
            "image": [
                {"bytes": b"text", "path": None},
                None,
                {"bytes": png(1)[:50], "path": None},
            ][id]
        },
        with_indices=True,
        features=table([0]).features,
    )
    source = build(save(tmp_path / "d", train=broken), "train", None)
    for id, message in enumerate(
        ("it is not an image", "the row holds no image", "the image is truncated")
    ):
        with pytest.raises(
            DataError, match=rf"^data\.path: image 'train\[{id}\]': {message}"
        ):
            source.decode(id)


@pytest.mark.parametrize("value", [-1, None])
def test_an_unlabelled_row_is_refused(tmp_path, value):
    chosen = save(tmp_path / "d", train=table([0, 1, value]))
    with pytest.raises(
        DataError, match=r"data\.label_key: row 2 has no label in the column 'label'"
    ):
        build(chosen, "train", None)


def test_a_folder_that_is_not_there_and_a_hub_out_of_reach_are_one_line(tmp_path):
    with pytest.raises(
        DataError, match=r"data\.path: the folder '.*nowhere' does not exist"
    ):
        build(Options(path=str(tmp_path / "nowhere")), "train", None)
    with pytest.raises(
        DataError, match=r"data\.path: 'nobody/nothing-here' cannot be loaded \("
    ) as caught:
        build(Options(path="nobody/nothing-here"), "train", None)
    assert "\n" not in str(caught.value)
    assert "the network" in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        MissingExtra, match=r"data\.kind: .*Run: pip install 'PATH/kd\[hf\]'"
    ):
        build(Options(path="x"), "train", None)


def test_a_package_that_it_needs_is_named(monkeypatch):
    """The package itself is installed: to say that it is missing would send people the
    wrong way.
    """

    def lacks(name):
        raise ModuleNotFoundError("No module named 'dill'", name="dill")

    monkeypatch.setattr("importlib.import_module", lacks)
    with pytest.raises(ModuleNotFoundError, match="dill"):
        build(Options(path="x"), "train", None)


def test_lists_of_labels_are_named_with_what_to_do(tmp_path):
    lists = ([[0], [0, 1], []], hub.Sequence(hub.ClassLabel(names=["pear", "apple"])))
    chosen = save(
        tmp_path / "d",
        train=table([0, 1, -1], several=lists),
        validation=table([0, 1, 0], several=lists),
    )
    with pytest.raises(
        DataError, match=r"column 'several' holds lists of labels.* data\.label_keys"
    ):
        build(Options(path=chosen.path, label_key="several"), "train", None)
    with pytest.raises(
        DataError, match=r"row 2 has no label in the column 'label' .*data\.labels=some"
    ):
        build(Options(path=chosen.path, label_key="label"), "train", None)
