"""Which file to ship: every graph of three trained students, right and fast; and what
one client of kd-serve sees.

Run: python benchmarks/variants.py --work FOLDER --cifar10 FOLDER [--students xcit] [--seeds 0] [--part table client]

Students: `xcit` is the one of configs/vit_food_scratch.yaml (64 px), `vit_ti` and
`vit_s` have the shapes of ViT-Ti and ViT-S (192 and 384 wide, 12 deep, 197 tokens) and
`repvit` is repvit_m0_9; the last three learn labels of CIFAR-10 (JPEG folders) at 112,
112 and 64 px, for 500 and 300 steps and one epoch, and are scored on 5,000 images that
are set aside. Part `table` trains each with each seed and exports it with `--compare`;
in part `client` the table's client and another one ask the same `kd-serve --threads 1`
in turns, for each file.

What is in FOLDER is not done again, so an interrupted command goes on, and the CSV has
the rows of all that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import yaml
from _load import closed_loop, kd_serve, percentile, request
from PIL import Image

from _record import write
from kd.parts import registry

Rows = list[dict[str, Any]]
CONFIGS = Path(__file__).parent.parent / "configs"
LABELS = [f"class_{i:02d}" for i in range(12)]
ON_LABELS = """
run: {epochs: 1, baseline: false, every: {evaluate: 0}}
data: {kind: imagefolder, root: data/cifar10, val_fraction: 0.1, batch_size: 32, augment: {crop_scale: 0.5}}
losses: [{kind: ce}]
"""
VIT_TI = (
    "{model: vit_tiny_patch16_224, args: {patch_size: 8, embed_dim: 192, depth: 12,"
    " num_heads: 3}}"
)
VIT_S = (
    "{model: vit_small_patch16_224, args: {patch_size: 8, embed_dim: 384, depth: 12,"
    " num_heads: 6}}"
)
STUDENTS: dict[str, tuple[str, list[str]]] = {
    "xcit": ("vit_food_scratch.yaml", ["run.baseline=false", "run.every.evaluate=0"]),
    "vit_ti": (
        "",
        [
            f"student={VIT_TI}",
            "data.image_size=112",
            "optimizer.lr=5e-4",
            "run.steps=500",
        ],
    ),
    "vit_s": (
        "",
        [
            f"student={VIT_S}",
            "data.image_size=112",
            "optimizer.lr=3e-4",
            "run.steps=300",
        ],
    ),
    "repvit": (
        "",
        ["student.model=repvit_m0_9", "data.image_size=64", "optimizer.lr=1e-3"],
    ),
}
"""Configuration, "": ON_LABELS, and keys by name."""
ROUNDS = 8
SECONDS = 2.0
"""Of part `client`: turns of each client, and seconds of one."""


def picture(width: int = 600, height: int = 450) -> bytes:
    """Return a JPEG, smooth with some noise; about 100 KB at 600 x 450."""
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8)).resize(
        (width, height), 3
    )
    noisy = np.asarray(coarse).astype(int) + generator.integers(
        -12, 13, (height, width, 3)
    )
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def random_export(folder: Path, name: str, size: int) -> Path:
    """Write an export of a model with random weights, with all graphs that can be made
    here.
    """
    import torch

    from kd.core.facts import Network
    from kd.deploy.export.package import complete, new_export
    from kd.models import runtimes
    from kd.models.load_classifier import load
    from kd.models.spec import Spec
    from kd.models.timm_folder import export_files

    torch.manual_seed(0)
    student = load(Spec("student", name, {}, LABELS), size).eval()
    with new_export(folder / "export") as draft:
        program = runtimes.export_program(runtimes.reparameterized(student), size)
        network = Network(
            lambda _: program, draft / "model.onnx", lambda _: (), runtimes.LOGITS
        )
        for file in (
            "model.onnx",
            "model.int8.onnx",
            "openvino.xml",
            "openvino.bf16.xml",
        ):
            if not registry.exporter(file).missing(file, True):
                registry.exporter(file).write(draft / file, network)
        content, weights = export_files(
            student, LABELS, 1.0, "single_label_classification"
        )
        facts = {
            "name": name,
            "version": "random",
            "input": {"size": size, "crop": 1.0},
        }
        complete(draft, content, weights, {}, facts)
    return folder / "export"


def exported(name: str, seed: int, options: argparse.Namespace) -> Path:
    """Return the compared export of a student; train and export it where it is not
    there yet.
    """
    import kd
    from kd.deploy.export.export import ExportOptions, export

    target = options.work / f"{name}_{seed}" / "export"
    if (target / "manifest.json").is_file():
        return target
    config, keys = STUDENTS[name]
    keys = [
        *keys,
        f"run.seed={seed}",
        f"run.name={name}_{seed}",
        f"run.folder={options.work}",
        *options.overrides,
    ]
    if name != "xcit":
        keys += [f"data.root={options.cifar10 / 'train'}"]
    run = kd.train(CONFIGS / config if config else yaml.safe_load(ON_LABELS), *keys)
    export_options = ExportOptions(compare=True, images=options.images)
    return export(
        run.folder,
        target,
        export_options,
        [key for key in keys if key.startswith("data.root=")],
    ).folder


def table(name: str, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each file and number of threads."""
    manifest = json.loads((folder / "manifest.json").read_text())
    parity = manifest["parity"]
    config = json.loads((folder / "config.json").read_text())
    plain = manifest["variants"]["model.onnx"]["speed"]
    for file, variant in manifest["variants"].items():
        cpu = parity[file]["cpu_ms"]
        for threads, speed in variant["speed"].items():
            yield {
                "student": name,
                "architecture": config["architecture"],
                "size": manifest["input"]["size"],
                "seed": seed,
                "file": file,
                "threads": threads,
                **speed,
                "times_float32": round(plain[threads]["p50_ms"] / speed["p50_ms"], 3),
                "graph_cpu_ms": cpu,
                "graph_times_float32": round(parity["model.onnx"]["cpu_ms"] / cpu, 3),
                "mb": round(variant["bytes"] / 1e6, 3),
                **{
                    key: round(variant[key], 5)
                    for key in ("score", "drop", "agreement")
                },
                **dict(
                    zip(
                        ("low", "high"),
                        (round(end, 5) for end in variant["interval"]),
                        strict=True,
                    )
                ),
                "images": variant["images"],
                "picked": int(file == manifest["pick"]),
            }


