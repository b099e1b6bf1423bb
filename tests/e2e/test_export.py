"""`kd-export`: what lies in the folder is true, and nothing is written that does not
answer as PyTorch does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from pieces import listing

from kd.deploy.export.export import export


def test_the_hashes_are_true_and_nothing_else_lies_there(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    files = set(listing(exported))
    assert files == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        content = (exported / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            entry["bytes"],
            entry["sha256"],
        ), name
    assert {
        "model.onnx",
        "model.int8.onnx",
        "model.pt2",
        "model.safetensors",
        "config.json",
        "README.md",
    } <= files
    assert not [
        name for name in files if name.endswith((".bin", ".pth", ".pt", ".pkl"))
    ]
    assert (
        exported / "model.safetensors"
    ).stat().st_mode & 0o044 == 0o044  # a server is another user


def test_the_card_of_a_teacher_has_its_own_scores(
    distilled, embedded, command, tmp_path
):
    cards = []
    for run, options in (
        (distilled, ()),
        (distilled, ("--teacher",)),
        (embedded, ("--teacher",)),
    ):
        answer = command(
            "export", run, "--to", tmp_path / "model", "--no-onnx", *options
        )
        assert answer.code == 0, answer
        cards.append((tmp_path / "model" / "README.md").read_text())
    student, teacher, _ = (
        card.partition("## Where it comes from")[0] for card in cards
    )
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:]
        for line in student.splitlines()
        if line.startswith("| ")
    }
    assert rows["teacher"] != rows["this student"]
    table = [
        line.split("|")[1:] for line in teacher.splitlines() if line.startswith("| ")
    ][2:]
    assert [[cell.strip() for cell in row] for row in table] == [
        ["this teacher", *(cell.strip() for cell in rows["teacher"])]
    ]
    for text in ("Student against its teacher", "evaluations"):  # of the student
        assert text in student
        assert text not in teacher
    assert "the student's own space" not in cards[2]


def test_the_command_prints_its_files_and_writes_archives(distilled, command, tmp_path):
    target = tmp_path / "student"
    answer = command(
        "export", distilled, "--to", target, "--license", "apache-2.0", "--sagemaker"
    )
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert lines[0] == f"wrote {target}"
    assert "max |dlogit|" in lines[1]
    assert "same top-1 on 13 of 13 validation images" in lines[1]
    assert lines[-1] == f"serve it: kd-serve {target}"
    assert listing(tmp_path / "student-sagemaker") == ["model.tar.gz"]
    assert "\nlicense: apache-2.0\n" in (target / "README.md").read_text()
    answer = command("export", distilled, "--to", target, "--int8")
    expected = "it loads model.onnx; --file loads model.int8.onnx"
    assert answer.out.splitlines()[-1].strip() == expected


def test_without_graphs_no_data_is_needed(distilled, command, tmp_path):
    answer = command(
        "export",
        distilled,
        "--to",
        tmp_path / "student",
        "--no-onnx",
        "data.root=/nowhere",
    )
    assert answer.code == 0, answer
    assert listing(tmp_path / "student") == [
        "README.md",
        "config.json",
        "kd.json",
        "manifest.json",
        "model.safetensors",
    ]
    assert "kd-serve" not in (tmp_path / "student" / "README.md").read_text()


def test_other_data_is_refused(distilled, refused, tmp_path, photos):
    shutil.copytree(photos, tmp_path / "photos")
    next((tmp_path / "photos/val/fig").iterdir()).unlink()
    error = refused(
        "export",
        distilled,
        "--to",
        tmp_path / "student",
        f"data.root={tmp_path / 'photos'}",
    )
    assert error.startswith("data: the data differs from the run's training data")
    moved = shutil.copytree(photos, tmp_path / "moved")
    assert export(
        distilled, tmp_path / "student", overrides=[f"data.root={moved}"]
    ).lines


def test_a_folder_that_is_no_export_stays(distilled, refused, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    assert refused("export", distilled, "--to", tmp_path).startswith(
        f"export: '{tmp_path}' exists and is not an export"
    )
    assert listing(tmp_path) == ["thesis.tex"]


def test_an_older_export_is_replaced_and_nothing_else_is(
    exported, distilled, command, refused, tmp_path
):
    """Before, any folder with a kd.json in it went, with all that lay there; a link
    became a folder.
    """
    target = tmp_path / "student"
    words = ("export", distilled, "--no-onnx", "--to")
    shutil.copytree(exported, target)
    (target / "notes").mkdir()
    (target / "notes" / "thesis.tex").write_text("precious")
    assert f"'{target}/notes/thesis.tex' belongs to no export" in refused(
        *words, target
    )
    (target / "notes" / "thesis.tex").unlink()
    assert f"'{target}/notes' belongs to no export" in refused(*words, target)
    (target / "notes").rmdir()
    (target / "README.md").write_text("my own model card")
    assert f"'{target}/README.md' was changed after the export" in refused(
        *words, target
    )
    assert (target / "README.md").read_text() == "my own model card"
    (target / "README.md").unlink()
    (tmp_path / "link").symlink_to("student")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        assert f"'{tmp_path / name}' exists and is a link" in refused(
            *words, tmp_path / name
        )
        assert (tmp_path / name).is_symlink()
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["thesis.tex"] = {
        "bytes": 8,
        "sha256": hashlib.sha256(b"precious").hexdigest(),
    }
    forged = shutil.copytree(target, tmp_path / "forged")
    (forged / "thesis.tex").write_text("precious")
    (forged / "manifest.json").write_text(json.dumps(manifest))
    assert "is not an exported model" in refused(*words, forged)
    assert (forged / "thesis.tex").read_text() == "precious"
    assert command(*words, target).code == 0
    assert "model.onnx" not in listing(target)


def test_archives_replace_archives_alone(distilled, refused, command, tmp_path):
    words = (
        "export",
        distilled,
        "--no-onnx",
        "--sagemaker",
        "--to",
        tmp_path / "student",
    )
    beside = tmp_path / "student-sagemaker"
    beside.mkdir()
    (beside / "thesis.tex").write_text("precious")
    assert f"--sagemaker: '{beside}/thesis.tex' belongs to no export" in refused(*words)
    (beside / "thesis.tex").unlink()
    for _ in range(2):
        assert command(*words).code == 0
    assert listing(beside) == ["model.tar.gz"]


@pytest.mark.slow
def test_the_next_export_removes_drafts_of_a_killed_one(distilled, command, tmp_path):
    for name in ("temporary", "out"):
        (tmp_path / name).mkdir()
    words = ["export", str(distilled), "--to", str(tmp_path / "out" / "student")]
    variables = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kd.cli", *words],
        env=variables,
        stdout=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None and not any(tmp_path.rglob("model.onnx")):
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert command(*words).code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["student"]
    assert not list((tmp_path / "temporary").glob("kd-*"))
