"""`data.group`: what belongs together is in one split, chosen by the hash of the group;
without it nothing changes.
"""

import hashlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from pieces import names, png
from PIL import Image

from kd import config
from kd.core.errors import DataError
from kd.parts import registry
from kd.setup.data import Data, open_sources
from kd.setup.recipe import resolve

CLASSES = ("apple", "fig")
CLIPS = 10
FRAMES = 8
"""Of each class."""


def clip_of(name: str) -> str:
    return name.rpartition("_")[0].rpartition("/")[2]


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    """Folders `apple` and `fig` of frames `CLIP_0001.jpg`, and tables that name the
    clip of each frame.
    """
    root = tmp_path_factory.mktemp("clips")
    rows = ["path,label,clip"]
    for label, name in enumerate(CLASSES):
        (root / name).mkdir()
        for clip in range(CLIPS):
            for frame in range(FRAMES):
                path = f"{name}/clip{label}{clip}_{frame:04d}.jpg"
                Image.new("RGB", (8, 8), (clip * 20, frame * 20, label * 99)).save(
                    root / path
                )
                rows.append(f"{path},{name},clip{label}{clip}")
    (root / "all.csv").write_text("\n".join(rows))
    (root / "sets.csv").write_text(
        "\n".join(["file,labels", *(row.rpartition(",")[0] for row in rows[1:])])
    )
    return root


def opened(root: Path, kind: str, **keys: object) -> Data:
    data = {"kind": kind, "root": str(root), "image_size": 8, "batch_size": 2, **keys}
    section = {
        "run": {"name": "a"},
        "data": data,
        "losses": [{"kind": "bce" if kind == "multilabel" else "ce"}],
    }
    return open_sources(
        resolve(
            config.load({**section, "student": {"model": "vit_tiny_patch16_224"}})
        ).data
    )


def expected(fraction: float) -> set[str]:
    """Return the clips that are held out: of each class those whose names have the
    smallest hashes.
    """
    held_out = set()
    for label in range(len(CLASSES)):
        clips_of_label = [f"clip{label}{clip}" for clip in range(CLIPS)]
        ranked = sorted(
            clips_of_label,
            key=lambda clip: hashlib.blake2b(clip.encode(), digest_size=8).digest(),
        )
        held_out |= {*ranked[: round(fraction * CLIPS)]}
    return held_out


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("imagefolder", {"group": r"([^/]*)_\d+\.jpg"}),
        ("csv", {"train_list": "all.csv", "group": "clip"}),
        ("csv", {"train_list": "all.csv", "group": r"([^/]*)_"}),
    ],
)
def test_all_frames_of_a_clip_are_in_one_split(clips, kind, keys):
    data = opened(clips, kind, val_fraction=0.3, **keys)
    train, val = (
        {clip_of(name) for name in names(source)} for source in (data.train, data.val)
    )
    assert val == expected(0.3)
    assert train | val == {
        f"clip{label}{clip}" for label in range(2) for clip in range(CLIPS)
    }
    assert not train & val
    assert (len(data.train), len(data.val)) == (112, 48)
    assert not [note for note in data.notes if note.startswith("data.group")]


def test_images_with_label_sets_are_grouped_and_a_folder_may_be_the_group(
    clips, tmp_path
):
    """Without classes the clips are ranked together; a file's folder may be
    its group.
    """
    data = opened(
        clips,
        "multilabel",
        train_labels="sets.csv",
        val_fraction=0.25,
        group=r"([^/]*)_",
    )
    train, val = (
        {clip_of(name) for name in names(source)} for source in (data.train, data.val)
    )
    assert (len(val), train & val) == (5, set())
    rows = ["path,label"]
    for plate in range(6):
        (tmp_path / f"plate{plate}").mkdir()
        for cell in range(4):
            (tmp_path / f"plate{plate}" / f"{cell}.png").write_bytes(
                png(plate * 9 + cell)
            )
            rows.append(f"plate{plate}/{cell}.png,{CLASSES[plate % 2]}")
    (tmp_path / "all.csv").write_text("\n".join(rows))
    data = opened(
        tmp_path, "csv", train_list="all.csv", val_fraction=0.34, group="parent"
    )
    plates = [
        {name.partition("/")[0] for name in names(source)}
        for source in (data.train, data.val)
    ]
    assert [len(paths) for paths in plates] == [4, 2]
    assert not plates[0] & plates[1]