def client(name: str, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for each file the median of the table's client and that of another one, at
    the same server in turns.
    """
    from kd.deploy.serve import bench

    manifest = json.loads((folder / "manifest.json").read_text())
    size = manifest["input"]["size"]
    sent = picture(manifest["input"]["size"], manifest["input"]["size"])
    for file in (
        name
        for name, graph in registry.graphs().items()
        if name in manifest["files"] and not graph.code
    ):
        server = kd_serve(folder, "--file", file, "--threads", "1")
        took = {
            "table": [],
            "client": [],
        }
        at = urlsplit(server.url)
        message = request(server.url, sent, "image/jpeg")
        for _ in range(ROUNDS):
            took["table"] += bench.turn(str(at.hostname), int(at.port or 0), sent)
            answers = asyncio.run(closed_loop(server.url, message, 1, SECONDS))
            took["client"] += [answer.took for answer in answers][bench.COLD :]
        server.stop()
        medians = {side: 1000 * percentile(times, 0.5) for side, times in took.items()}
        rounded = {f"{side}_p50_ms": round(ms, 3) for side, ms in medians.items()}
        row = {
            "student": name,
            "seed": seed,
            "size": size,
            "file": file,
            "answers": len(took["client"]),
            **rounded,
        }
        yield {**row, "ratio": round(medians["table"] / medians["client"], 4)}


PARTS = {"table": table, "client": client}


def main() -> None:
    """Train, export and measure what is not there yet, and write one CSV a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="runs and exports, kept"
    )
    parser.add_argument("--cifar10", type=Path, help="train/CLASS")
    parser.add_argument(
        "--students", nargs="*", default=list(STUDENTS), help="none with --random alone"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--images", type=int, default=0, help="of the validation split; 0: all"
    )
    parser.add_argument(
        "--random",
        metavar="MODEL",
        nargs="+",
        default=[],
        help="also part client of random weights",
    )
    parser.add_argument("overrides", nargs="*", help="key=value for every training")
    options = parser.parse_intermixed_args()
    folders = {
        (name, seed): exported(name, seed, options)
        for seed in options.seeds
        for name in options.students
    }
    for name in options.random:
        folders[name, 0] = random_export(options.work / f"random_{name}", name, 224)
    for section in options.part:
        rows: Rows = []
        for (name, seed), folder in folders.items():
            if section == "client" or name in STUDENTS:
                rows_file = folder.parent / f"{section}.jsonl"
                if not rows_file.is_file():
                    load = {"load": round(os.getloadavg()[0], 1)}
                    rows_file.write_text(
                        "\n".join(
                            json.dumps({**row, **load})
                            for row in PARTS[section](name, seed, folder)
                        )
                    )
                rows += [
                    json.loads(line) for line in rows_file.read_text().splitlines()
                ]
        words = [
            "FOLDER" if text in (str(options.work), str(options.cifar10)) else text
            for text in sys.argv[1:]
        ]
        write(
            f"variants_{section}",
            " ".join(["python benchmarks/variants.py", *words]),
            rows,
        )


if __name__ == "__main__":
    main()
