"""The contract `kd.core.contracts.Source`, tested on each file in `kd/datasets`.

A new dataset needs one line in `RECIPES`: a function that makes a little data of its
kind. The tests fail without it.
"""

import dataclasses
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pieces import write_tar
from PIL import Image

from kd.config import load
from kd.core.contracts import Source
from kd.core.errors import ConfigErrors, DataError
from kd.parts import registry

KINDS = registry.names("datasets")
TRAIN = ("pear", "apple", "apple", "fig")
VAL = ("fig", "pear")  # validation lacks a class
BROKEN = "fig"  # in the training split the image of this class is text


def jpeg(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 7, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def images(split: str) -> list[tuple[str, bytes]]:
    if split == "val":
        return [(name, jpeg(10 + id)) for id, name in enumerate(VAL)]
    return [
        (name, b"not an image" if name == BROKEN else jpeg(id))
        for id, name in enumerate(TRAIN)
    ]


def make_imagefolder(root: Path) -> dict[str, Any]:
    for split in ("train", "val"):
        for id, (name, data) in enumerate(images(split)):
            path = root / split / name / f"{id}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return {"root": str(root)}


def make_csv(root: Path, ending: str = "list") -> dict[str, Any]:
    for split in ("train", "val"):
        lines = ["path,label"]
        for id, (name, data) in enumerate(images(split)):
            (root / f"{split}-{id}.jpg").write_bytes(data)
            lines.append(f"{split}-{id}.jpg,{name}")
        (root / f"{split}.csv").write_text("\n".join(lines))
    return {
        "root": str(root),
        f"train_{ending}": "train.csv",
        f"val_{ending}": "val.csv",
    }


def make_multilabel(root: Path) -> dict[str, Any]:
    return make_csv(root, "labels")


def make_webdataset(root: Path) -> dict[str, Any]:
    for split in ("train", "val"):
        members: dict[str, bytes] = {}
        for id, (name, data) in enumerate(images(split)):
            members |= {f"{id}.jpg": data, f"{id}.cls": name.encode()}
        write_tar(root / f"{split}-0.tar", members)
    return {"train": str(root / "train-{0..0}.tar"), "val": str(root / "val-*.tar")}


def make_hf(root: Path) -> dict[str, Any]:
    hub = pytest.importorskip("datasets", reason="the extra hf is not installed")
    names = sorted(set(TRAIN))
    features = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=names)}
    )
    splits = {
        split: hub.Dataset.from_dict(
            {
                "image": [{"bytes": data, "path": None} for _, data in images(key)],
                "label": [names.index(name) for name, _ in images(key)],
            },
            features=features,
        )
        for split, key in (("train", "train"), ("validation", "val"))
    }
    hub.DatasetDict(splits).save_to_disk(str(root / "saved"))
    return {"path": str(root / "saved")}


def make_food_mini(root: Path) -> dict[str, Any]:
    return {"root": str(root), "train_images": 2, "val_images": 2}


RECIPES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "csv": make_csv,
    "food_mini": make_food_mini,
    "hf": make_hf,
    "imagefolder": make_imagefolder,
    "multilabel": make_multilabel,
    "webdataset": make_webdataset,
}
PAINTED = {"food_mini"}  # it renders its images, so none is broken


@dataclasses.dataclass
class Built:
    kind: str
    module: ModuleType
    train: Source
    val: Source
    again: Source
    """The training split of the same data in another folder."""


@pytest.fixture(scope="module", params=KINDS)
def built(request, tmp_path_factory) -> Built:
    kind = request.param
    if kind not in RECIPES:
        pytest.fail(
            f"no recipe for the dataset '{kind}': add a line to RECIPES in"
            f" {Path(__file__).name}"
        )
    module = importlib.import_module(f"kd.parts.datasets.{kind}")
    here = tmp_path_factory.mktemp("here")
    there = tmp_path_factory.mktemp("there")
    options = module.Options(**RECIPES[kind](here))
    train = module.build(options, "train", None)
    val = module.build(options, "val", train.classes)
    again = module.build(module.Options(**RECIPES[kind](there)), "train", None)
    listings = [listing(source) for source in (train, val, again)]
    for source in (train, val, again):
        source.prepare()
        source.prepare()  # a restarted run calls it again
    assert [listing(source) for source in (train, val, again)] == listings, (
        "listing must not need prepare()"
    )
    return Built(kind, module, train, val, again)


def listing(source: Source) -> tuple:
    return (
        source.fingerprint,
        [(source.name(id), named(source, id)) for id in range(len(source))],
    )


