"""manifest.json by a stranger: read once, checked once, refused in one line
(issue 49).
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from subjects import small_subject

from kd.core.errors import ModelError
from kd.deploy.export.export import write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.serve.model import describe
from kd.files.manifest import checksum

LARGE = 10**30
NAN = float("nan")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """What every case changes: an export of a student with random weights."""
    folder = tmp_path_factory.mktemp("plain")
    return write(small_subject(folder), folder / "export", ExportOptions()).folder


def put(path: str, value: Any) -> Callable[[dict, dict], None]:
    """Set a value of the manifest, or of config.json, by its dotted path."""

    def change(manifest: dict, config: dict) -> None:
        first, *keys = re.split(r"\.(?!onnx)", path)
        place: Any = {"manifest": manifest, "config": config}[first]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value(place[keys[-1]]) if callable(value) else value

    return change


VALIDATION = "manifest.validation.model.onnx"
BRIGHTNESS = f"{VALIDATION}.numbers.brightness"
CASES = [
    *[
        ("manifest.input.size", value)
        for value in (
            0,
            -1,
            1,
            7,
            100_000,
            10**9,
            LARGE,
            16.5,
            "16",
            None,
            True,
            NAN,
            [],
        )
    ],
    *[
        ("manifest.input.crop", value)
        for value in (0, -1, 1.5, 1e-9, NAN, float("inf"), "1", None)
    ],
    *[
        ("manifest.name", value)
        for value in ("", "a\nb", "\ud800", "a\u2028b", 3, None, "x" * 10_000)
    ],
    *[("manifest.version", value) for value in ("\r\nx: y", {}, "\x00")],
    *[("manifest.input", value) for value in (3, [], None)],
    *[
        ("manifest.output", value)
        for value in (
            {},
            {"name": "boxes"},
            {"name": "embedding", "width": -1},
            [],
            "logits",
        )
    ],
    *[
        ("manifest.self_check.model.onnx.allowed", value)
        for value in (NAN, -1, LARGE * 10, "1", None, True)
    ],
    *[
        ("manifest.self_check.model.onnx.least", value)
        for value in ("1\n2", "", 1.2, None)
    ],
    *[("manifest.self_check.model.onnx", value) for value in ([1], "x", {})],
    *[
        ("manifest.environment.packages", value)
        for value in ({"pillow": "1\x1b[2J"}, {"pillow": 3}, [1], "x")
    ],
    ("manifest.output", {"name": "embedding", "width": LARGE}),
    *[
        ("manifest.output.defer", {"threshold": value})
        for value in (NAN, 1e9, "x", None, float("inf"))
    ],
    ("manifest.output.defer", {"labels": {"apple": {"low": 0, "high": 1}}}),
    *[
        ("manifest.output.thresholds", {"apple": {"threshold": value}})
        for value in (NAN, 0.5)
    ],  # 0.5: no others
    *[
        ("manifest.files", value)
        for value in ([], {"model.onnx": 3}, {"model.onnx": {}}, None)
    ],
    *[("manifest.pick", value) for value in (3, "../../etc/passwd", "\ud800")],
    *[
        ("config.label_names", value)
        for value in ("abc", [], ["a", "a", "b"], ["a", "b", "\ud800"], [1, 2, 3], 5)
    ],
    *[
        ("config.label_names", ["a", "b", name])
        for name in ("c\x1b[2J", "c\u2028d", "c\x85d", "c\td")
    ],
    *[(VALIDATION, value) for value in (3, [1], "x")],
    *[(f"{VALIDATION}.images", value) for value in (-1, 41, LARGE, NAN, "x")],
    *[(f"{VALIDATION}.confidence", value) for value in (-1, 1e9, NAN, float("inf"))],
    *[
        (f"{VALIDATION}.labels", value)
        for value in (
            {"quince": "0:1"},
            {"fig": "7:1"},
            {"fig": "0:-5"},
            {"fig": f"0:{LARGE}"},
            1,
        )
    ],
    *[(f"{VALIDATION}.numbers", value) for value in ({}, {"other": {}}, [])],
    *[
        (f"{BRIGHTNESS}.bounds", value)
        for value in ("1 2 3", "", "nan " * 15, "16 " * 15, 5)
    ],
    *[
        (f"{BRIGHTNESS}.counts", value)
        for value in (
            {},
            {"fig": "99:1"},
            {"fig": "-1:1"},
            {"fig": "0"},
            {"fig": "0:1 0:1"},
        )
    ],
]


@pytest.mark.parametrize(
    ("path", "value"), CASES, ids=[f"{i} {path}" for i, (path, _) in enumerate(CASES)]
)
def test_a_hostile_value_is_refused_in_one_line(plain, tmp_path, path, value):
    folder = Path(shutil.copytree(plain, tmp_path / "export"))
    manifest, config = (
        json.loads((folder / name).read_text())
        for name in ("manifest.json", "config.json")
    )
    put(path, value)(manifest, config)
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    if path != "manifest.files":
        digest = hashlib.sha256(text.encode()).hexdigest()
        manifest["files"] |= {"config.json": {"sha256": digest}}
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "checksum": checksum(manifest)})
    )
    with pytest.raises(ModelError) as caught:
        describe(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # a terminal can show it


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "\ud83d", "\xff", "null", "3", '"x"', "{}"],
)
def test_invalid_manifests_are_refused(plain, tmp_path, text):
    folder = Path(shutil.copytree(plain, tmp_path / "export"))
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"^export: "):
        describe(folder)


def test_labels_with_wide_spaces_and_joiners_are_served(tmp_path):
    """They were trained and exported, and then nothing loaded them."""
    labels = ("ラーメン\u3000大", "pain\u00a0perdu", "می\u200cخوش")
    folder = write(
        small_subject(tmp_path, classes=labels), tmp_path / "export", ExportOptions()
    ).folder
    assert describe(folder).labels == labels
