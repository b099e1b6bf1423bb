"""Random damage to whatever kd reads: one line that says so, or the very same content;
nothing else.

`KD_FUZZ=2000 pytest tests/soak/test_fuzz.py` tries that many random inputs a test;
without it the same few each time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fuzzing import IMAGES, damaged, fuzz, junk, texts
from hypothesis import example, given
from hypothesis import strategies as st
from pieces import tiny

from kd.config import load, schema
from kd.config.explain import explain
from kd.core.errors import CorruptImage, KdError
from kd.core.types import State
from kd.deploy.serve.model import Description, describe
from kd.files import checkpoint
from kd.models.cache import Codec, Store, open_store
from kd.parts.datasets import imagefolder

pytestmark = pytest.mark.slow

EXAMPLES, FUZZ = fuzz(60)


@pytest.fixture
def counts(record_property) -> Iterator[Counter]:
    """What came of the inputs of a test; their number becomes a property of the test's
    report.
    """
    counted: Counter = Counter()
    yield counted
    record_property("tried", counted.total())
    print(dict(counted))
    assert counted.total() >= EXAMPLES * 0.9


# --------------------------------------------------------------------------------
# configuration

ROWS = explain()
KEYS = sorted({key for row in ROWS for key in row[0].replace("[]", "").split(".")})
words = texts(
    "auto",
    "none",
    "kl",
    "history",
    "${run.name}",
    "${oc.env:KD_FUZZ_NONE}",
    "${",
    "???",
    "\0",
)
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**63, 1e308])
)
keys = st.one_of(st.sampled_from(KEYS), words, st.integers(-2, 3), st.booleans())
anything = junk(st.one_of(st.none(), st.booleans(), numbers, words), keys)
PATHS = [row[0].replace("[]", ".0") for row in ROWS]
paths = st.one_of(
    st.sampled_from(PATHS),
    st.lists(keys.map(str), min_size=1, max_size=3).map(".".join),
)
overrides = st.one_of(
    st.builds(lambda path, value: f"{path}={value}", paths, anything),
    st.builds(
        lambda path, value: f"{path}={json.dumps(value, default=str)}", paths, anything
    ),
    words,
)
LIKELY = [
    True,
    False,
    0,
    1,
    2,
    0.5,
    "",
    "auto",
    "on",
    "off",
    "fp32",
    "bf16",
    "int8",
    "fp8",
    "openvino",
    "none",
]
SECTIONS = [
    row[0].replace("[]", ".0") for row in ROWS if not row[3].startswith("[kind:")
]
# most values are refused for their type; likely ones come as far as the rules between
# keys
single = st.one_of(
    st.tuples(paths, anything, st.booleans()),
    st.tuples(st.sampled_from(SECTIONS), st.sampled_from(LIKELY), st.just(False)),
).map(lambda change: (change[0].split("."), *change[1:]))
changes = st.lists(single, max_size=3)


def configuration(root: Path) -> dict[str, Any]:
    return {
        "run": {"name": "fuzz", "epochs": 2},
        "data": {"kind": "imagefolder", "root": str(root), "batch_size": 8},
        "teacher": {"model": "resnet18", "cache": {"views": 2}},
        "student": tiny(),
        "losses": [{"kind": "kl", "weight": 0.5}, {"kind": "wttm"}],
        "sifter": {"kind": "history", "keep": 0.5},
        "optimizer": {"lr": 2e-3, "betas": [0.9, 0.95]},
        "backend": {"kind": "cpu", "precision": "fp32", "threads": 1},
    }


def changed(content: Any, changes_made: list[tuple[list[str], Any, bool]]) -> Any:
    """Set or remove what lies at some paths of nested dictionaries and lists."""
    for path, value, remove in changes_made:
        place = content
        for key in path[:-1]:
            if isinstance(place, list):
                place = place[0] if place else {}
            elif isinstance(place, dict):
                place = place.setdefault(key, {})
        if isinstance(place, dict):
            place.pop(path[-1], None) if remove else place.update({path[-1]: value})
    return content


def outcome(counts: Counter, read: Callable[[], Any], kind: type) -> Any:
    """Call `read`: count a KdError of one line each, or the result."""
    try:
        result = read()
    except KdError as error:
        counts[type(error).__name__] += 1
        return None
    assert isinstance(result, kind)
    counts["read"] += 1
    return result


def test_configurations_as_dictionaries_are_read_or_refused(tmp_path, counts):
    @FUZZ
    @example([(["run", "trackers"], {}, False)], [])
    @example([(["run", "name"], "${", False)], [])
    @given(changes, st.one_of(st.just([]), st.lists(overrides, max_size=2)))
    def tried(changes_made, given_overrides):
        content = changed(configuration(tmp_path), changes_made)
        outcome(counts, lambda: load(content, given_overrides), schema.Config)

    tried()
    assert counts["read"] > 0
    assert counts["ConfigError"] + counts["ConfigErrors"] > EXAMPLES // 4


def test_configurations_as_files_are_read_or_refused(tmp_path, counts):
    text = yaml.safe_dump(configuration(tmp_path)).encode()
    file = tmp_path / "fuzz.yaml"

    @FUZZ
    @given(damaged(text))
    def tried(content):
        file.write_bytes(content)
        outcome(counts, lambda: load(file), schema.Config)

    tried()
    assert counts["ConfigError"] + counts["ConfigErrors"] > EXAMPLES // 4


# --------------------------------------------------------------------------------
# images


@pytest.mark.parametrize("kind", IMAGES)
def test_damaged_images_are_decoded_or_corrupt(kind, tmp_path, counts):
    for split in ("train", "val"):
        for name in ("one", "two"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.jpg").write_bytes(IMAGES[kind])
    source = imagefolder.build(imagefolder.Options(root=str(tmp_path)), "train", None)
    file = tmp_path / "train" / "one" / "0.jpg"

    @FUZZ
    @given(damaged(IMAGES[kind]))
    def tried(content):
        file.write_bytes(content)
        try:
            image = source.decode(0).image
        except CorruptImage as error:
            counts["corrupt"] += error.wrong.startswith("file 'train/one/0.jpg'")
        else:
            assert image.mode == "RGB"
            counts["decoded"] += 1

    tried()
    assert counts["corrupt"] > EXAMPLES // 20


# --------------------------------------------------------------------------------
# cache and checkpoint

CLASSES = 5
RECORDS = 6
IDENTITY = {"teacher": "abc", "seed": 0, "classes": ["a", "b"], "crop": 0.875}


def cache(folder: Path) -> Store:
    return open_store(
        folder, IDENTITY, Codec(CLASSES, "fp32", 0), RECORDS, writable=False
    )


@pytest.fixture
def filled(tmp_path) -> Path:
    store = open_store(
        tmp_path / "cache", IDENTITY, Codec(CLASSES, "fp32", 0), RECORDS, writable=True
    )
    logits = torch.randn(
        RECORDS, CLASSES, generator=torch.Generator().manual_seed(0)
    ).numpy()
    store.write(0, range(RECORDS), [logits], range(1, RECORDS + 1))
    return tmp_path / "cache"


def test_records_of_a_damaged_cache_are_right_or_missing(filled, counts):
    file = filled / "view_0000.logits"
    content = file.read_bytes()
    good, _ = cache(filled).read(0, range(RECORDS))

    @FUZZ
    @given(damaged(content))
    def tried(wrong):
        file.write_bytes(wrong)
        records, intact = cache(filled).read(0, range(RECORDS))
        assert (records[intact] == good[intact]).all()
        counts["all whole" if intact.all() else "not whole"] += 1

    tried()
    assert counts["not whole"] > EXAMPLES // 2


def test_a_damaged_manifest_of_a_cache_is_refused(filled, counts):
    file = filled / "manifest.json"
    content = file.read_bytes()

    @FUZZ
    @given(damaged(content))
    def tried(wrong):
        file.write_bytes(wrong)
        if outcome(counts, lambda: cache(filled), Store):
            assert json.loads(wrong.decode(errors="replace")) == json.loads(content)

    tried()
    assert counts["RunError"] + counts["Broken"] > EXAMPLES // 2


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.STATE])
def test_damaged_checkpoints_are_read_right_or_refused(name, tmp_path, counts):
    folder = tmp_path / "checkpoint"
    tensors = {
        "weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "half": torch.arange(6).to(torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 2),
    }
    state = State(step=3, best=0.5)
    info = {"kind": "test", "names": ["a", "b"]}
    checkpoint.write(folder, state, tensors, info)
    content = (folder / name).read_bytes()

    @FUZZ
    @example(content.replace(b"[0,2]", b"[0,3]"))
    @example(content.replace(b'"F32"', b'"I32"'))
    @given(damaged(content))
    def tried(wrong):
        (folder / name).write_bytes(wrong)
        result = outcome(counts, lambda: checkpoint.read(folder), tuple)
        if result:
            assert result[0] == state
            assert result[2] == info
            assert result[1].keys() == tensors.keys()
            for key, tensor in result[1].items():
                assert tensor.dtype == tensors[key].dtype
                assert torch.equal(tensor, tensors[key])

    tried()
    assert counts["RunError"] + counts["Broken"] > EXAMPLES // 2


# --------------------------------------------------------------------------------
# exports


@pytest.fixture
def export(tmp_path) -> Path:
    """The text files of an export; they are all that `describe` reads."""
    config = json.dumps(
        {"label_names": ["apple", "fig", "pear"], "num_classes": 3}
    ).encode()
    (tmp_path / "config.json").write_bytes(config)
    files = {"config.json": config, "model.onnx": b"a graph"}
    manifest = {
        "name": "tiny",
        "version": "0123456789ab",
        "input": {"size": 16, "crop": 0.875},
        "output": {"name": "logits"},
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_damaged_exports_are_refused(name, export, counts):
    content = (export / name).read_bytes()

    @FUZZ
    @given(damaged(content))
    def tried(wrong):
        (export / name).write_bytes(wrong)
        description = outcome(counts, partial(describe, export), Description)
        if description and name == "config.json":
            assert wrong == content

    tried()
    assert counts["ModelError"] > EXAMPLES // 5


def test_exports_of_other_values_are_usable_or_refused(export, counts):
    good = json.loads((export / "manifest.json").read_text())
    fields = st.sampled_from(
        [[key] for key in good] + [["input", key] for key in good["input"]]
    )
    files = st.sampled_from([["files", key] for key in good["files"]])

    @FUZZ
    @example(["files", "config.json"], 5)
    @example(["input", "size"], float("inf"))
    @example(["input", "size"], -5)
    @given(
        st.one_of(fields, files),
        st.one_of(anything, st.sampled_from([float("inf"), float("nan"), "16", [[]]])),
    )
    def tried(path, value):
        content = changed(json.loads(json.dumps(good)), [(path, value, False)])
        (export / "manifest.json").write_text(json.dumps(content))
        description = outcome(counts, partial(describe, export), Description)
        assert description is None or (
            description.size > 0 and 0 < description.crop <= 1
        )

    tried()
    assert counts["ModelError"] > EXAMPLES // 10
