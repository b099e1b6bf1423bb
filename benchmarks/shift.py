"""How soon an export notices that photographs change, how often it is wrong about it,
and what that costs.

    python benchmarks/shift.py EXPORT IMAGES [--unknown FOLDER] [--streams 20] [--images 5000]

IMAGES has a folder for each class, with images that the student was not trained on.
Those of classes that the export does not know are the unknown ones, with those of
`--unknown`. For each stream the images are split anew: 2,000 are the reference, as
`kd-export` would record it, the others the stream. A clean stream has 2,000 images.
Each other stream is clean for 1,000 to 1,249 images (0 to 249 before a changed mix of
labels), so that the change comes anywhere in a window, and then changed; its delay is
the number of changed images until the alarm.

One student for the file beside this script: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from _record import write
from kd.deploy.serve.decoding import OpenedImage, prepare
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import LoadedGraph, describe, load
from kd.deploy.shift import BOUNDS, CONFIDENCE, WINDOW, Reference, ShiftWatch, measure

REFERENCE = 2000
STREAM = 2000
CHANGED = 1000
Change = Callable[[Image.Image], Image.Image]


def blur(radius: float) -> Change:
    """Return a Gaussian blur; the radius is a share of the shorter side."""
    return lambda image: image.filter(
        ImageFilter.GaussianBlur(radius * min(image.size))
    )


def dark(factor: float) -> Change:
    """Return what multiplies every value."""
    return lambda image: ImageEnhance.Brightness(image).enhance(factor)


def camera(scale: float, quality: int) -> Change:
    """Return another camera: fewer pixels, and a stronger compression."""

    def change(image: Image.Image) -> Image.Image:
        small = image.resize(
            [max(1, round(scale * side)) for side in image.size],
            Image.Resampling.BILINEAR,
        )
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        return Image.open(file).convert("RGB")

    return change


CHANGES: dict[str, Change] = {
    "blur": blur(0.03),
    "blur, weak": blur(0.015),
    "darker light": dark(0.5),
    "darker light, weak": dark(0.75),
    "another camera": camera(0.5, 30),
    "another camera, weak": camera(0.75, 60),
}
MIXES = {
    "one label in 40 %": 0.4,
    "one label in 25 %": 0.25,
    "every second label three times as often": 0.0,
}


def answered(
    model: LoadedGraph, paths: Sequence[Path], change: Change | None = None
) -> list[tuple[dict[str, Any], tuple]]:
    """Return the answer of each image and what is measured of its pixels."""
    answers = []
    for path in paths:
        if change:
            with Image.open(path) as image:
                opened = OpenedImage(change(image.convert("RGB")), "", 0.0)
        else:
            opened = model.open(path, Limits())
        prediction = model.predict(opened, 1)
        answers.append((prediction.row, prediction.measures))
    return answers


def shares(of: str, classes: Sequence[str]) -> np.ndarray:
    """Return how frequent each class is in a changed mix."""
    first = MIXES[of]
    if first:
        return np.array(
            [first] + [(1 - first) / (len(classes) - 1)] * (len(classes) - 1)
        )
    weights = np.array([3.0 if i % 2 else 1.0 for i in range(len(classes))])
    return weights / weights.sum()


def mixed(
    rng: np.random.Generator, pool: np.ndarray, truth: np.ndarray, share: np.ndarray
) -> np.ndarray:
    """Draw images of a pool so that classes are as frequent as `share`, without an
    image twice.
    """
    groups = [
        rng.permutation(pool[truth[pool] == label]) for label in range(len(share))
    ]
    images = min(
        CHANGED,
        int(
            min(
                len(group) / fraction
                for group, fraction in zip(groups, share, strict=True)
            )
        ),
    )
    counts = rng.multinomial(images, share)
    return rng.permutation(
        np.concatenate(
            [group[:count] for group, count in zip(groups, counts, strict=True)]
        )
    )


def reference(
    model: LoadedGraph, answers: Sequence[tuple[dict, tuple]], numbers: Sequence[str]
) -> Reference:
    """Return the reference that these answers give, with some of the numbers."""
    empty = Reference.of(model.labels, (), True)
    counted = Reference(
        model.labels, {name: BOUNDS[name] for name in numbers}, empty.tally, True
    )
    counted.tally = counted.empty()
    for answer, measures in answers:
        counted.count(counted.tally, answer, _some(measures, numbers))
    return counted


def _some(measures: tuple, numbers: Sequence[str]) -> tuple:
    return measures if len(numbers) > 1 else ()


def watched(
    of: Reference, clean: Sequence[tuple], changed: Sequence[tuple]
) -> dict[str, Any]:
    """Return the alarms of the clean part, and after how many changed images each alarm
    came.
    """
    watch = ShiftWatch(of)
    numbers = list(of.bounds)
    for answer, measures in clean:
        watch.add(answer, _some(measures, numbers))
    row: dict[str, Any] = {
        f"false_{name}": count for name, count in watch.alarms.items()
    }
    delays: dict[str, Any] = dict.fromkeys(watch.alarms, "")
    before = dict(watch.alarms)
    for count, (answer, measures) in enumerate(changed, 1):
        watch.add(answer, _some(measures, numbers))
        for name in delays:
            if delays[name] == "" and watch.alarms[name] > before[name]:
                delays[name] = count
    row |= {f"delay_{name}": delay for name, delay in delays.items()}
    confidence = [answer["score"] for answer, _ in changed]
    return row | {
        "changed": len(changed),
        "expected_accuracy": round(float(np.mean(confidence or [0])), 4),
    }


def streams(
    model: LoadedGraph, images: Path, unknown: Path | None, count: int, limit: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each stream, kind of change and set of numbers."""
    rng = np.random.default_rng(0)
    paths = {name: sorted((images / name).iterdir()) for name in os.listdir(images)}
    every = rng.permutation(
        [(str(path), i) for i, name in enumerate(model.labels) for path in paths[name]]
    )[:limit]
    paths_of_known = [Path(path) for path, _ in every]
    truth = np.array([int(label) for _, label in every])
    new = [
        path
        for name, folder in paths.items()
        if name not in model.labels
        for path in folder
    ]
    new += sorted(path for path in unknown.rglob("*.jpg")) if unknown else []
    clean = answered(model, paths_of_known)
    changed = {
        name: answered(model, paths_of_known, change)
        for name, change in CHANGES.items()
    }
    strange = answered(model, [new[i] for i in rng.permutation(len(new))[:CHANGED]])
    right = {name: [model.labels[t] == a["label"] for (a, _), t in zip(answers, truth, strict=True)]
             for name, answers in {"clean": clean, **changed}.items()}  # fmt: skip
    for stream in range(count):
        order = rng.permutation(len(paths_of_known))
        ours = order[:REFERENCE]
        remaining = order[REFERENCE:]
        begin = 4 * WINDOW + int(rng.integers(WINDOW))
        after = remaining[begin : begin + CHANGED]
        tried: dict[str, tuple[int, Any]] = {
            "clean": (STREAM, ()),
            "unknown classes": (begin, None),
        }
        tried |= {name: (begin, after) for name in changed}
        early = begin % WINDOW  # a changed mix takes many images of one class
        tried |= {
            name: (
                early,
                mixed(rng, remaining[early:], truth, shares(name, model.labels)),
            )
            for name in MIXES
        }
        for numbers in (list(BOUNDS), [CONFIDENCE]):
            of = reference(model, [clean[i] for i in ours], numbers)
            for name, (first, chosen) in tried.items():
                source = changed.get(name, clean)
                later = strange if chosen is None else [source[i] for i in chosen]
                row = {
                    "stream": stream,
                    "numbers": "+".join(numbers),
                    "change": name,
                    "clean": first,
                }
                row |= watched(of, [clean[i] for i in remaining[:first]], later)
                hits = (
                    [right.get(name, right["clean"])[i] for i in chosen]
                    if chosen is not None
                    else [False]
                )
                yield row | {"accuracy": round(float(np.mean(hits)), 4) if hits else ""}


