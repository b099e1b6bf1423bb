"""What the self-check of pictures of all branches costs at a start, and how far int8
moves without and with a fault.

    python benchmarks/self_check_branches.py start --before CHECKOUT EXPORT=EXPORT_BEFORE...
    python benchmarks/self_check_branches.py int8 --old FOLDER... [EXPORT...]

start: loads `kd.deploy.serve.service.Service` in processes of its own, by turns with
this kd and with that of CHECKOUT, each with the export that its own kd wrote. int8:
int8 graphs of random networks and of exports on the four pictures: with other versions
of onnxruntime (FOLDER: `pip install --no-deps --target FOLDER onnxruntime==VERSION`),
without AVX (see `self_check.py`), and with all zero points shifted by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from self_check import masked

from _record import write
from kd.deploy.serve import self_check as check
from kd.deploy.serve.decoding import prepare
from kd.files.manifest import MANIFEST
from kd.files.pixels import BRANCHES
from kd.models import runtimes
from kd.models.load_classifier import Spec, load

TURNS = 15
START = """
import json, psutil, sys, time
from pathlib import Path
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.service import Service
folder, file = sys.argv[1:]
service = Service(describe(Path(folder), file), Limits(), slots=2, threads=1)
service.load()
assert service.ready, service.reason
print(json.dumps({"cpu_s": time.process_time(), "memory_mb": psutil.Process().memory_info().rss / 1e6}))
service.close()
"""
RUN = """
import ctypes, os, sys
if library := os.environ.get("MASK_LIBRARY"):
    ctypes.CDLL(library)
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 3
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
rows = [session.run(None, {"image": picture[None]})[0] for picture in numpy.load(sys.argv[2])]
numpy.save(sys.argv[3], numpy.concatenate(rows))
"""
VIT = "vit_tiny_patch16_224"
XCIT = "xcit_nano_12_p16_224"
SWIN = "swin_tiny_patch4_window7_224"
NETWORKS: list[tuple[str, int, dict[str, Any]]] = [
    *((VIT, 64, {"patch_size": 8, "depth": depth}) for depth in (2, 6, 12, 24)),
    ("vit_small_patch16_224", 112, {}),
    (XCIT, 64, {}),
    (XCIT, 112, {"depth": 4}),
    (SWIN, 224, {"embed_dim": 48, "depths": (2, 2, 2, 2)}),
]


def child(code: str, *argv: object, **environment: str) -> str:
    root = str(Path(__file__).parents[1])
    variables = {
        **os.environ,
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True, cwd="/"
    ).stdout


def start(pairs: list[str], before: Path) -> None:
    rows = []
    for pair in pairs:
        exports = dict(zip(("after", "before"), pair.split("="), strict=True))
        manifest = json.loads((Path(exports["after"]) / MANIFEST).read_text())
        for file in manifest[check.KEY]:
            for turn in range(TURNS):
                for kd, folder in exports.items():
                    root = {"PYTHONPATH": str(before)} if kd == "before" else {}
                    facts = json.loads(child(START, folder, file, **root))
                    rows.append(
                        {
                            "model": manifest["name"],
                            "file": file,
                            "kd": kd,
                            "turn": turn,
                            **facts,
                        }
                    )
            times = {
                kd: [
                    row["cpu_s"]
                    for row in rows
                    if (row["file"], row["kd"]) == (file, kd)
                ]
                for kd in exports
            }
            print(
                manifest["name"],
                file,
                {kd: round(statistics.median(each), 3) for kd, each in times.items()},
            )
    write(
        "self_check_branches",
        "python benchmarks/self_check_branches.py start --before CHECKOUT EXPORTS...",
        rows,
    )


def graphs(folder: Path, exports: list[str]) -> Any:
    """Yield name, seed, side, and the paths of model.onnx and model.int8.onnx."""
    for export in map(Path, exports):
        manifest = json.loads((export / MANIFEST).read_text())
        yield (
            manifest["name"],
            "",
            manifest["input"]["size"],
            export / "model.onnx",
            export / "model.int8.onnx",
        )
    for name, side, settings in NETWORKS:
        for seed in range(3):
            torch.manual_seed(seed)
            network = load(
                Spec("student", name, settings, tuple(map(str, range(20)))), side
            ).eval()
            with torch.no_grad():
                network.network.get_classifier().weight *= 10  # type: ignore[operator]
            exact = folder / "model.onnx"
            int8 = folder / "model.int8.onnx"
            program = runtimes.export_program(
                runtimes.reparameterized(network), side, 0
            )
            runtimes.write_onnx(program, exact, "logits")
            runtimes.write_int8(exact, int8)
            yield f"{name} {settings.get('depth', '')}".strip(), seed, side, exact, int8


def shifted(path: Path, by: int, to: Path) -> Path:
    import onnx

    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if "zero_point" in tensor.name:
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(
                    (values + by).astype(values.dtype), tensor.name
                )
            )
    onnx.save(model, to)
    return to


def version(folder: str) -> str:
    return child(
        "import onnxruntime; print(onnxruntime.__version__)", PYTHONPATH=folder
    ).strip()


def int8(exports: list[str], old: list[str]) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mask").mkdir()
        mask = masked(folder / "mask")
        honest = {f"onnxruntime {version(path)}": {"PYTHONPATH": path} for path in old}
        honest |= {"without AVX": {**mask, "MASK_UNITS": "sse"}}
        for model, seed, side, exact, graph in graphs(folder, exports):
            pictures = check.pictures(BRANCHES[:4], side, 16)
            np.save(
                folder / "pixels.npy",
                np.stack([prepare(file, side, 0.875).pixels for file in pictures]),
            )

            def run(path: Path, environment: dict[str, str]) -> np.ndarray:
                child(
                    RUN,
                    path,
                    folder / "pixels.npy",
                    folder / "logits.npy",
                    **environment,
                )
                return np.load(folder / "logits.npy")

            here = run(graph, {})
            error = float(np.abs(here - run(exact, {})).max())
            ways = {way: (graph, environment) for way, environment in honest.items()}
            ways |= {
                f"zero points {by:+d}": (shifted(graph, by, folder / f"{by}.onnx"), {})
                for by in (1, -1)
            }
            for way, (path, environment) in ways.items():
                change = run(path, environment) - here
                drift = float(np.sqrt(np.square(change.mean(0)).mean()))
                row = {
                    "model": model,
                    "seed": seed,
                    "side": side,
                    "way": way,
                    "error": error,
                }
                rows.append(
                    row
                    | {
                        "largest": float(np.abs(change).max()) / error,
                        "mean": drift / error,
                    }
                )
                print(rows[-1], flush=True)
    write(
        "self_check_int8",
        "python benchmarks/self_check_branches.py int8 --old FOLDERS... EXPORTS...",
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("start", "int8"))
    parser.add_argument("exports", nargs="*")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--old", action="append", default=[], metavar="FOLDER")
    options = parser.parse_intermixed_args()
    if options.part == "start":
        start(options.exports, options.before)
    else:
        int8(options.exports, options.old)


if __name__ == "__main__":
    main()
