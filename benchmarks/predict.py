"""`kd-predict` against a bare onnxruntime loop, the same loop on threads, and timm's inference.py, in turns.

Run: python benchmarks/predict.py --data FOLDER [--images 10000] [--rounds 5] [--timm inference.py]

The images of FOLDER are repeated until there are enough. Each round classifies another part of them. The model is the
student of configs/grocery.yaml (64 px) with random weights, which says all about speed and nothing about accuracy; with
`--export` it is another one. The bare loops decode with Pillow, crop as evaluation does, and write a CSV.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _record import write
from kd.deploy.serve.model import describe
from kd.files.pixels import centre_crop, to_rgb

ARGS = {"patch_size": 8, "embed_dim": 96, "depth": 3, "num_heads": 3}
LABELS = [f"class_{i:02d}" for i in range(28)]
SIZE = 64


def random_export(folder: Path) -> Path:
    """Write an export of the student of configs/grocery.yaml with random weights."""
    import torch

    from kd.deploy.export.folder import complete, new_export
    from kd.models import runtimes
    from kd.models.load import Spec, load
    from kd.models.timm_folder import export_files

    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    student = load(Spec("student", name, ARGS, LABELS), SIZE).eval()
    with new_export(folder / "export") as draft:
        runtimes.write_onnx(runtimes.export_program(student, SIZE), draft / "model.onnx")
        content, weights = export_files(student, LABELS, 1.0, "single_label_classification")
        facts = {"name": name, "version": "random", "input": {"size": SIZE, "crop": 1.0}}
        complete(draft, content, weights, {}, facts)
    return folder / "export"


def bare(export: Path, paths: Sequence[Path], target: Path, threads: int) -> None:
    """Do what a person would write: one loop (0 threads; the graph has all cores), or the loop on threads."""
    import onnxruntime

    told = describe(export)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1 if threads else 0
    session = onnxruntime.InferenceSession(str(export / "model.onnx"), options)

    def classify(path: Path) -> tuple[str, str, float]:
        pixels = np.asarray(centre_crop(to_rgb(Image.open(path)), told.size, told.crop)).transpose(2, 0, 1)
        logits = np.asarray(session.run(["logits"], {"image": np.ascontiguousarray(pixels)[None]})[0])[0]
        odds = np.exp(logits - logits.max())
        best = int(odds.argmax())
        return str(path), told.labels[best], float(odds[best] / odds.sum())

    def rows() -> Iterator[tuple[str, str, float]]:
        if not threads:
            yield from map(classify, paths)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(classify, paths)

    with target.open("w", newline="") as file:
        csv.writer(file).writerows(rows())


def ours(export: Path, paths: Sequence[Path], target: Path) -> None:
    """Classify the images of a list."""
    from kd.deploy.predict.run import Settings, predict

    listed = target.with_suffix(".txt")
    listed.write_text("\n".join(map(str, paths)))
    predict(Settings(export=export, images=str(listed), to=target), io.StringIO())


def answers(path: Path) -> list[tuple[str, str]]:
    """Return image and label of each row, without the header."""
    rows = [(row[0], row[1]) for row in csv.reader(path.open(newline=""))]
    return rows[1:] if rows[0][0] == "image" else rows


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return wall and CPU seconds, children included."""
    wall, before = time.perf_counter(), os.times()
    run()
    after = os.times()
    return time.perf_counter() - wall, sum(after[:4]) - sum(before[:4])


def processes(export: Path, paths: Sequence[Path], script: Path, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return timm's inference.py and kd-predict on the same folder, each as a process from start to end."""
    images = folder / "linked" / "all"
    images.mkdir(parents=True)
    for number, path in enumerate(paths):
        os.link(path, images / f"{number:05d}.jpg")
    theirs = [sys.executable, str(script), str(images.parent), "--model", f"local-dir:{export}", "--pretrained"]
    theirs += ["--device", "cpu", "--batch-size", "64", "--workers", "1", "--no-console-results"]
    theirs += ["--results-dir", str(folder), "--results-file", "timm", "--label-type", "name"]
    own = [sys.executable, "-m", "kd.cli", "predict", str(export), str(images.parent)]
    own += ["--to", str(folder / "process.csv")]
    return {
        "timm inference.py, process": lambda: subprocess.run(theirs, check=True, capture_output=True),
        "kd-predict, process": lambda: subprocess.run(own, check=True, capture_output=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder of JPEG files")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--export", type=Path, help="another model")
    parser.add_argument("--timm", type=Path, help="inference.py of timm's repository: one round more")
    given = parser.parse_args()
    found = sorted(given.data.rglob("*.jpg"))
    paths = list(itertools.islice(itertools.cycle(found), given.images))
    size = given.images // given.rounds
    rows, cores = [], len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=given.data.parent) as text:
        folder = Path(text)
        export = given.export or random_export(folder)
        ways: dict[str, Callable[[Sequence[Path], Path], None]] = {
            "kd-predict": lambda part, target: ours(export, part, target),
            "bare loop": lambda part, target: bare(export, part, target, 0),
            "bare loop on threads": lambda part, target: bare(export, part, target, cores),
        }
        for round in range(given.rounds):
            part = paths[round * size : (round + 1) * size]
            order = list(ways)[round % 3 :] + list(ways)[: round % 3]
            results = {}
            for way in order:
                target = folder / f"{way}-{round}.csv".replace(" ", "-")
                wall, cpu = timed(lambda way=way, part=part, target=target: ways[way](part, target))
                results[way] = answers(target)
                rows.append({"round": round, "way": way, "images": len(part), "seconds": wall, "cpu_seconds": cpu})
                print(f"round {round}: {way}: {wall:.1f} s, {cpu:.1f} s of CPU time", flush=True)
            assert results["kd-predict"] == results["bare loop on threads"], "the labels differ"
        if given.timm:
            for way, run in processes(export, paths[:size], given.timm, folder).items():
                wall, cpu = timed(run)
                rows.append({"round": 0, "way": way, "images": size, "seconds": wall, "cpu_seconds": cpu})
    for row in rows:
        row["images_per_second"] = row["images"] / row["seconds"]
    median = {
        way: statistics.median(row["images_per_second"] for row in rows if row["way"] == way)
        for way in dict.fromkeys(row["way"] for row in rows)
    }
    for way, speed in median.items():
        print(f"{way:28s} {speed:8.1f} images/s   kd-predict / this: {median['kd-predict'] / speed:.3f}")
    options = f"--images {given.images} --rounds {given.rounds}" + (" --timm FILE" if given.timm else "")
    write("predict", f"python benchmarks/predict.py --data FOLDER {options}", rows)


if __name__ == "__main__":
    main()
