"""Two exports as one model, through all three doors: the same predictions, each of the
model that it names.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import pickle
import re
import shutil
import time
from collections import Counter
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import chromium
import numpy as np
import pytest
import torch
from pieces import base, merged, paint, wait_until
from PIL import Image
from serving import Running, images, with_other_weights
from subjects import CLASSES, PIXELS, small_subject

import kd
from kd import config
from kd.config.schema import TaskSection
from kd.core.errors import ModelError
from kd.deploy.export import package
from kd.deploy.export.export import ExportOptions, export, write
from kd.deploy.serve import self_check
from kd.deploy.serve.decoding import decode, prepare
from kd.deploy.serve.limits import Limits, Problem
from kd.deploy.serve.self_check import SelfCheckError
from kd.files.pixels import BRANCHES, planes
from kd.jobs.train import train

COUNT = 200
SHARE = 0.5
"""Share of unsure images: the tiny student is right nearly always, so that no promise
on wrong ones has a threshold.
"""


@pytest.fixture(scope="module")
def small(distilled, once) -> Path:
    """An export that is unsure of about half of the images."""
    return once(
        "unsure",
        lambda folder: (
            export(
                distilled, folder / "export", ExportOptions(defer_share=SHARE)
            ).folder
        ),
    )


@pytest.fixture(scope="module")
def large(distilled, once) -> Path:
    """The export of the teacher."""
    return once(
        "unsure's teacher",
        lambda folder: export(distilled, folder / "export", teacher=True).folder,
    )


@pytest.fixture(scope="module")
def wide(photos, once) -> Path:
    """The export of a student for images of twice the side."""

    def build(folder: Path) -> Path:
        settings = base(photos, folder) | {
            "losses": [{"kind": "ce"}],
            "teacher": {"model": ""},
        }
        settings = merged(settings, {"data": {"image_size": 32}, "run": {"epochs": 1}})
        return export(train(config.load(settings)).folder, folder / "export").folder

    return once("wide", build)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> dict[str, bytes]:
    """JPEG files by name, which the student has never seen."""
    folder = tmp_path_factory.mktemp("pictures")
    paint(folder, (67, 67, 66), seed=7)
    files = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in sorted(folder.rglob("*.jpg"))
    }
    assert len(files) == COUNT
    return files


@pytest.fixture(scope="module")
def cascade(small, large):
    return kd.load(small, second=large)


def plain(answer: Any) -> dict[str, Any]:
    """Return an answer of Python as the JSON of the other doors."""
    row = {key: value for key, value in asdict(answer).items() if value is not None}
    row["top"] = [
        {key: value for key, value in entry.items() if value is not None}
        for entry in row["top"]
    ]
    return json.loads(json.dumps(row))


def sample(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_three_doors_give_the_predictions_of_the_two_exports(
    small, large, cascade, pictures, command, tmp_path
):
    alone = kd.load(small)
    teacher = kd.load(large)
    expected = {}
    for name, data in pictures.items():
        first = alone(data, top=3)
        row = plain(first if first.sure else teacher(data, top=3))
        expected[name] = {
            **row,
            "sure": first.sure,
            "model": "first" if first.sure else "second",
        }
    models = Counter(row["model"] for row in expected.values())
    assert min(models.values()) >= 20, models

    assert {
        name: plain(cascade(data, top=3)) for name, data in pictures.items()
    } == expected

    for name, data in pictures.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    written = tmp_path / "rows.jsonl"
    argv = (small, tmp_path / "in", "--second", large, "--top", 3, "--to", written)
    answer = command("predict", *argv)
    assert answer.code == 0, answer
    assert f"{models['second']} of them by the second model" in answer.out
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert {row.pop("image"): row for row in rows} == expected

    with Running(small, "--second", str(large)) as server:
        names = list(pictures)
        served = {
            name: server.post(pictures[name], path="/invocations?top=3").json
            for name in names[:20]
        }
        assert {name: response["predictions"] for name, response in served.items()} == {
            n: [expected[n]] for n in names[:20]
        }
        for start in range(20, COUNT, 15):
            batch = names[start : start + 15]
            reply = server.post(
                images(*map(pictures.get, batch)),
                "application/json",
                "/invocations?top=3",
            )
            assert reply.json["predictions"] == [expected[name] for name in batch]
        metrics = server.get("/metrics").body.decode()
        line = (
            server.post(
                pictures[names[0]], path="/invocations?top=1", accept="text/csv"
            )
            .body.decode()
            .strip()
        )
    versions = [
        json.loads((folder / "manifest.json").read_text())["version"]
        for folder in (small, large)
    ]
    assert served[names[0]]["version"] == "+".join(versions)
    row = expected[names[0]]
    assert (
        line
        == f"{row['label']},{row['score']},{str(row['sure']).lower()},{row['model']}"
    )

    stated = json.loads((small / "manifest.json").read_text())["output"]["defer"][
        "stated"
    ]["model.onnx"]
    assert sample(metrics, "kd_images_total") == COUNT
    assert sample(metrics, "kd_passed_on_total") == models["second"]
    shares = {
        source: sample(metrics, f'kd_passed_on_share{{of="{source}"}}')
        for source in ("endpoint", "validation")
    }
    assert shares == pytest.approx(
        {"endpoint": models["second"] / COUNT, "validation": stated["passed_on"]},
        abs=1e-6,
    )
    ends = [
        sample(metrics, f'kd_passed_on_share{{of="validation {end}"}}')
        for end in ("low", "high")
    ]
    assert ends == pytest.approx(stated["passed_on_interval"], abs=1e-6)
    assert ends[0] <= shares["endpoint"] <= ends[1]
    assert sample(metrics, "kd_self_check") == 1
    orders = {tuple(response["predictions"][0]) for response in served.values()}
    assert orders == {("label", "score", "top", "sure", "model")}


def test_the_labels_that_are_returned_are_counted(tmp_path):
    """The second model here never agrees with the first."""
    folders = []
    for name, options in (
        ("first", ExportOptions(defer_share=SHARE)),
        ("second", ExportOptions()),
    ):
        subject = small_subject(tmp_path / "runs")
        if name == "second":
            with torch.no_grad():
                subject.student.network.head.weight *= -1  # type: ignore[union-attr, operator]
        folders.append(write(subject, tmp_path / name, options).folder)
    pixels = list(PIXELS.transpose(0, 2, 3, 1))
    alone, returned = (
        Counter(row.label for row in kd.load(folders[0], second=second)(pixels))
        for second in (None, folders[1])
    )
    assert alone != returned
    with Running(folders[0], "--second", str(folders[1])) as server:
        for image in pixels:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG")
            server.post(file.getvalue())
        metrics = server.get("/metrics").body.decode()
    labels = re.findall(
        r'^kd_labels_total\{label="(\w+)"\} (\S+)$', metrics, re.MULTILINE
    )
    assert {label: float(count) for label, count in labels} == returned
    assert re.findall(r"^kd_expected_accuracy.*", metrics, re.MULTILINE) == []
    assert "# HELP kd_expected_accuracy Unknown with a second model" in metrics


def test_an_endpoint_alone_counts_nothing_passed_on(small, pictures):
    with Running(small) as server:
        assert (
            "model"
            not in server.post(next(iter(pictures.values()))).json["predictions"][0]
        )
        assert "passed_on" not in server.get("/metrics").body.decode()


def test_a_cascade_is_opened_again_in_another_process(cascade, pictures):
    again = pickle.loads(pickle.dumps(cascade))
    few = list(pictures.values())[:30]
    assert again(few) == cascade(few)
    assert {answer.model for answer in again(few)} == {"first", "second"}


def test_an_image_of_several_labels_is_passed_on_if_one_is_unsure(tmp_path):
    exports = []
    for name, options in (
        ("first", ExportOptions(defer_share=SHARE)),
        ("second", ExportOptions()),
    ):
        subject = small_subject(tmp_path / "runs")
        with subject.images() as read:
            batches = [
                (pixels, np.eye(len(CLASSES), dtype=np.int8)[labels])
                for pixels, labels in read(0)
            ]
        if name == "second":
            with torch.no_grad():
                subject.student.network.head.weight *= -1

        def opened(batches=batches):
            return nullcontext(lambda limit, training=False: batches)

        subject = replace(
            subject,
            recipe=subject.recipe.with_(task=TaskSection(kind="label_sets")),
            images=opened,
        )
        exports.append(write(subject, tmp_path / name, options).folder)
    first = kd.load(exports[0])
    second = kd.load(exports[1])
    pair = kd.load(exports[0], second=exports[1])
    for image in PIXELS.transpose(0, 2, 3, 1):
        alone = first(image)
        answer = pair(image)
        assert alone.sure == all(entry.sure for entry in alone.top)
        expected = (
            replace(alone, model="first")
            if alone.sure
            else replace(second(image), sure=False, model="second")
        )
        assert answer == expected
    assert {pair(image).model for image in PIXELS.transpose(0, 2, 3, 1)} == {
        "first",
        "second",
    }


def test_other_sizes_share_one_decoding_for_the_larger(small, wide):
    """A JPEG that the first alone would decode at a quarter of its sides comes at half
    of them.
    """
    pair = kd.load(small, second=wide)
    alone = kd.load(small)
    files = self_check.pictures(
        [branch for branch in BRANCHES if branch[0] == "JPEG"], 60, 8
    )
    differed = 0
    for data in files:
        opened = pair.open(data, Limits())
        assert opened.image.size == kd.load(wide).open(data, Limits()).image.size
        shared = planes(decode(opened, pair.bits), pair.size, pair.crop).astype(int)
        separate = prepare(data, alone.size, alone.crop).pixels.astype(int)
        change = np.abs(shared - separate)
        differed += change.max() > 0
        assert (
            change.mean() < 4
        )  # levels of 255; measured 3.0 and 26, on 200 photographs 1.3 and 20
        assert change.max() <= 32
    assert differed


def test_the_memory_limit_is_that_of_the_larger_decoding(small, wide):
    """90 pixels a side: the first alone reads 45 of them, for the second all are
    decoded.
    """
    (data,) = self_check.pictures([("JPEG", "RGB", 1, {})], 90, 8)
    limits = Limits(max_pixels=6000)
    assert kd.load(small).open(data, limits).image.size == (56, 45)
    with pytest.raises(Problem, match="decoding it needs the memory") as problem:
        kd.load(small, second=wide).open(data, limits)
    assert problem.value.status == 413


def renamed(folder: Path, target: Path, *names: tuple[str, str]) -> Path:
    """Copy an export with other names for some classes."""
    shutil.copytree(folder, target)
    config = target / "config.json"
    swapped = {f'"{old}"': f'"{new}"' for old, new in names}
    pattern = "|".join(swapped)
    config.write_text(
        re.sub(pattern, lambda match: swapped[match[0]], config.read_text())
    )
    manifest = json.loads((target / "manifest.json").read_text())
    facts = {
        key: value
        for key, value in manifest.items()
        if key not in ("files", "checksum", "validation")
    }
    package.seal(target, facts)
    return target


def test_exports_that_are_no_pair_are_one_line_errors(
    small, large, exported, embedded, teacher, refused, tmp_path
):
    def error_line(first: Path, second: Path) -> str:
        to = ("--to", tmp_path / "rows.csv")
        lines = {refused("serve", first, "--port", 0, "--second", second)}
        lines.add(refused("predict", first, tmp_path, *to, "--second", second))
        with pytest.raises(ModelError) as error:
            kd.load(first, second=second)
        (line,) = lines
        assert line == f"kd: {error.value}" or line.endswith(str(error.value))
        return line

    without = error_line(exported, large)
    assert "--defer" in without
    assert f"export: '{exported}'" in without
    assert "it is the first model" in error_line(small, small)
    assert "kd-export RUN --teacher" in error_line(small, teacher)
    assert "0 classes, the first model 3" in error_line(small, embedded / "export")
    assert "class 1 is 'figs'" in error_line(
        small, renamed(large, tmp_path / "other", ("fig", "figs"))
    )
    exchanged = renamed(large, tmp_path / "exchanged", ("fig", "pear"), ("pear", "fig"))
    assert "class 1 is 'pear', that of the first model is 'fig'" in error_line(
        small, exchanged
    )


@pytest.mark.parametrize("offered", ["none", "another", "accepted"])
def test_an_accepted_pair_without_its_second_is_a_warning(
    small, large, pictures, offered, command, caplog, tmp_path
):
    """All three doors name the second export with which the limits were accepted."""
    manifest = json.loads((small / "manifest.json").read_text())
    version = json.loads((large / "manifest.json").read_text())["version"]
    accepted = f"tiny-teacher {'0' * 12 if offered == 'another' else version}"
    claim = {
        "sentence": "drop<=1",
        "threads": 1,
        "file": "model.onnx",
        "found": {"drop": 0.5},
        "second": accepted,
    }
    facts = {
        key: value
        for key, value in manifest.items()
        if key not in ("files", "checksum")
    }
    first = shutil.copytree(small, tmp_path / "first")
    package.seal(first, {**facts, "cascade": claim})
    second = () if offered == "none" else ("--second", large)

    kd.load(first, second=None if offered == "none" else large)
    loaded = caplog.text
    (tmp_path / "a.jpg").write_bytes(next(iter(pictures.values())))
    predicted = command(
        "predict", first, tmp_path / "a.jpg", *second, "--to", tmp_path / "rows.csv"
    )
    assert predicted.code == 0, predicted
    with Running(first, *map(str, second)) as server:
        assert server.stop() == 0
    for text in (loaded, predicted.err, server.errors):
        lines = [line for line in text.splitlines() if accepted in line]
        assert len(lines) == (offered != "accepted"), text
        assert all(
            (f"{version} is given" if offered == "another" else "none is given") in line
            for line in lines
        )


def test_the_self_check_covers_the_second_model(
    small, large, pictures, command, tmp_path
):
    folder = with_other_weights(large, tmp_path / "large")
    with pytest.raises(SelfCheckError, match=r"--second: .* differ"):
        kd.load(small, second=folder)
    with Running(small, "--second", str(folder), wait=False) as server:
        while "being loaded" in (ping := server.get("/ping")).json["detail"]:
            time.sleep(0.05)
        assert ping.status == 503
        assert "--second: " in ping.json["detail"]
        assert sample(server.get("/metrics").body.decode(), "kd_self_check") == 0
    (tmp_path / "a.jpg").write_bytes(next(iter(pictures.values())))
    answer = command(
        "predict",
        small,
        tmp_path / "a.jpg",
        "--second",
        folder,
        "--to",
        tmp_path / "rows.csv",
    )
    assert answer.code == 3, answer
    assert kd.load(small, second=folder, self_check=False).check_itself() is None


def test_the_page_says_which_model_predicted(small, large, cascade, pictures, tmp_path):
    if chromium.path() is None:
        pytest.skip("no chromium here: apt-get install chromium")
    texts = {}
    with (
        Running(small, "--second", str(large)) as server,
        chromium.Page(tmp_path / "profile") as page,
    ):
        page.open(f"http://127.0.0.1:{server.port}/")
        for model in ("first", "second"):
            data = next(
                data for data in pictures.values() if cascade(data).model == model
            )
            (tmp_path / f"{model}.jpg").write_bytes(data)
            page.choose("#file", tmp_path / f"{model}.jpg")
            alt = f"The chosen picture: {model}.jpg"
            page.until(
                f"document.getElementById('shown').alt === '{alt}' &&"
                " !answer.hasAttribute('aria-busy')"
            )
            texts[model] = page.run("document.getElementById('best').textContent")
    assert "by the second model" in texts["second"]
    assert "second model" not in texts["first"]
    assert "unsure" not in texts["first"]


def test_sigterm_while_passing_on_loses_nothing(small, large, cascade, pictures):
    """Twelve requests come faster than one thread predicts; each is answered in full by
    the second model.
    """

    def enlarged(data: bytes) -> bytes:
        file = io.BytesIO()
        Image.open(io.BytesIO(data)).resize((1200, 1200)).save(file, "JPEG", quality=90)
        return file.getvalue()

    unsure = [
        data
        for data in map(enlarged, pictures.values())
        if cascade(data).model == "second"
    ][:8]
    expected = [plain(answer) for answer in cascade(unsure)]
    body = images(*unsure)
    with (
        Running(small, "--second", str(large), "--slots", "1") as server,
        ExitStack() as stack,
    ):
        clients = []
        for _ in range(12):
            client = stack.enter_context(
                closing(
                    http.client.HTTPConnection(server.host, server.port, timeout=30)
                )
            )
            client.request(
                "POST", "/invocations", body, {"content-type": "application/json"}
            )
            clients.append(client)
        wait_until(
            lambda: sample(server.get("/metrics").body.decode(), "kd_in_flight") >= 2
        )
        assert server.stop() == 0, server.errors
        answered = [json.loads(client.getresponse().read()) for client in clients]
        pid = server.pid
    assert [answer["predictions"] for answer in answered] == [expected] * 12
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "passed_on=8" in server.errors