def named(source: Source, id: int) -> list[str]:
    """Return the names of an image's labels."""
    label = source.label(id)
    return [
        source.classes[index]
        for index in ([label] if isinstance(label, int) else np.flatnonzero(label))
    ]


def readable(built: Built) -> list[int]:
    source = built.train
    return [
        id
        for id in range(len(source))
        if built.kind in PAINTED or named(source, id) != [BROKEN]
    ]


def digest(source: Source, id: int) -> str:
    image = source.decode(id).image
    return hashlib.sha256(
        repr((image.mode, image.size)).encode() + image.tobytes()
    ).hexdigest()


def send_digests(end: Connection, source: Source, ids: list[int]) -> None:
    end.send(digests(source, ids))


def digests(source: Source, ids: list[int]) -> list[str]:
    return [digest(source, id) for id in ids]


def test_classes_are_several_unique_names_and_alike_in_both_splits(built):
    assert len(built.train.classes) == len(set(built.train.classes)) >= 2
    assert all(isinstance(name, str) for name in built.train.classes)
    assert tuple(built.val.classes) == tuple(built.train.classes)


def test_labels_are_python_integers_in_range_or_sets(built):
    sets = built.kind == "multilabel"
    for source in (built.train, built.val):
        labels = [source.label(id) for id in range(len(source))]
        if sets:
            assert all(
                label.dtype == np.int8 and label.shape == (len(source.classes),)
                for label in labels
            )
            assert all(set(label.tolist()) <= {0, 1} for label in labels)
            continue
        assert all(type(label) is int for label in labels)
        assert set(labels) <= set(range(len(source.classes)))


def test_labels_are_those_of_the_data(built):
    if built.kind in PAINTED:
        pytest.skip("it makes its own images")
    for source, expected in ((built.train, TRAIN), (built.val, VAL)):
        assert sorted(
            name for id in range(len(source)) for name in named(source, id)
        ) == sorted(expected)


def test_names_are_unique(built):
    for source in (built.train, built.val):
        names = [source.name(id) for id in range(len(source))]
        assert len(set(names)) == len(names)
        assert not any(os.path.isabs(name) for name in names)


def test_decode_is_pure(built):
    ids = readable(built)
    first = digests(built.train, ids)
    assert digests(built.train, ids[::-1]) == first[::-1]
    assert digests(built.again, ids) == first


def test_decode_gives_each_caller_its_own_image(built):
    id = readable(built)[0]
    before = digest(built.train, id)
    built.train.decode(id).image.paste((1, 2, 3), (0, 0, 1, 1))
    assert digest(built.train, id) == before


def test_broken_image_is_a_data_error_with_its_name(built):
    if built.kind in PAINTED:
        pytest.skip("it makes its own images")
    broken = set(range(len(built.train))) - set(readable(built))
    assert broken
    for id in broken:
        with pytest.raises(DataError, match="it is not an image") as caught:
            built.train.decode(id)
        assert built.train.name(id) in str(caught.value)
        assert caught.value.config_path.startswith("data.")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(
            caught.value
        )  # out of a worker


