"""A run folder of somebody else: without `--trust` no code that it names runs, and no
other images are read.
"""

from __future__ import annotations

import html
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kd import config
from kd.setup.data import open_sources
from kd.setup.recipe import resolve


@pytest.fixture
def run(distilled, tmp_path) -> Path:
    """A finished run folder that may be written into."""
    return Path(shutil.copytree(distilled, tmp_path / "run"))


@pytest.fixture
def edited(run) -> Callable[..., None]:
    """Change `section.key` of the run's configuration."""

    def edit(**sections: dict[str, Any]) -> None:
        content = yaml.safe_load((run / "config.yaml").read_text())
        for section, keys in sections.items():
            (
                content[section][0]
                if isinstance(content[section], list)
                else content[section]
            ).update(keys)
        (run / "config.yaml").write_text(yaml.safe_dump(content))

    return edit


@pytest.fixture
def touched(tmp_path, monkeypatch) -> Iterator[Path]:
    """A file that is made when the package `foreign` is imported."""
    file = tmp_path / "touched"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "__init__.py").write_text(
        f"open({str(file)!r}, 'w').close()\n"
    )
    (tmp_path / "foreign" / "part.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    for name in ("foreign", "foreign.part"):
        sys.modules.pop(name, None)


def test_a_teacher_that_is_code_is_not_built(run, edited, command, refused, tmp_path):
    """The command ran, the exit code was 0, and a page was written."""
    page = run / "report.html"
    file = tmp_path / "touched"
    teacher = {
        "kind": "torch",
        "model": "os:system",
        "args": {"command": f"touch {file}"},
    }
    edited(teacher={**teacher, "mean": [0, 0, 0], "std": [1, 1, 1]})
    answer = command("report", run)
    assert (answer.code, file.exists()) == (0, False), answer
    assert "teacher.kind: is 'torch', so that 'os:system' would run" in html.unescape(
        page.read_text()
    )
    error = refused("evaluate", run)
    assert error.startswith("teacher.kind: is 'torch', so that 'os:system' would run.")
    assert "--trust" in error
    assert (
        command("export", run, "--no-onnx").code == 0
    )  # the student is no code, and the teacher is not built
    assert not file.exists()
    assert "'os:system' returns int" in refused("evaluate", run, "--trust")
    assert file.exists()
    file.unlink()
    assert command("report", run, "--trust").code == 0
    assert file.exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"losses": {"kind": "foreign.part"}},
        {"data": {"kind": "foreign.part"}},
        {"sifter": {"kind": "foreign.part"}},
        {"task": {"kind": "foreign.part"}},
        {"backend": {"kind": "foreign.part"}},
        {"teacher": {"kind": "foreign.part"}},
        {"teacher": {"also": [{"kind": "foreign.part", "model": "x"}]}},
        {"run": {"name": "foreign.part"}, "losses": {"kind": "${run.name}"}},
        {
            "run": {"name": {"kind": "foreign.part"}},
            "sifter": {"kind": "${run.name.kind}"},
        },
    ],
)
def test_no_module_is_imported(sections, run, edited, refused, touched):
    edited(**sections)
    for words in (
        ("report", run),
        ("report", run, "--price"),
        ("evaluate", run),
        ("export", run),
    ):
        error = refused(*words)
        assert "names the module 'foreign.part'" in error
        assert "--trust" in error
    assert not touched.exists()
    assert "--trust" not in refused(
        "report", run, "--trust"
    )  # no part: what that means is another line
    assert touched.exists()


def test_no_module_of_a_baseline_is_imported(run, edited, command, touched):
    complete = Path(shutil.copytree(run, run.parent / "whole"))
    edited(losses={"kind": "foreign.part"})
    shutil.copytree(run, complete / "labels_only")
    answer = command(
        "report", complete, "--images", "5"
    )  # what it is follows from the run's own configuration
    assert answer.code == 0, answer
    assert not touched.exists()


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 3000 + "]" * 3000, "run: {name: \xff", "losses: *x"]
)
def test_a_foreign_config_is_a_one_line_error(text, run, refused):
    (run / "config.yaml").write_bytes(text.encode("latin-1"))
    for words in (("report", run), ("evaluate", run), ("export", run)):
        assert "config.yaml' is not the config of a run: " in refused(*words)


def images_of(page: Path) -> int:
    return page.read_text().count("data:image/jpeg")


def test_other_images_than_the_recorded_ones_are_not_read(
    run, edited, photos, command, refused, tmp_path
):
    """A stranger's config.yaml named a folder of ours, and its photographs were on the
    page.
    """
    private = tmp_path / "private"
    page = run / "report.html"
    shutil.copytree(photos, private)
    min((private / "val").rglob("*.jpg")).unlink()
    edited(data={"root": str(private)})
    for recorded in (True, False):
        assert command("report", run).code == 0
        assert "the images are not those that the run recorded" in page.read_text()
        assert images_of(page) == 0
        for words in (("evaluate", run), ("export", run, "--to", tmp_path / "student")):
            assert refused(*words).startswith("data: the ")
        manifest = json.loads((run / "manifest.json").read_text())
        assert bool(manifest.pop("data", "")) == recorded
        (run / "manifest.json").write_text(json.dumps(manifest))
    for words in (
        ("report", run, f"data.root={private}"),
        ("evaluate", run, "--trust"),
    ):
        assert command(*words).code == 0
    assert "the images are not those" not in page.read_text()


def test_links_out_of_the_folder_are_not_followed(
    run, edited, photos, command, refused, tmp_path
):
    """Its size, which the content hash holds, may be known to whoever made the link."""
    images = tmp_path / "images"
    page = run / "report.html"
    shutil.copytree(photos, images)
    first, second, *_ = sorted((images / "val").rglob("*.jpg"))
    first.rename(tmp_path / "secret.jpg")
    first.symlink_to(tmp_path / "secret.jpg")
    edited(data={"root": str(images)})
    assert command("report", run).code == 0
    assert f"{first}' is a link out of" in html.unescape(page.read_text())
    assert images_of(page) == 0
    for words in (("evaluate", run), ("export", run, "--to", tmp_path / "student")):
        assert f"data.root: '{first}' is a link out of" in refused(*words)
        assert command(*words, "--trust").code == 0
    first.unlink()
    first.symlink_to(second)  # one inside is as good as a file
    fingerprint = open_sources(
        resolve(config.load(str(run / "config.yaml"))).data
    ).fingerprint
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "data": fingerprint}))
    assert command("evaluate", run).code == 0
