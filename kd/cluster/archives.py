"""An export as the two `model.tar.gz` that SageMaker knows: for one's own container, and for its PyTorch container.

Both unpack to /opt/ml/model. The archives are the same bytes for the same files: no times, no owners.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from kd.core import sure
from kd.files import manifest, pixels
from kd.files.storage import atomic_folder, refuse_unlisted

TIMM_FILES = ("config.json", "model.safetensors", "manifest.json", "README.md")
REQUIREMENTS = "timm>=1.0.26\nsafetensors>=0.4\npillow>=10\n"
HEAVY = ("model.safetensors", "model.pt2")  # what `kd-serve` never reads


def sagemaker_archives(export: Path) -> list[Path]:
    """Write `container/model.tar.gz` and `pytorch/model.tar.gz` into `<export>-sagemaker` and return their paths.

    The second one runs the weights alone, in timm: it is left out for a network of your own, and where the graphs map
    vectors into the teacher's space.
    """
    from kd.cluster import handler  # it imports timm, which no other command needs at its start

    files = {name: (export / name).read_bytes() for name in TIMM_FILES if (export / name).is_file()}
    files |= {
        "code/inference.py": Path(handler.__file__).read_bytes(),
        "code/exported.py": Path(manifest.__file__).read_bytes(),
        "code/pixels.py": Path(pixels.__file__).read_bytes(),
        "code/sure.py": Path(sure.__file__).read_bytes(),
        "code/requirements.txt": REQUIREMENTS.encode(),
    }
    archives = {"container": container_archive(export), "pytorch": _archive(files)}
    folder = export.parent / f"{export.name}-sagemaker"
    refuse_unlisted(folder, [f"{name}/model.tar.gz" for name in archives], "--sagemaker")
    described, config = (json.loads(files[name]) for name in (manifest.MANIFEST, "config.json"))
    if "space" in described.get("output", {}) or not isinstance(config["architecture"], str):
        archives.pop("pytorch")
    with atomic_folder(folder, where="--sagemaker") as draft:
        for name, content in archives.items():
            (draft / name).mkdir()
            (draft / name / "model.tar.gz").write_bytes(content)
    return [folder / name / "model.tar.gz" for name in archives]


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
