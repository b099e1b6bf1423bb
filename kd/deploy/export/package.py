"""The export folder: timm's files, served graphs, provenance, a hash of every file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from kd.core.errors import RunError
from kd.files.checkpoint import save_tensors
from kd.files.manifest import MANIFEST, SIGNATURE, checksum, has_valid_checksum, sha256
from kd.files.storage import REPLACED, atomic_folder, refuse_unlisted, write_json


@contextmanager
def new_export(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes the export `folder` if the block succeeds.

    It replaces an older export.
    """
    refuse_other(folder)
    with atomic_folder(folder, config_path="export") as draft:
        yield draft
        refuse_other(folder)  # checked again: the export took minutes


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: dict[str, Any],
) -> None:
    """Write an export without graphs; see `new_export` and `complete`."""
    with new_export(folder) as draft:
        complete(draft, config, tensors, provenance)


def complete(
    draft: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    provenance: dict[str, Any],
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the common files of an export into a folder that may hold graphs and card.

    `timm.create_model('local-dir:FOLDER', pretrained=True)` loads `config` and
    `tensors`; `provenance` becomes kd.json, `facts` go into manifest.json.
    """
    save_tensors(draft / "model.safetensors", tensors, metadata={"format": "pt"})
    write_json(draft / "config.json", config)
    write_json(draft / "kd.json", provenance)
    seal(draft, facts or {})


def seal(draft: Path, facts: Mapping[str, object]) -> None:
    """Write manifest.json with facts, files and checksum, so that it can be served."""
    (draft / MANIFEST).unlink(missing_ok=True)
    # as a reader will parse it
    content = json.loads(json.dumps({**facts, "files": _listing(draft)}))
    write_json(draft / MANIFEST, {**content, "checksum": checksum(content)})


def refuse_other(folder: Path) -> None:
    """Refuse to replace a folder that is not an export, or an edited export."""
    listed_files: dict[str, Any] = {}
    # no valid manifest: no files
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if has_valid_checksum(manifest):
            listed_files = {**manifest["files"], MANIFEST: None, SIGNATURE: None}
    is_folder = folder.is_dir() and not folder.is_symlink()
    if not listed_files and is_folder and any(folder.iterdir()):
        wrong = f"'{folder}' exists and is not an exported model"
        raise RunError("export", wrong, REPLACED, "Choose another folder")
    refuse_unlisted(folder, listed_files, "export")
    for name, entry in _listing(folder).items():
        if name not in (MANIFEST, SIGNATURE) and listed_files[name] != entry:
            wrong = f"'{folder / name}' was changed after the export"
            remedy = "Move it away, or choose another folder"
            raise RunError("export", wrong, REPLACED, remedy)


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256(path),
        }
        for path in folder.rglob("*")
        if path.is_file()
    }
