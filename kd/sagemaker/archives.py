"""An export as the `model.tar.gz` of a SageMaker container that runs `kd-serve`. It unpacks to /opt/ml/model.

It is the same bytes for the same files: no times, no owners.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from kd.files.storage import atomic_folder, refuse_unlisted

NAME = "container/model.tar.gz"
HEAVY = ("model.safetensors", "model.pt2")
"""What `kd-serve` never reads."""


def sagemaker_archive(export: Path) -> Path:
    """Write `container/model.tar.gz` into `<export>-sagemaker` and return its path."""
    folder = export.parent / f"{export.name}-sagemaker"
    refuse_unlisted(folder, [NAME, "pytorch/model.tar.gz"], "--sagemaker")  # older versions wrote a second one
    with atomic_folder(folder, where="--sagemaker") as draft:
        (draft / NAME).parent.mkdir()
        (draft / NAME).write_bytes(container_archive(export))
    return folder / NAME


def container_archive(export: Path) -> bytes:
    """Return the bytes of that archive."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted(path for path in export.iterdir() if path.is_file() and path.name not in HEAVY):
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o644
            tar.addfile(entry, io.BytesIO(path.read_bytes()))
    return packed.getvalue()
