"""Listings as columns: names, labels, stamps, fingerprints and held-out images are
those of plain lists.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pieces import write_tar

from kd.core.contracts import Source, Stamped
from kd.parts import registry
from kd.setup.data import Data
from kd.setup.data_plan import DataPlan

CLASSES = (
    "a",
    "a-b",
    "a.b",
    "a/b",
    "a/b-c",
    "ab",
    "Ä",
    "b",
)  # "-" and "." stand before "/", letters behind it
COUNTS = (3, 5, 2, 140, 1, 4, 2, 6)  # more names than one block has


def tree(root: Path) -> list[str]:
    """Write files below `root` and return their paths, by their bytes; sizes differ,
    nothing is decoded.
    """
    names = []
    for number, (folder, count) in enumerate(zip(CLASSES, COUNTS, strict=True)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for image in range(count):
            names.append(
                f"{folder}/{'b-' * (image % 2)}{image * 37 % 100 + 100 * (image > 99)}.jpg"
            )
            (root / names[-1]).write_bytes(b"x" * (10 * number + image + 1))
    assert len({*names}) == sum(COUNTS)
    return sorted(names, key=os.fsencode)


def hashed(
    classes: Sequence[str], names: bytes, labels: Sequence[int], sizes: Sequence[int]
) -> str:
    """The fingerprint as it was written first: four byte strings, each after its
    length.
    """
    digest = hashlib.sha256()
    for field in (
        "\0".join(classes).encode(),
        names,
        np.array(labels, "<i4").tobytes(),
        np.array(sizes, "<i8").tobytes(),
    ):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.hexdigest()


def held_out(keys: Sequence[str], labels: Sequence[int], fraction: float) -> set[str]:
    """The rule in plain Python: of each class, those whose keys have the smallest
    hashes.
    """
    chosen = set()
    for label in {*labels}:
        of_class = [
            key
            for key, label_of_key in zip(keys, labels, strict=True)
            if label_of_key == label
        ]
        of_class.sort(
            key=lambda key: hashlib.blake2b(key.encode(), digest_size=8).digest()
        )
        if len(of_class) > 1:
            chosen |= {
                *of_class[
                    : min(
                        max(int(fraction * len(of_class) + 0.5), 1), len(of_class) - 1
                    )
                ]
            }
    return chosen


def built(kind: str, split: str, labels: str = "all", **options: object) -> Source:
    parsed_options = registry.options_type("datasets", kind, "data.kind")(**options)
    return registry.build(
        "datasets",
        kind,
        parsed_options,
        "data.kind",
        split=split,
        classes=None,
        labels=labels,
    )


def check(
    source: Source,
    root: Path,
    names: Sequence[str],
    labels: Sequence[int],
    classes: Sequence[str],
) -> None:
    ids = range(len(names))
    assert [source.name(id) for id in ids] == [*names]
    assert [source.name(id) for id in reversed(ids)] == [*names][::-1]
    assert [source.label(id) for id in ids] == [*labels]
    assert tuple(source.classes) == tuple(classes)
    assert isinstance(source, Stamped)
    status = [os.stat(root / name) for name in names]
    assert [source.stamp(id) for id in ids] == [
        (s.st_mtime_ns + 3 * s.st_ctime_ns) % 2**64 for s in status
    ]
    joined = "\0".join(names).encode()
    assert source.fingerprint == hashed(
        classes, joined, labels, [file_status.st_size for file_status in status]
    )
    data = Data(DataPlan(kind="food_mini"), source, source)
    assert torch.equal(data.labels(), torch.tensor(labels))
    assert data.labels().dtype == torch.int64


@pytest.mark.parametrize("labels", ["all", "some", "none"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_listing_of_a_folder_is_as_defined(tmp_path, labels, split):
    names = tree(tmp_path)
    folders = [name.rpartition("/")[0] for name in names]
    unlabelled = "a/b"
    none = {"all": set[str](), "some": {unlabelled}, "none": {*folders}}[labels]
    classes = sorted({*folders} - none)
    positions = [-1 if folder in none else classes.index(folder) for folder in folders]
    held_out_names = held_out(names, positions, 0.2)
    chosen = [
        id
        for id, name in enumerate(names)
        if (name in held_out_names) == (split == "val")
    ]
    source = built(
        "imagefolder",
        split,
        labels,
        root=str(tmp_path),
        val_fraction=0.2,
        unlabelled=unlabelled,
    )
    check(
        source,
        tmp_path,
        [names[id] for id in chosen],
        [positions[id] for id in chosen],
        classes,
    )


@pytest.mark.parametrize("kind", ["csv", "txt"])
def test_the_listing_of_a_list_is_as_defined(tmp_path, kind):
    names = tree(tmp_path / "photos")
    folders = [name.rpartition("/")[0] for name in names]
    lines = [
        f"{name},{folder}" if kind == "csv" else name
        for name, folder in zip(names, folders, strict=True)
    ]
    head = ["path,label"] if kind == "csv" else []
    (tmp_path / f"list.{kind}").write_text(
        "\n".join([*head, *lines[::-1]]), encoding="utf-8"
    )
    classes = sorted({*folders})
    positions = [classes.index(folder) for folder in folders]
    held_out_names = held_out(names, positions, 0.3)
    for split in ("train", "val"):
        chosen = [
            id
            for id, name in enumerate(names)
            if (name in held_out_names) == (split == "val")
        ]
        root = tmp_path / "photos"
        source = built(
            "csv", split, root=str(root), train_list=f"../list.{kind}", val_fraction=0.3
        )
        check(
            source,
            root,
            [names[id] for id in chosen],
            [positions[id] for id in chosen],
            classes,
        )


def test_the_listing_of_label_sets_is_as_defined(tmp_path):
    names = tree(tmp_path / "photos")
    rows = [["rice"] * (id % 2) + ["egg"] * (id % 3 == 0) for id in range(len(names))]
    lines = [f"{name},{'|'.join(row)}" for name, row in zip(names, rows, strict=True)]
    (tmp_path / "list.csv").write_text(
        "\n".join(["file,labels", *lines]), encoding="utf-8"
    )
    options = {
        "root": str(tmp_path / "photos"),
        "train_labels": "../list.csv",
        "val_fraction": 0.3,
    }
    source = built("multilabel", "train", **options)
    held_out_names = held_out(names, [0] * len(names), 0.3)
    chosen = [id for id, name in enumerate(names) if name not in held_out_names]
    sets = [[int(label in rows[id]) for label in ("egg", "rice")] for id in chosen]
    assert [source.name(id) for id in range(len(source))] == [
        names[id] for id in chosen
    ]
    sizes = [os.stat(tmp_path / "photos" / names[id]).st_size for id in chosen]
    joined = "\0".join(names[id] for id in chosen).encode()
    assert source.fingerprint == hashed(
        ("egg", "rice"), joined, [label for row in sets for label in row], sizes
    )
    labels = Data(DataPlan(kind="food_mini"), source, source).labels()
    assert labels.dtype == torch.int8
    assert labels.tolist() == sets


@pytest.mark.parametrize("written", [("fig", "pear", "apple"), ("2", "0", "7")])
def test_the_listing_of_shards_is_as_defined(tmp_path, written):
    names = []
    positions = []
    sizes = []
    integers = written[0].isdecimal()
    classes = [str(value) for value in range(8)] if integers else sorted(written)
    for shard in range(3):
        members = {}
        for number in range(60):
            label = written[(number + shard) % 3]
            names.append(f"t-{shard}.tar/{number:04d}")
            positions.append(classes.index(label))
            sizes.append(number + shard + 1)
            members |= {
                f"{number:04d}.jpg": b"x" * sizes[-1],
                f"{number:04d}.cls": label.encode(),
            }
        write_tar(tmp_path / f"t-{shard}.tar", members)
    pattern = str(tmp_path / "t-{0..2}.tar")
    source = built("webdataset", "train", train=pattern, val=pattern)
    assert [source.name(id) for id in range(len(source))] == names
    assert [source.label(id) for id in range(len(source))] == positions
    assert source.fingerprint == hashed(
        classes, "\0".join(names).encode(), positions, sizes
    )
    assert isinstance(source, Stamped)
    assert {source.stamp(id) for id in range(60, 120)} == {source.stamp(60)}


def test_the_listing_of_a_table_is_as_defined(tmp_path):
    datasets = pytest.importorskip("datasets")
    labels = [f"class {id * 7 % 5}" for id in range(300)]
    cells = [{"bytes": b"x" * (id + 1), "path": None} for id in range(300)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Value("string")}
    )
    table = datasets.Dataset.from_dict(
        {"image": cells, "label": labels}, features=features
    )
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "table"))
    classes = sorted({*labels})
    positions = [classes.index(label) for label in labels]
    held_out_rows = held_out([str(id) for id in range(300)], positions, 0.2)
    for split in ("train", "val"):
        rows = [
            id for id in range(300) if (str(id) in held_out_rows) == (split == "val")
        ]
        options = {
            "path": str(tmp_path / "table"),
            "label_key": "label",
            "val_fraction": 0.2,
        }
        source = built("hf", split, **options)
        assert [source.name(id) for id in range(len(source))] == [
            f"train[{row}]" for row in rows
        ]
        expected = hashed(
            classes,
            np.array(rows, "<i8").tobytes(),
            [positions[row] for row in rows],
            [row + 1 for row in rows],
        )
        assert source.fingerprint == expected