def test_rows_of_a_table_are_grouped_by_a_column(tmp_path):
    hub = pytest.importorskip("datasets", reason="the extra hf is not installed")
    count = 60
    columns = {
        "image": [{"bytes": png(id), "path": None} for id in range(count)],
        "label": [id % 2 for id in range(count)],
        "patient": [id // 6 for id in range(count)],
    }
    features = {
        "image": hub.Image(),
        "label": hub.ClassLabel(names=list(CLASSES)),
        "patient": hub.Value("int64"),
    }
    dataset = hub.Dataset.from_dict(columns, features=hub.Features(features))
    hub.DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "t"))
    options = registry.options_type("datasets", "hf", "data")(
        path=str(tmp_path / "t"), val_fraction=0.3, group="patient"
    )
    module = registry.find("datasets", "hf", "data.kind")
    train = module.build(options, "train", None)
    val = module.build(options, "val", train.classes)
    rows = [[int(name[6:-1]) for name in names(source)] for source in (train, val)]
    assert sorted(rows[0] + rows[1]) == list(range(count))
    assert not {row // 6 for row in rows[0]} & {row // 6 for row in rows[1]}
    assert len(val) == 18
    absent = registry.options_type("datasets", "hf", "data")(
        path=str(tmp_path / "t"), val_fraction=0.3, group="clip"
    )
    with pytest.raises(DataError, match=r"data\.group: there is no column 'clip'"):
        module.build(absent, "train", None)


def test_a_test_split_that_is_set_aside_has_whole_groups(clips):
    data = opened(
        clips,
        "csv",
        train_list="all.csv",
        val_fraction=0.5,
        test_fraction=0.5,
        group="clip",
    )
    splits = [
        {clip_of(name) for name in names(source)} for source in data.splits.values()
    ]
    assert len(splits) == 3
    assert all(splits)
    assert sum(map(len, splits)) == len(set().union(*splits)) == 2 * CLIPS
    alone = opened(
        clips, "csv", train_list="all.csv", val_fraction=0.5, test_fraction=0.5
    )
    assert len(
        {clip_of(name) for source in alone.splits.values() for name in names(source)}
    ) < sum(
        len({clip_of(name) for name in names(source)})
        for source in alone.splits.values()
    )


def test_groups_in_two_given_splits_are_named(clips, tmp_path):
    rows = (clips / "all.csv").read_text().splitlines()
    for split, split_rows in {"train": rows[1::2], "val": rows[2::2]}.items():
        (tmp_path / f"{split}.csv").write_text("\n".join([rows[0], *split_rows]))
    lists = {
        f"{split}_list": str(tmp_path / f"{split}.csv") for split in ("train", "val")
    }
    data = opened(clips, "csv", **lists, group="clip")
    assert data.notes == [
        "data.group: 'clip00' and 19 more are in training and in another split"
    ]
    assert opened(clips, "csv", **lists).notes == []


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("csv", "clpi"),
        ("csv", "(clip"),
        ("imagefolder", "(.*)"),
        ("imagefolder", r"no(thing)\d"),
    ],
)
def test_a_rule_that_puts_nothing_together_is_refused(clips, kind, group):
    keys = {"train_list": "all.csv"} if kind == "csv" else {}
    with pytest.raises(
        DataError,
        match=(
            r"data\.group: .* puts no two training images into one group.*\. Allowed:"
            r" `parent`"
        ),
    ):
        opened(clips, kind, val_fraction=0.3, group=group, **keys)


@pytest.mark.parametrize("kind", ["imagefolder", "csv"])
def test_without_the_key_each_image_is_alone(clips, kind):
    """As before the key existed: of each class the images with the smallest hashes of
    their paths.
    """
    data = opened(
        clips,
        kind,
        val_fraction=0.1,
        **({"train_list": "all.csv"} if kind == "csv" else {}),
    )
    of_class = defaultdict(list)
    for path in (*names(data.train), *names(data.val)):
        of_class[path.partition("/")[0]].append(path)
    held_out = set()
    for paths in of_class.values():
        ranked = sorted(
            paths,
            key=lambda path: hashlib.blake2b(path.encode(), digest_size=8).digest(),
        )
        held_out |= {*ranked[: int(np.floor(0.1 * len(paths) + 0.5))]}
    assert {*names(data.val)} == held_out
