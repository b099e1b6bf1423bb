"""The packages that are published hold everything, and kd's own configurations work
from them by name.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from serving import ROOT

import kd

pytest.importorskip(
    "hatchling", reason="hatchling is not installed: pip install 'kd[dev]'"
)


def build(target: str, source: Path, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        target,
        "-d",
        str(folder),
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)
    return next(folder.glob("*.whl" if target == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_it_holds_the_package_and_its_configurations(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = Parser().parsestr(
            file.read(next(n for n in names if n.endswith("METADATA"))).decode()
        )
    tracked = subprocess.run(
        ["git", "ls-files", "kd", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {
        f"kd/{name}" if name.startswith("configs/") else name
        for name in tracked.stdout.split()
    }
    assert expected <= names
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert (
        metadata["Version"]
        == kd.__version__
        == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    )
    assert not any(name.startswith(("tests/", "configs/")) for name in names)


def test_a_configuration_of_its_own_is_found_by_name_in_any_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = (
        "import kd, sys; from kd import config; print(kd.__file__,"
        " config.load(sys.argv[1]).run.name)"
    )
    command = [sys.executable, "-c", code, "vit_food"]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == [
        str(tmp_path / "site" / "kd" / "__init__.py"),
        "vit_food",
    ]


def test_the_source_distribution_makes_the_same_wheel(wheel, tmp_path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as file:
        file.extractall(tmp_path / "source", filter="data")
    again = build("wheel", next((tmp_path / "source").iterdir()), tmp_path / "again")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        contents = [
            {name: file.read(name) for name in file.namelist()}
            for file in (first, second)
        ]
    assert contents[0] == contents[1]
