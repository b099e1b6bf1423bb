"""An export as the two `model.tar.gz` that SageMaker knows: for one's own container, and for its PyTorch container.

Both unpack to /opt/ml/model. The archives are the same bytes for the same files: no times, no owners.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from kd.files import manifest as exported
from kd.files import pixels
from kd.files.storage import atomic_folder

TIMM_FILES = ("config.json", "model.safetensors", "manifest.json", "README.md")
REQUIREMENTS = "timm>=1.0.26\nsafetensors>=0.4\npillow>=10\n"
HEAVY = ("model.safetensors", "model.pt2")
"""What `kd-serve` never reads."""


def sagemaker_archives(export: Path) -> list[Path]:
    """Write both `model.tar.gz` into the folder `<export>-sagemaker` and return their paths.

    Raises:
        RunError: the disk is full or not writable.
    """
    from kd.sagemaker import handler  # it imports timm, which no other command needs at its start

    code = {
        "inference.py": Path(handler.__file__).read_bytes(),
        "exported.py": Path(exported.__file__).read_bytes(),
        "pixels.py": Path(pixels.__file__).read_bytes(),
        "requirements.txt": REQUIREMENTS.encode(),
    }
    return archives(export, export.parent / f"{export.name}-sagemaker", code)


def archives(export: Path, target: Path, code: Mapping[str, bytes]) -> list[Path]:
    """Write `container/model.tar.gz` and `pytorch/model.tar.gz` below `target`, replacing older ones.

    Args:
        export: the export folder.
        target: where.
        code: the files of `code/` for the PyTorch container, by name.

    Raises:
        RunError: the disk is full or not writable.
    """
    loaded = {name: (export / name).read_bytes() for name in TIMM_FILES if (export / name).is_file()}
    loaded |= {f"code/{name}": content for name, content in code.items()}
    with atomic_folder(target, where="--sagemaker") as draft:
        for kind, packed in (("container", container_archive(export)), ("pytorch", _archive(loaded))):
            (draft / kind).mkdir()
            (draft / kind / "model.tar.gz").write_bytes(packed)
    return [target / kind / "model.tar.gz" for kind in ("container", "pytorch")]


def container_archive(export: Path) -> bytes:
    """Return the `model.tar.gz` for a container that runs `kd-serve`."""
    return _archive(
        {path.name: path.read_bytes() for path in export.iterdir() if path.is_file() and path.name not in HEAVY}
    )


def _archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
