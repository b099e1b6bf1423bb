"""Commands whose output has an encoding without the letters of the user's classes,
folders and runs.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pieces import merged

NAMES = {"apple": "crème brûlée", "fig": "Übergröße", "pear": "苹果"}


@pytest.fixture
def narrow(command, monkeypatch) -> Callable[..., str]:
    """Run a command whose standard output is strict ASCII or CP1252; return what it
    wrote there.
    """

    def run(encoding: str, name: str, *argv: object) -> str:
        stdout = io.TextIOWrapper(
            written := io.BytesIO(), encoding=encoding, errors="strict"
        )
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stdout)
            answer = command(name, *argv)
        stdout.flush()
        assert answer.code == 0, answer
        assert "Traceback" not in answer.err
        return written.getvalue().decode(encoding)

    return run


@pytest.fixture
def named(settings, photos, tmp_path) -> dict:
    """A configuration whose classes, folder and run have such letters."""
    root = tmp_path / "äpfel"
    for split in ("train", "val"):
        for name, foreign in NAMES.items():
            shutil.copytree(photos / split / name, root / split / foreign)
    content = merged(
        settings,
        {
            "run": {"name": "été", "steps": 2, "baseline": False},
            "data": {"root": str(root)},
        },
    )
    return {**content, "teacher": {}, "losses": [{"kind": "ce"}]}


@pytest.fixture
def path(named, tmp_path) -> Path:
    file = tmp_path / "größe.yaml"
    file.write_text(yaml.safe_dump(named, allow_unicode=True), encoding="utf-8")
    return file


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_check_prints_what_it_can(narrow, path, encoding):
    letters = "brûlée, Übergröße, 苹果".encode(encoding, "backslashreplace").decode(
        encoding
    )
    assert letters in narrow(encoding, "train", path, "--check")


def test_every_command_prints_what_it_can(narrow, named, path, tmp_path):
    run = Path(named["run"]["folder"]) / "été"
    root = Path(named["data"]["root"])
    export = tmp_path / "экспорт"
    narrow("ascii", "train", path)
    narrow("ascii", "evaluate", run)
    assert "\\u044d" in narrow("ascii", "export", run, "--to", export)
    narrow("ascii", "verify", export)
    assert "\\u0437" in narrow(
        "ascii", "predict", export, root / "val", "--to", tmp_path / "заметки.csv"
    )
    narrow("ascii", "report", run)
    assert "\\u043d" in narrow("ascii", "init", root, "-o", tmp_path / "новый.yaml")
    narrow("ascii", "parts")