def cost(
    export: Path,
    photo: bytes,
    answers: Sequence[tuple],
    model: LoadedGraph,
    posts: int = 1500,
) -> dict[str, Any]:
    """Return the CPU time of what is counted beside that of an answer of the endpoint,
    microseconds an image.
    """
    argv = [
        sys.executable,
        "-m",
        "kd.cli",
        "serve",
        str(export),
        "--port",
        "0",
        "--threads",
        "1",
        "--quiet",
    ]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(re.findall(r":(\d+) ", server.stdout.readline())[0])
        client = http.client.HTTPConnection("127.0.0.1", port)

        def ask(path: str, body: bytes | None = None) -> int:
            client.request(
                "POST" if body else "GET",
                path,
                body,
                {"content-type": "image/jpeg"} if body else {},
            )
            answer = client.getresponse()
            answer.read()
            return answer.status

        while ask("/ping") != 200:
            time.sleep(0.1)
        cpu_seconds = []
        for _ in range(2):  # the first is to warm up
            before = _cpu(server.pid)
            for _ in range(posts):
                assert ask("/invocations", photo) == 200
            cpu_seconds.append((_cpu(server.pid) - before) / posts)
    finally:
        server.terminate()
        server.wait()
    pixels = prepare(photo, model.size, model.crop, Limits()).pixels
    rounds = []
    watch = ShiftWatch(reference(model, answers[:REFERENCE], list(BOUNDS)))
    for _ in range(5):
        start = time.process_time()
        for answer, _ in answers[:2000]:
            watch.add(answer, measure(pixels))
        rounds.append((time.process_time() - start) / 2000)
    counting = 1e6 * float(np.median(rounds))
    answer = 1e6 * cpu_seconds[-1]
    facts = {
        "pixels": model.size,
        "labels": len(model.labels),
        "answer_us": round(answer),
        "counting_us": round(counting, 1),
    }
    return {**facts, "share": round(counting / answer, 4)}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print a summary, and write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unknown", type=Path)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--images", dest="images_used", type=int, default=5000)
    options = parser.parse_args()
    model = load(describe(options.export), threads=1, slots=1)
    rows = list(
        streams(
            model, options.folder, options.unknown, options.streams, options.images_used
        )
    )
    for numbers in dict.fromkeys(row["numbers"] for row in rows):
        print(
            f"\n{numbers}: alarms in the clean part; delay of appearance and labels"
            " (median, worst, missed)"
        )
        for change in dict.fromkeys(row["change"] for row in rows):
            some = [
                row
                for row in rows
                if row["numbers"] == numbers and row["change"] == change
            ]
            false = sum(row["false_appearance"] + row["false_labels"] for row in some)
            cells = []
            for name in ("delay_appearance", "delay_labels"):
                delays = sorted(
                    row[name] if row[name] != "" else np.inf for row in some
                )
                cells.append(
                    f"{np.median(delays):5.0f} {delays[-1]:5.0f}"
                    f" {sum(map(np.isinf, delays)):3d}"
                )
            expected, true = (
                np.mean([row[key] or 0 for row in some])
                for key in ("expected_accuracy", "accuracy")
            )
            print(
                f"{change:40s} {false:3d}   {cells[0]}   {cells[1]}   accuracy"
                f" {expected:.3f} true {true:.3f}"
            )
    command = (
        f"python benchmarks/shift.py EXPORT IMAGES --streams {options.streams} --images"
        f" {options.images_used}"
    )
    write("shift", command, rows)
    folder = options.folder / model.labels[0]
    photo = sorted(folder.iterdir())[0]
    sample = answered(model, sorted(folder.iterdir())[:500]) * 4
    costs = [cost(options.export, photo.read_bytes(), sample, model)]
    print(costs)
    write("shift_cost", command, costs)


if __name__ == "__main__":
    main()
