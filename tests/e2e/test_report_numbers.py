"""Every number of the answers on a report's page, recomputed: a run with a test split
and averaged weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from charted import charted
from pieces import paint
from PIL import Image

from kd import config
from kd.core.intervals import wilson_interval
from kd.core.text import percent
from kd.files.run_dir import RunDir
from kd.jobs.train import train
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.setup.student import build_student
from kd.study.report.report import report


@pytest.fixture(scope="module")
def reported(teacher, tmp_path_factory) -> tuple[Path, str, dict[str, Any]]:
    """The run folder, its page and its answers.json."""
    from pieces import base, teacher_at

    folder = tmp_path_factory.mktemp("numbers")
    paint(folder / "photos/train", (12, 12, 12), seed=1)
    paint(folder / "photos/val", (25, 25, 25), seed=2)
    for number, file in enumerate(sorted((folder / "photos/val").glob("*/*.jpg"))):
        pixels = np.asarray(Image.open(file)).astype(int)
        pixels[..., number // 25] -= 6 * (
            number % 25
        )  # from plain to misleading, so that both models err
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=95)
    settings = base(folder / "photos", folder) | {"teacher": teacher_at(teacher)}
    overrides = [
        "run.epochs=4",
        "optimizer.ema_decay=0.8",
        "data.test_fraction=0.3",
        "data.augment.mixup=0",
        "optimizer.lr=5e-4",
    ]
    run = train(config.load(settings, overrides)).folder
    page = report([run], images=0).file.read_text()
    return run, page, json.loads((run / "answers.json").read_text())


def test_predictions_and_tile_use_the_averaged_weights(reported):
    """PyTorch answers again, with the averaged weights of the best checkpoint, on
    validation and on test images.
    """
    run, page, answers = reported
    recipe = resolve(config.load(str(run / "config.yaml"), here=False))
    _, tensors, _ = RunDir(run).best()
    averaged = {
        n.removeprefix("average."): t
        for n, t in tensors.items()
        if n.startswith("average.")
    }
    raw = {
        n.removeprefix("model.student."): t
        for n, t in tensors.items()
        if n.startswith("model.student.")
    }
    data = open_sources(recipe.data)

    def ask(
        weights: dict[str, torch.Tensor], source: Any
    ) -> tuple[list[int], np.ndarray]:
        student = build_student(recipe, data.classes, weights=False).eval()
        student.load_state_dict(weights)
        views = data.evaluation_views(source)
        with torch.inference_mode():
            pixels = torch.stack(
                [views.load(id, 0).pixels for id in range(len(source))]
            )
            logits = student(pixels).logits.float()
        return [int(source.label(id)) for id in range(len(source))], logits.softmax(
            1
        ).numpy()

    labels, shares = ask(averaged, data.val)
    assert data.test is not None
    assert len(data.test) + len(data.val) == 75
    assert answers["label"] == labels
    assert answers["cpu_ms"].keys() == {"student", "teacher"}
    assert min(answers["cpu_ms"].values()) > 0
    assert answers["student"] == shares.argmax(1).tolist()
    assert answers["student_share"] == pytest.approx(shares.max(1).tolist(), abs=2e-4)
    assert np.abs(ask(raw, data.val)[1] - shares).max() > 2e-3, (
        "the raw weights would not be noticed"
    )
    labels, shares = ask(averaged, data.test)
    right = int((shares.argmax(1) == labels).sum())
    low, high = (
        percent(end).removesuffix(" %")
        for end in wilson_interval(right / len(labels), len(labels))
    )
    tile = re.findall(
        r'<div class="tile"><b>(.*?)</b><span>(.*?)</span><small>(.*?)</small>', page
    )[0]
    assert tile[:2] == (percent(right / len(labels)), "test accuracy")
    assert tile[2] == f"95 % interval {low} to {high}"
    best = np.mean(np.equal(answers["student"], answers["label"]))
    assert re.search(
        r"<td>validation accuracy, chosen from \d+"
        rf" evaluations</td><td>{percent(best)}</td>",
        page,
    )


def test_chart_classes_and_confusions_are_those_of_the_answers(reported):
    _, page, answers = reported
    label, student, teacher = (
        np.array(answers[name]) for name in ("label", "student", "teacher")
    )
    drawn = charted(page, "Validation accuracy")
    assert max(drawn["tiny"]) == pytest.approx((student == label).mean(), abs=1e-4)
    assert drawn["teacher"] == pytest.approx(
        [(teacher == label).mean()] * len(drawn["tiny"]), abs=1e-4
    )
    table = page[page.index('<table class="confusion">') :]
    cells = re.findall(r"<td[^>]*>(\d*)</td>", table[: table.index("</table>")])
    counts = [
        [int(((label == i) & (student == j)).sum()) for j in range(3)] for i in range(3)
    ]
    assert [int(cell or 0) for cell in cells] == [
        count for row in counts for count in row
    ]
    names = ("apple", "fig", "pear")
    body = page[page.index("<h3>Accuracy by class") : page.index("<h3>Confusion")]
    gaps = dict(
        re.findall(r'title="(\w+): \d+ images">.*?class="gap">(.*?)</span>', body)
    )
    dots = re.findall(r'title="teacher (.*?)"></i>.*?title="student (.*?)"></i>', body)
    order = [names.index(name) for name in gaps]
    for label_index, dot in zip(order, dots, strict=True):
        members = label == label_index
        student_accuracy, teacher_accuracy = (
            (answer[members] == label_index).mean() for answer in (student, teacher)
        )
        assert dot == (percent(teacher_accuracy), percent(student_accuracy))
        few = f"{(student[members] == label_index).sum()} of {members.sum()}"
        assert gaps[names[label_index]] == (
            few
            if members.sum() < 20
            else f"{100 * (student_accuracy - teacher_accuracy):+.0f} points"
        )
    captions = re.findall(
        r"<figcaption><b>(\w+)</b><br>teacher: .*?>(\w+)</span> (\d+) %<br>student:"
        r" .*?>(\w+)<",
        page,
    )
    differ = [i for i in range(len(label)) if student[i] != teacher[i]]
    assert len(captions) == min(24, len(differ)) > 0
    expected = {
        (
            names[label[i]],
            names[teacher[i]],
            f"{100 * answers['teacher_share'][i]:.0f}",
            names[student[i]],
        )
        for i in differ
    }
    assert {*captions} <= expected
