"""Every number of a report, of a card and of --check, computed again by
tools/recount.py with numpy alone.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pieces import base, slow, teacher_at

from kd import config
from kd.deploy.export.export import ExportOptions, export
from kd.jobs.forecast import forecast
from kd.jobs.train import train
from kd.setup.recipe import resolve
from kd.study.report.report import report

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
recount: Any = importlib.import_module("recount")

STORED = {"cache": {"views": 1}}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "labels only": (
        {},
        ["run.baseline=true", "data.test_fraction=0.4", "run.epochs=3"],
    ),
    "sifted": (
        STORED,
        ["sifter.kind=history", "sifter.keep=0.5", "run.epochs=8", "run.every.log=4"],
    ),
    "sets": ({}, ["losses=[{kind: binary_kl}]", "run.epochs=3"]),
    "averaged": ({"cache": {"views": 2}}, ["optimizer.ema_decay=0.8", "run.epochs=4"]),
    "relative": (
        STORED,
        [
            "sifter.kind=relative",
            "sifter.sift_delay=8",
            "run.epochs=6",
            "run.every.log=4",
        ],
    ),
}


def sets(photos: Path, folder: Path) -> dict[str, Any]:
    for split in ("train", "val"):
        files = sorted((photos / split).rglob("*.jpg"))
        lines = [
            f"{split}/{file.parent.name}/{file.name},{file.parent.name}"
            for file in files
        ]
        (folder / f"{split}.csv").write_text("\n".join(["file,labels", *lines, ""]))
    named = {
        f"{split}_labels": str(folder / f"{split}.csv") for split in ("train", "val")
    }
    return {
        "kind": "multilabel",
        "root": str(photos),
        "image_size": 16,
        "batch_size": 8,
        "workers": 0,
        **named,
    }


def trained(
    kind: str, photos: Path, teacher: Path, folder: Path
) -> tuple[Path, Path | None, str]:
    """Train a run of a kind; return its folder, its export if it has one, and what
    --check said of it.
    """
    cached, overrides = KINDS[kind]
    settings = base(photos, folder)
    settings["teacher"] = teacher_at(teacher) | cached
    if kind == "sets":
        settings["data"] = sets(photos, folder)
        settings["teacher"] = {**base(photos, folder)["teacher"], "min_accuracy": 0}
        settings["teacher"]["fit"] |= {"epochs": 2, "folder": str(folder / "teachers")}
    loaded = config.load(settings, ["data.augment.mixup=0", *overrides])
    forecast_text = forecast(resolve(loaded)) if kind == "sifted" else ""
    run = train(loaded).folder
    report([run], images=0)
    exported = (
        export(run, folder / "export", ExportOptions()).folder
        if kind == "averaged"
        else None
    )
    return run, exported, forecast_text


@pytest.mark.parametrize(
    "kind", ["labels only", "sifted", slow("sets"), slow("averaged"), slow("relative")]
)
def test_every_number_is_recounted_or_listed(
    kind, photos, teacher, tmp_path, record_property
):
    run, exported, forecast_text = trained(kind, photos, teacher, tmp_path)
    recounted = recount.recounted(
        run, exported, forecast_text.replace("sifted epoch saves", "an epoch saves")
    )
    assert recounted.wrong == []
    assert len(recounted.right) >= (20 if exported else 6)
    assert "no rule" not in recounted.left.values(), recounted.left
    record_property("not recounted", len(recounted.left))
    if kind == "labels only":
        assert changed_numbers(run) == set()
    if kind == "sifted":
        (run / "metrics.jsonl").write_text(
            (run / "metrics.jsonl")
            .read_text()
            .replace('"trained": 16.0', '"trained": 24.0')
        )
        assert any(
            "| 16" in " ".join(line.split()) for line in recount.recounted(run).wrong
        )


def changed_numbers(run: Path) -> set[str]:
    """Change each number with a decimal of report.md, and return the lines in which
    that is not noticed.
    """
    text = (run / "report.md").read_text()
    unnoticed = set()
    for number in re.finditer(r"\d\.\d", text):
        line = text[
            text.rfind("\n", 0, number.start()) + 1 : text.find("\n", number.end())
        ]
        if line.startswith(("Next:", "Teacher:")) or (
            re.match(r"\| teacher", line)
            and " M " in text[number.start() : number.end() + 4]
        ):
            continue
        (run / "report.md").write_text(
            text[: number.start()]
            + str((int(number[0][0]) + 1) % 10)
            + text[number.start() + 1 :]
        )
        if not recount.recounted(run).wrong:
            unnoticed.add(
                f"{line[:60]} ... {text[number.start() - 20 : number.end() + 5]}"
            )
    (run / "report.md").write_text(text)
    return unnoticed


def test_the_command_ends_with_1_where_a_number_is_another(distilled, tmp_path):
    run = shutil.copytree(distilled, tmp_path / "run")
    command = [sys.executable, str(ROOT / "tools/recount.py"), str(run)]
    good = subprocess.run(command, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    assert "Not recounted:" in good.stdout
    text = (run / "report.md").read_text()
    (run / "report.md").write_text(
        re.sub(r"accuracy (\d+)\.\d", r"accuracy \1.x", text)
    )
    bad = subprocess.run(command, capture_output=True, text=True)
    assert bad.returncode == 1
    assert "WRONG" in bad.stdout
