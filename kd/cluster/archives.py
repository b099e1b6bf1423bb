"""An export as the `model.tar.gz` of a SageMaker model, which its container unpacks to /opt/ml/model.

The archive is the same bytes for the same files: no times, no owners.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from kd.files.storage import atomic_folder, refuse_unlisted

HEAVY = ("model.safetensors", "model.pt2")  # what `kd-serve` never reads


def write_archive(export: Path) -> Path:
    """Write `<export>-sagemaker/model.tar.gz` and return its path."""
    folder = export.parent / f"{export.name}-sagemaker"
    refuse_unlisted(folder, ["model.tar.gz"], "--sagemaker")
    with atomic_folder(folder, where="--sagemaker") as draft:
        (draft / "model.tar.gz").write_bytes(archive(export))
    return folder / "model.tar.gz"


def archive(export: Path) -> bytes:
    """Return the `model.tar.gz` for a container that runs `kd-serve`."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted(export.iterdir()):
            if path.is_file() and path.name not in HEAVY:
                content = path.read_bytes()
                entry = tarfile.TarInfo(path.name)
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