def deep(split: str) -> list[tuple[str, bytes]]:
    """Grey pictures of a camera of 12 bits, stored in 16."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((9, 7), 2048, np.uint16)).save(buffer, "PNG")
    return [(name, buffer.getvalue()) for name in (TRAIN if split == "train" else VAL)]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - PAINTED))
def test_the_range_of_16_bits_is_the_configurations(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "images", deep)
    module = importlib.import_module(f"kd.parts.datasets.{kind}")
    source = module.build(module.Options(**RECIPES[kind](tmp_path)), "train", None)
    for bits, value in ((16, 2048 >> 8), (12, 2048 >> 4)):
        source.bits = bits
        assert np.unique(np.asarray(source.decode(0).image)).tolist() == [value]


def test_fingerprint_depends_on_the_listing_and_not_on_the_folder(built):
    assert built.again.fingerprint == built.train.fingerprint
    assert built.val.fingerprint != built.train.fingerprint


READER = """
import json, pickle, sys
for line in sys.stdin:
    file, ids = json.loads(line)
    source = pickle.load(open(file, "rb"))
    found = [f"{source.name(id)} {source.label(id)} {source.decode(id).image.tobytes().hex()}" for id in ids]
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    """A process of its own that unpickles sources and reads them."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", READER], cwd=Path(__file__).parents[2], **pipes
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_spawned_process_sees_the_same(built, reader, tmp_path):
    ids = readable(built)
    source = built.train
    (tmp_path / "source.pickle").write_bytes(pickle.dumps(source))
    reader.stdin.write(json.dumps([str(tmp_path / "source.pickle"), ids]) + "\n")
    reader.stdin.flush()
    expected = [
        f"{source.name(id)} {source.label(id)}"
        f" {source.decode(id).image.tobytes().hex()}"
        for id in ids
    ]
    assert json.loads(reader.stdout.readline()) == expected


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(),
    reason="this system does not fork",
)
def test_forked_processes_see_the_same_at_the_same_time(built):
    ids = readable(built) * 20
    context = multiprocessing.get_context(
        "fork"
    )  # the source is inherited, not pickled
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    workers = [
        context.Process(target=send_digests, args=(end, built.train, ids), daemon=True)
        for _, end in pipes
    ]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of fork with threads
        for worker in workers:
            worker.start()
    expected = digests(built.train, ids)
    for (end, _), worker in zip(pipes, workers, strict=True):
        assert end.poll(60)
        assert end.recv() == expected
        worker.join()


def test_threads_see_the_same_at_the_same_time(built):
    ids = readable(built) * 20
    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(lambda _: digests(built.train, ids), range(4)))
    assert shares == [digests(built.train, ids)] * 4


WHOLE = {
    "csv": {"root": "x", "train_list": "a.csv", "val_list": "b.csv"},
    "food_mini": {"train_images": 2, "val_images": 1},
    "hf": {"path": "x"},
    "imagefolder": {"root": "x"},
    "multilabel": {"root": "x", "train_labels": "a.csv", "val_fraction": 0.5},
    "webdataset": {"train": "a.tar", "val": "b.tar"},
}
WRONG = [
    ("csv", {"train_list": ""}, "root and train_list must be set"),
    ("csv", {"val_list": ""}, "val_list or val_fraction is needed"),
    ("csv", {"val_fraction": 0.1}, "val_list or val_fraction is needed"),
    ("csv", {"image_key": "label"}, "two different columns"),
    (
        "food_mini",
        {"redundancy": 3},
        "redundancy and imbalance must be 1 to train_images, are 3, 1",
    ),
    (
        "food_mini",
        {"imbalance": 2, "dishes": 2},
        "redundancy and imbalance need dishes: 1",
    ),
    ("hf", {"path": ""}, "path is empty"),
    ("hf", {"val_split": "train"}, "must be two different splits"),
    ("hf", {"val_split": ""}, "must be two different splits"),
    ("imagefolder", {"root": ""}, "root is empty"),
    ("imagefolder", {"val_split": "train"}, "two different folders"),
    ("multilabel", {"val_fraction": 0.0}, "val_labels or val_fraction is needed"),
    ("multilabel", {"val_labels": "b"}, "val_labels or val_fraction is needed"),
    ("multilabel", {"separator": ""}, "separator is empty"),
    ("webdataset", {"train": ""}, "train is empty"),
    ("webdataset", {"image_keys": ";"}, "must name member endings"),
    ("webdataset", {"label_key": "png"}, "is one of image_keys"),
    ("webdataset", {"label_key": "json"}, "label_field is empty"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG)
def test_options_that_do_not_fit_are_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        registry.options_type("datasets", kind, "data.kind")(
            **{**WHOLE[kind], **changes}
        )


@pytest.mark.parametrize(
    ("kind", "key", "values", "allowed"),
    [
        *[
            (kind, "val_fraction", (-0.1, 1.0), "a number >= 0 and < 1")
            for kind in ("csv", "hf", "multilabel")
        ],
        ("imagefolder", "val_fraction", (1.0, float("nan")), "a number >= 0 and < 1"),
        ("food_mini", "train_images", (0,), "a whole number > 0"),
        ("food_mini", "val_images", (0,), "a whole number > 0"),
        ("food_mini", "pixels", (15, 513), "a whole number >= 16 and <= 512"),
        ("food_mini", "label_noise", (-0.1, 1.0), "a number >= 0 and <= 0.9"),
        ("food_mini", "redundancy", (0,), "a whole number > 0"),
        ("food_mini", "imbalance", (0.5,), "a number >= 1"),
        ("food_mini", "dishes", (0, 5), "a whole number >= 1 and <= 4"),
    ],
)
def test_numbers_out_of_range_are_refused_with_what_is_allowed(
    kind, key, values, allowed
):
    for value in values:
        raw = {
            "data": {"kind": kind, **WHOLE[kind], key: value},
            "student": {"model": "x"},
            "losses": [{"kind": "ce"}],
        }
        with pytest.raises(ConfigErrors) as caught:
            load(raw)
        assert str(caught.value) == f"data.{key}: is {value!r}. Allowed: {allowed}."
