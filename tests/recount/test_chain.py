"""The chain of an export and its card: records counted in the cache's files, scores by
the images that they are of.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path

import pytest
from pieces import base, teacher_at

from kd import config
from kd.deploy.export.export import ExportOptions, export
from kd.jobs.train import train


@pytest.fixture(scope="module")
def run_and_export(photos, teacher, tmp_path_factory) -> tuple[Path, Path]:
    """A run with stored answers and a test split, of whose 36 images an epoch visits
    32; and its export.
    """
    folder = tmp_path_factory.mktemp("chain")
    settings = base(photos, folder) | {
        "teacher": {
            **teacher_at(teacher),
            "cache": {"views": 2, "path": str(folder / "answers")},
        }
    }
    run = train(
        config.load(
            settings, ["run.epochs=2", "data.test_fraction=0.4", "data.augment.mixup=0"]
        )
    ).folder
    return folder, export(run, folder / "export", ExportOptions(onnx=False)).folder


def whole_records(file: Path, label: str, size: int) -> int:
    """Count records by their own lengths and checksums, without kd."""
    content = file.read_bytes()
    count = 0
    for id in range(len(content) // size + 1):
        record = content[id * size : (id + 1) * size]
        if len(record) < 8:
            continue
        checksum, length = struct.unpack_from("<II", record)
        body = record[8 : 8 + length]
        count += (
            0 < length == len(body)
            and zlib.crc32(body, zlib.crc32(f"{label}:{id}:{length}".encode()))
            == checksum
        )
    return count


def test_the_chain_counts_records_and_not_their_places(run_and_export):
    """Issue 62: 3,426 places of a cache were called answers; 3,360 records
    lay there.
    """
    folder, exported = run_and_export
    size = 8 + 3 * 2 + 4  # head, three logits in float16, the checksum of the image
    records = sum(
        whole_records(folder / f"answers/view_{view:04d}.logits", str(view), size)
        for view in range(2)
    )
    assert records == 64 < 2 * 36
    assert (
        json.loads((exported / "manifest.json").read_text())["chain"]["answers"][
            "count"
        ]
        == records
    )
    assert f"outputs  {records} in the cache" in (exported / "README.md").read_text()


def test_the_card_names_the_images_of_scores_against_the_teacher(run_and_export):
    """Issue 62: 59.7 and 54.1 % stood on one card; the second was of other images."""
    folder, exported = run_and_export
    run = folder / "runs/tiny"
    scored = json.loads((run / "scored.json").read_text())
    card = (exported / "README.md").read_text()
    sentences = re.findall(
        r"Student against its teacher on (\w+) images: agreement ([\d.]+) %", card
    )
    assert scored["split"] == "test"
    assert sentences == 2 * [
        ("test", f"{100 * scored['row']['agreement']:.1f}")
    ]  # a number stands in the manifest once
