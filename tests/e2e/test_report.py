"""The report of a run in a real browser: no error, no request, and the numbers of the
run's files.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import chromium
import pytest
import torch
from charted import charted

import kd
from kd.core.text import format_dollars
from kd.engine.monitor.profiler import Profiler
from kd.parts.tasks import single_label
from kd.study.report.page import render
from kd.study.report.record import Picture, Predictions, RunRecord

CUT = (
    "[...document.querySelectorAll('.name, figcaption, td')].filter(one =>"
    " one.scrollWidth > one.clientWidth + 1)"
)
CUT += ".map(one => one.textContent)"
WIDER = (
    "[...document.querySelectorAll('#what-a-step-computes .card')].filter(one =>"
    " one.scrollWidth > one.clientWidth)"
)
WIDER += ".map(one => one.innerText)"
OVERLAPPING = """
[...document.querySelectorAll("figure, .dumb")].map(one => one.getBoundingClientRect()).filter((one, i, all) =>
  all.slice(i + 1).some(other => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 1 && other.top < one.bottom - 1)).map(one => one.top)
"""
BROKEN = """
[...document.querySelectorAll("td:first-child")].flatMap(
  cell => [...cell.textContent.matchAll(/\\S+/g)].filter(word => {
  const range = document.createRange();
  range.setStart(cell.firstChild, word.index);
  range.setEnd(cell.firstChild, word.index + word[0].length);
  return new Set([...range.getClientRects()].map(one => one.top)).size > 1;
}).map(word => word[0]))
"""
"""Words of the first columns that stand on several lines."""


@pytest.fixture
def page(tmp_path):
    if chromium.path() is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with chromium.Page(tmp_path / "profile", 1200, 900) as opened:
        yield opened


@pytest.fixture
def run(distilled, tmp_path) -> Path:
    """A finished run folder that may be written into."""
    return Path(shutil.copytree(distilled, tmp_path / "run"))


def rows(run: Path, kind: str) -> list[dict[str, float]]:
    parsed = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in parsed if row["kind"] == kind]


def test_the_page_shows_the_numbers_of_the_files(run, page, command):
    answer = command("report", run, "price.per_hour=36")
    assert answer.code == 0, answer
    assert "accuracy" in answer.out
    page.open(f"file://{run / 'report.html'}")
    train = rows(run, "train")
    val = rows(run, "val")
    best = max(val, key=lambda row: row["accuracy"])

    text = (run / "report.html").read_text()
    loss = charted(text, "Training loss")
    assert loss["step"] == [row["step"] for row in train]
    assert loss["tiny"] == pytest.approx([row["loss"] for row in train], rel=1e-3)
    accuracy = charted(text, "Validation accuracy")
    assert accuracy["tiny"] == pytest.approx([row["accuracy"] for row in val], abs=1e-4)
    assert accuracy["teacher"][0] == pytest.approx(best["teacher_accuracy"], abs=1e-3)
    tiles = page.run(
        "[...document.querySelectorAll('.tile b')].map(tile => tile.textContent)"
    )
    assert tiles[0] == f"{100 * best['accuracy']:.1f} %"
    billable = json.loads((run / "manifest.json").read_text())["billable_seconds"]
    assert len(tiles) <= 6
    below = page.run(
        "[...document.querySelectorAll('.tiles + .card td')].map(cell =>"
        " cell.textContent)"
    )
    assert f"$ {format_dollars(36 * billable / 3600)}" in below

    timeline = [
        json.loads(line) for line in (run / "timeline_0.jsonl").read_text().splitlines()
    ]
    total = float(page.run("document.querySelector('.whole').dataset.total"))
    assert total == pytest.approx(sum(row["wall_ms"] for row in timeline), rel=0.02)

    cells = page.run(
        "[...document.querySelectorAll('.confusion td')].map(cell => +cell.textContent)"
    )
    assert sum(cells) == 13
    assert sum(cells[::4]) / 13 == pytest.approx(
        best["accuracy"]
    )  # the diagonal of three classes
    answers = json.loads((run / "answers.json").read_text())
    differ = sum(
        by_student != by_teacher
        for by_student, by_teacher in zip(
            answers["student"], answers["teacher"], strict=True
        )
    )
    assert page.run("document.querySelectorAll('.photos figure').length") == differ

    assert not page.run("document.querySelector('.numbers table').checkVisibility()")
    page.run("document.querySelector('.numbers summary').click()")
    assert page.run("document.querySelector('.numbers table').checkVisibility()")
    assert page.run("document.scripts.length") == 0
    assert page.problems == []
    assert [
        url for url in page.requests if not url.startswith(("file:", "data:"))
    ] == []


def test_two_runs_stand_side_by_side_and_a_hostile_name_is_text(
    run, page, command, tmp_path
):
    second_run = Path(shutil.copytree(run, tmp_path / "other"))
    config = second_run / "config.yaml"
    config.write_text(
        config.read_text()
        .replace(
            "name: tiny", "name: '<b id=evil>x</b>_of_another_seed_and_a_long_name'"
        )
        .replace("lr: 0.002", "lr: 0.5")
    )
    target = tmp_path / "both.html"
    assert command("report", run, second_run, "--to", target).code == 0
    page.open(f"file://{target}")
    text = page.run("document.querySelector('#side-by-side').innerText")
    assert "optimizer.lr" in text
    assert "0.5" in text
    assert page.run("document.getElementById('evil')") is None
    assert "<b id=evil>" in page.run("document.querySelector('h1').textContent")
    for width in (1100, 700):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert page.run(BROKEN) == []
    assert page.problems == []


def profiled(run: Path, dtype: torch.dtype) -> None:
    """Write the profile of two steps of a small network with attention into a run
    folder.
    """
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    optimizer_of = torch.optim.AdamW
    optimizer = optimizer_of(layer.parameters(), fused=True)
    profiler = Profiler([1, 2], run / "profile", False, lambda _name: nullcontext())
    for step in range(1, 4):
        profiler.step(step)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            tokens = torch.zeros(8, 16, 32)
            layer(tokens, tokens, tokens, need_weights=dtype == torch.float32)[
                0
            ].sum().backward()
        optimizer.step()


def test_two_profiles_stand_side_by_side(run, page, command, tmp_path):
    second_run = Path(shutil.copytree(run, tmp_path / "other"))
    target = tmp_path / "both.html"
    answer = command("report", run, second_run, "--to", target, "--images", "1")
    assert answer.out.count("has no profile of its operators") == 2
    page.open(f"file://{target}")
    text = page.run("document.querySelector('#what-a-step-computes').innerText")
    assert text.count("profile.steps=[") == 2
    assert "waiting for data" in text  # which each run has recorded

    drawn = (
        "[...document.querySelectorAll('.card .bars')].map(one =>"
        " one.querySelectorAll('.bar').length)"
    )
    profiled(run, torch.float32)
    command("report", run, second_run, "--to", target, "--images", "1")
    page.open(f"file://{target}")
    assert 5 in page.run(drawn), "no bar of a run without a profile"
    profiled(second_run, torch.bfloat16)
    answer = command("report", run, second_run, "--to", target, "--images", "1")
    assert "has no profile" not in answer.out
    (products,) = (
        line for line in answer.out.splitlines() if line.startswith("| matrix products")
    )
    assert products.index("float32") < products.index("bfloat16")
    (attention,) = (
        line for line in answer.out.splitlines() if line.startswith("| attention")
    )
    assert attention.index("unfused") < attention.index("bfloat16, fused")
    page.open(f"file://{target}")
    bars = page.run(drawn)
    profiles = [
        json.loads((folder / "profile" / "operators.json").read_text())
        for folder in (run, second_run)
    ]
    top = set()
    for profile in profiles:
        sums = Counter()
        for row in profile["operators"]:
            sums[row["name"]] += row["ms"]
        top |= {name for name, _ in sums.most_common(5)}
    assert 2 * len(top) in bars
    batch = int(kd.load_config(str(run / "config.yaml")).data.batch_size)
    names = ("aten::mm", "aten::addmm", "aten::linear")
    ms = (
        sum(row["ms"] for row in profiles[0]["operators"] if row["name"] in names)
        / profiles[0]["steps"]
        / batch
    )
    assert float(products.split("|")[2].split()[0]) == pytest.approx(ms, rel=0.05)
    for width in (1100, 700):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert page.run(WIDER) == []
    assert page.problems == []


def test_a_damaged_profile_is_one_line(run, refused):
    (run / "profile").mkdir()
    rows = (
        '"wall_ms": 5.0, "operators": [{"name": "aten::mm", "dtype": "", "ms": "many"}]'
    )
    for content in (
        '{"steps": 2}',
        "[]",
        f'{{"steps": 2, {rows}}}',
        '{"steps": 0, "wall_ms": 1, "operators": []}',
    ):
        (run / "profile" / "operators.json").write_text(content)
        line = refused("report", run, "--images", "1")
        assert "operators.json' is damaged" in line


def test_three_hundred_classes_of_long_nested_names_fit(page, tmp_path):
    """Names were cut to "Packages/Milk/Arla-", captions lay over each other, and nobody
    said that 24 are drawn.
    """
    kinds = ("Milk", "Sour-Milk", "Yoghurt", "Juice")
    names = [
        f"Packages/{kinds[i % 4]}/Arla-Ecological-Medium-Fat-{kinds[i % 4]}-{i:03d}"
        for i in range(300)
    ]
    label = [i for i in range(300) for _ in range(3)]
    answers = [(i + (i % 7 == 0) * 4) % 300 for i in label]
    picture = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
    pictures = [
        Picture(
            f"{names[i]}/1.jpg", names[i], names[i], 0.9, names[i + 4], 0.6, picture
        )
        for i in range(24)
    ]
    predictions = Predictions(
        names, label, answers, label, of=len(label), pictures=pictures
    )
    run = RunRecord(
        "x" * 90,
        {},
        {"classes": names},
        [],
        [],
        [],
        single_label.SCORES,
        answers=predictions,
    )
    file = tmp_path / "many.html"
    file.write_text(render([run]))
    page.open(f"file://{file}")
    for width in (1200, 420):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(CUT) == []
        assert page.run(OVERLAPPING) == []
    labels = page.run(
        "[...document.querySelectorAll('.dumb .name')].map(one => one.textContent)"
    )
    assert len(set(labels)) == 24
    text = page.run("document.querySelector('#predictions').innerText")
    assert "24 of 300 classes are drawn" in text
    assert "The 20 most frequent of 43 confusions" in text
    assert page.problems == []


def test_a_report_without_the_teacher_says_so(run, command):
    answer = command(
        "report", run, "teacher.model=gone/away", "--to", run / "page.html"
    )
    assert answer.code == 0, answer
    text = (run / "page.html").read_text()
    assert "No predictions of the models on validation images: teacher" in text
    assert 'class="confusion"' not in text


def test_cached_predictions_require_equal_weights_and_data(
    run, photos, command, tmp_path
):
    """The answers on other images were shown."""
    page = tmp_path / "page.html"
    assert command("report", run, "--to", page).code == 0
    recorded = [json.loads((run / "answers.json").read_text())]
    fewer_photos = Path(shutil.copytree(photos, tmp_path / "photos"))
    min((fewer_photos / "val").rglob("*.jpg")).unlink()
    for options in (
        [f"data.root={fewer_photos}"],
        [f"data.root={fewer_photos}", "--images", "5"],
    ):
        assert command("report", run, *options, "--to", page).code == 0
        recorded.append(json.loads((run / "answers.json").read_text()))
    assert [len(answers["ids"]) for answers in recorded] == [13, 12, 5]
    assert [answers["of"] for answers in recorded] == [13, 12, 12]


def test_files_that_kd_did_not_write_are_escaped_or_refused(run, command, refused):
    rows_file = run / "timeline_0.jsonl"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    rows[-1]["ms"]['"><img src=x>'] = 1e6
    torn = '{"step": 3, "ms": {"data": 1.0}' + json.dumps(rows[0])
    rows_file.write_text("\n".join([torn, *map(json.dumps, rows)]) + "\n")
    assert command("report", run, "run.name='<!--<script>'", "--images", "5").code == 0
    page = (run / "report.html").read_text()
    assert "<img src=x>" not in page
    assert "<!--" not in page
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": "three", "loss": 1.0}\n')
    for options in ((), ("--price", "price.per_hour=1")):
        assert "is corrupt or was edited" in refused("report", run, *options)


def test_a_killed_run_says_so(run, command):
    """Its page looked like that of a run that had come to its end, and no rule had
    looked at it.
    """
    finished = command("report", run, "--images", 3)
    assert "not finished" not in finished.out
    assert "Not judged" not in (run / "report.html").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(json.loads(line)["step"] for line in lines)
    (run / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] <= last // 2)
    )
    (run / "findings.json").unlink()
    stopped = command("report", run, "--images", 3)
    assert stopped.code == 0, stopped
    assert f"has not finished: step {last // 2}, epoch" in stopped.out
    assert "of 6. It was stopped" in stopped.out
    page = (run / "report.html").read_text()
    assert "has not finished" in page
    assert "Not judged" in page


def test_prices_go_into_a_file_and_a_folder_may_have_an_equals_sign(
    run, command, tmp_path
):
    shutil.copytree(run, tmp_path / "lr=0.1")
    answer = command(
        "report",
        tmp_path / "lr=0.1",
        "price.per_hour=36",
        "--price",
        "--to",
        tmp_path / "prices.md",
    )
    assert answer.code == 0, answer
    assert (tmp_path / "prices.md").read_text() == answer.out
    assert "| 36.000 |" in answer.out


def test_runs_of_three_seeds_are_one_mean(run, command, tmp_path):
    config = (run / "config.yaml").read_text()
    runs = []
    for seed in range(3):
        runs.append(Path(shutil.copytree(run, tmp_path / f"seed{seed}")))
        text = config.replace("seed: 0", f"seed: {seed}", 1).replace(
            "name: tiny", f"name: seed{seed}"
        )
        (runs[-1] / "config.yaml").write_text(text)
    answer = command("report", *runs, "--images", "5")
    assert (
        "Mean of 3 seeds (seed0, seed1, seed2), 95 % interval: accuracy" in answer.out
    ), answer


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["report", "nowhere"], "not a run folder"),
        (["report", "RUN", "--price"], "no run has a price"),
        (["report", "a=b"], "'a=b' is no run folder"),
        (
            ["report", "RUN", "price.instance=ml.p9.huge"],
            "price.instance: is 'ml.p9.huge'",
        ),
        (["report", "RUN", "optimizer.lrr=1"], "optimizer.lrr: no such key"),
        (["report", "RUN", "--images", "-5"], "'-5' is not a whole number"),
        (["train", "CONFIG", "price.instance=ml.p4d.24xlarg"], "Did you mean"),
    ],
)
def test_what_cannot_be_reported_is_refused(argv, words, run, written, refused):
    named = {"RUN": run, "CONFIG": written()}
    assert words in refused(*(named.get(word, word) for word in argv))
