"""Everything that needs an NVIDIA GPU, in one command and nine minutes: tests, speed, memory, execution modes, export.

Run: make gpu [TINY=1] [TIMM=FOLDER] [OUT=FOLDER]    or    PYTHONPATH=. python benchmarks/gpu.py --help

Nothing is downloaded or installed: it takes the torch (2.9 or newer) and the timm of this Python. Each part is a
process of its own, so that one that fails or hangs does not end the others. Finished parts are kept in `--work`; the
same command goes on where a time limit cut it. `--tiny` runs the same parts on the CPU with tiny models, in the suite.
Photographs are painted and teachers have random weights: only time, memory and differences are measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NEEDED = ("torch", "timm", "omegaconf", "safetensors", "accelerate", "rich", "PIL", "yaml")
CLASSES = 8
MODES = ("fp32+fused", "bf16+unfused", "bf16+fused", "bf16+fused+compiled")
"""Of the teacher."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is."""

    kind: str
    """Of the backend."""
    teacher: str
    teacher_args: dict[str, Any]
    student_args: dict[str, Any]
    size: int
    """Side of an image, pixels."""
    batch: int
    painted: int
    """Different photographs; `photos` files share them."""
    photos: int
    steps: int
    rounds: int


STUDENT = "vit_tiny_patch16_224"
REAL = Scale("cuda", "vit_base_patch16_224", {}, {}, 224, 256, 512, 8192, 48, 5)
_SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
TINY = Scale("cpu", STUDENT, {**_SMALL, "depth": 2}, _SMALL, 16, 8, 16, 32, 6, 1)


def row(what: str, value: float, unit: str, note: str = "") -> Row:
    """Return one measurement."""
    return {"what": what, "value": float(f"{value:.5g}"), "unit": unit, "note": note}


# ---- parts: (scale, work, arguments) -> rows ---------------------------------------------------------------------


def step(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Measure the step on ready tensors against the rate of matrix products, and who waits for whom."""
    import mfu
    import torch

    precision = "bf16" if scale.kind == "cuda" else "fp32"
    argv = ["--teacher", scale.teacher, "--student", STUDENT, "--size", str(scale.size), "--batch", str(scale.batch)]
    asked = mfu.arguments().parse_args([*argv, "--rounds", str(scale.rounds), "--precision", precision, "--compile"])
    asked.teacher_args, asked.student_args, asked.sizes = scale.teacher_args, scale.student_args, given.matrices
    device = torch.device(scale.kind)
    measured = mfu.measure(asked, device)
    rows = [row("matrix products", measured[0]["gflops"] / 1000, "TFLOP/s", precision)]
    for kernel, name in dict.fromkeys((entry["kernel"], entry["work"]) for entry in measured):
        same = [entry for entry in measured if (entry["kernel"], entry["work"]) == (kernel, name)]
        seconds = statistics.median(entry["ms"] for entry in same) / 1000
        rows.append(row(f"{name}, {kernel}", scale.batch / seconds, "images/s", f"batch {scale.batch}"))
        rows.append(row(f"{name}, {kernel}", 100 * same[0]["gflop"] / seconds / same[0]["gflops"], "% of that rate"))
    made = mfu.Step(asked, "fused", device)
    return [*rows, *waiting("cached", lambda: made.learn(made.target), scale, device)]


def waiting(name: str, work: Callable[[], object], scale: Scale, device: Any) -> list[Row]:
    """Measure whether the device ever waits for the host: the time to launch steps against the time to finish them."""
    import mfu

    work()
    mfu.wait(device)
    start = time.perf_counter()
    for _ in range(scale.steps):
        work()
    launched = time.perf_counter() - start
    mfu.wait(device)
    finished = time.perf_counter() - start
    note = "below 100: the device never waits for the next step"
    return [row(f"{name}: launching / finishing", 100 * launched / finished, "%", note)]


def run(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Measure whole runs from JPEG files: live teacher, cached, cached with decoded images in memory, labels only."""
    cached = ("teacher.cache.views=1",)
    labels = ("losses=[{kind: ce}]", "teacher.model=")
    forms = {"live": (), "cached": cached, "cached, store": (*cached, "data.store=ram"), "labels only": labels}
    rows = []
    for name, overrides in forms.items():
        fresh = scale.photos // scale.batch  # the first epoch fills the cache and the store
        folder = train(scale, work, name.replace(", ", "_"), f"run.steps={fresh + scale.steps}", *overrides)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        speeds = [line["images_per_second"] for line in lines if line["kind"] == "train" and line["step"] > fresh]
        manifest = json.loads((folder / "manifest.json").read_text())
        chosen = ", ".join(f"{key} {value}" for key, value in manifest["modes"].items())
        rows.append(row(f"kd-train, {name}", statistics.median(speeds), "images/s", chosen))
    return rows


def memory(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Measure what a step takes at its peak, by the precision of the teacher."""
    import torch

    rows = []
    for precision in ("fp32", "bf16"):
        if scale.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        overrides = ("run.steps=2", f"teacher.precision={precision}")
        folder = train(scale, work, f"memory_{precision}", *overrides)
        peak = torch.cuda.max_memory_allocated() / 2**20 if scale.kind == "cuda" else 0.0
        rows.append(row(f"peak, {precision} teacher", peak, "MiB"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        held = next(line["optimizer_mib"] for line in reversed(lines) if "optimizer_mib" in line)
        rows.append(row(f"optimizer state, {precision} teacher", held, "MiB", "ZeRO-1 divides it by the ranks"))
    return rows


def teacher(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Measure the frozen forward in each mode, and how far its logits are from float32's."""
    from kd.config.schema import TeacherSection
    from kd.jobs.estimate import milliseconds
    from kd.models.load import load
    from kd.models.spec import Spec
    from kd.parts import registry
    from kd.setup.modes import ExecutionMode, in_short, noise
    from kd.setup.teacher import PLAIN, TeacherFactory

    module = registry.find("backends", scale.kind, "backend.kind")
    backend = module.build(module.Options(), precision="fp32", timeout_seconds=60.0)
    model = load(Spec("teacher", scale.teacher, scale.teacher_args, [str(i) for i in range(101)]), scale.size)
    factory = TeacherFactory(TeacherSection(), model, backend, scale.size)
    batch = noise(scale.batch, scale.size, backend)
    exact = factory(PLAIN)(batch).logits
    rows = []
    for mode in map(ExecutionMode.parse, MODES):
        try:
            factory(mode)(batch)
        except Exception as error:  # compilers fail in their own ways
            rows.append(row(f"teacher, {mode}", 0.0, "not run", in_short(error)))
            continue
        live = factory(mode)
        taken = milliseconds(lambda live=live: live(batch).logits)
        error = (live(batch).logits - exact).abs().max().item() / exact.std().item()
        rows.append(row(f"teacher, {mode}", 1000 * scale.batch / taken, "images/s", f"batch {scale.batch}"))
        rows.append(row(f"teacher, {mode}", error, "largest logit error / standard deviation"))
    return rows


def export(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Export a student that was trained here and compare ONNX Runtime with PyTorch."""
    from kd.deploy.export.export import export as job
    from kd.deploy.export.options import ExportOptions

    folder = train(scale, work, "exported", "run.steps=2")
    start = time.perf_counter()
    made = job(folder, work / "export", ExportOptions(images=32))
    return [row("kd-export", time.perf_counter() - start, "s", "; ".join(made.lines))]


def tests(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Run the tests that need a GPU."""
    report = work / "tests.xml"
    marked = ["-m", "cuda"] if scale.kind == "cuda" else ["-m", "cuda", "--collect-only"]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *marked, f"--junitxml={report}"]
    done = subprocess.run([*argv, "tests/cuda"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit((done.stdout + done.stderr)[-3000:])
    print(done.stdout[-3000:])
    if scale.kind != "cuda":
        return [row("tests marked cuda", done.stdout.count("::test_"), "collected")]
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        note = " ".join((outcome.get("message") or "").split())[:200] if outcome is not None else ""
        verdict = "passed" if outcome is None else outcome.tag
        rows.append(row(f"{case.get('name')}", float(case.get("time") or 0), f"s, {verdict}", note))
    return rows


def timm(scale: Scale, work: Path, given: argparse.Namespace) -> list[Row]:
    """Train beside timm's train.py in turns, where a checkout of timm is given."""
    if not given.timm:
        return [row("timm's train.py beside kd", 0.0, "not run", "--timm FOLDER was not given")]
    argv = [
        sys.executable,
        "benchmarks/timm_distillation.py",
        "--timm",
        given.timm,
        "--data",
        str(photographs(scale, work)),
    ]
    steps, teacher = ("24", "B") if scale.kind == "cuda" else ("8", "S")
    workers = str(max(1, len(os.sched_getaffinity(0)) - 4))
    argv += f"--rounds 1 --steps {steps} --batch {scale.batch} --teachers {teacher} --workers {workers}".split()
    text = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [row("timm's train.py beside kd", 0.0, "see its CSV", text.strip().splitlines()[-2])]


PARTS = {part.__name__: part for part in (run, step, tests, teacher, memory, export, timm)}
"""The most important first: whole runs live and cached, then how well the step uses the GPU."""
SECONDS = {"run": 200.0, "step": 100.0, "tests": 120.0, "teacher": 60.0, "memory": 60.0, "export": 60.0, "timm": 150.0}
"""Longest time of a part, so that one that hangs does not take that of the others."""


# ---- what the parts share ------------------------------------------------------------------------------------------


def photographs(scale: Scale, work: Path) -> Path:
    """Paint photographs, JPEG files of some detail, once; many names share a file."""
    import numpy as np
    from PIL import Image

    root = work / "photographs"
    if root.is_dir():
        return root
    making, side = work / "photographs.part", scale.size + scale.size // 4
    shutil.rmtree(making, ignore_errors=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", scale.photos), ("val", scale.painted)):
        for number in range(count):
            folder = making / split / f"class{number % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            first = folder / f"{number % scale.painted:06d}.jpg"
            if number < scale.painted:
                coarse = generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
                Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(first, quality=90)
            else:
                os.link(first, folder / f"{number:06d}.jpg")
    return making.rename(root)


def teacher_folder(scale: Scale, work: Path) -> Path:
    """Write a teacher of random weights as a folder that timm loads, once."""
    import timm as library
    from timm.models import save_for_hf

    folder = work / "teacher"
    if not (folder / "model.safetensors").is_file():
        model = library.create_model(scale.teacher, num_classes=CLASSES, **scale.teacher_args)
        save_for_hf(model, str(folder), model_args=scale.teacher_args, safe_serialization=True)
    return folder


def train(scale: Scale, work: Path, name: str, *overrides: str) -> Path:
    """Distill with kd and return the run folder; one that a cut attempt left is removed first."""
    from kd import config
    from kd.jobs.train import train as job

    settings = {
        "run": {"folder": str(work / "runs"), "name": name, "every": {"log": 4, "evaluate": 10**6}},
        "data": {"kind": "imagefolder", "root": str(photographs(scale, work)), "image_size": scale.size},
        "teacher": {"model": str(teacher_folder(scale, work)), "min_accuracy": 0},
        "student": {"model": STUDENT, "args": scale.student_args},
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 1e-3},
        "backend": {"kind": scale.kind, "precision": "bf16" if scale.kind == "cuda" else "fp32"},
    }
    settings["data"] |= {"batch_size": scale.batch}
    if scale.kind == "cpu":
        settings["data"] |= {"workers": 0}
        settings["backend"] |= {"threads": 1}
    shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return job(config.load(settings, list(overrides))).folder


# ---- the command ---------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the same on the CPU, in seconds")
    parser.add_argument("--timm", default="", metavar="FOLDER", help="a checkout of timm, for its train.py")
    parser.add_argument("--work", type=Path, help="what is finished (default: runs/gpu, or runs/gpu_tiny)")
    parser.add_argument("--out", type=Path, help="folder of the CSV (default: benchmarks; with --tiny: --work)")
    parser.add_argument("--minutes", type=float, default=8.8, help="start nothing after them, and end what runs")
    parser.add_argument("--seconds", type=float, default=0.0, help="longest time of a part (default: its own)")
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")
    parser.add_argument("--part", choices=PARTS, help="this part alone, in this process")
    given = parser.parse_args(argv)
    given.work = (given.work or ROOT / "runs" / ("gpu_tiny" if given.tiny else "gpu")).absolute()
    given.matrices = (64, 128) if given.tiny else ()
    return given


def main(argv: list[str] | None = None) -> Path:
    """Run what is not finished, then write the CSV of all that is; return its path."""
    given = arguments(argv)
    end = time.monotonic() + 60 * given.minutes
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}. Put them on PYTHONPATH; nothing is installed here")
    scale = TINY if given.tiny else REAL
    if given.fresh:
        shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.part:
        finish(given.part, scale, given)
        raise SystemExit(0)
    from _record import write

    command = " ".join(["make gpu", *(["TINY=1"] if given.tiny else []), *(["TIMM=FOLDER"] if given.timm else [])])
    rows, path = [], given.work
    for name in PARTS:  # the CSV is complete after each part, so that what ends this process loses one
        rows += obtain(name, scale, given, end)
        path = write("gpu", command, rows, given.work if given.tiny else given.out)
    return path


def obtain(name: str, scale: Scale, given: argparse.Namespace, end: float) -> list[Row]:
    """Return the rows of a part: kept ones, or run it now while there is time."""
    file, left = given.work / f"{name}.json", end - time.monotonic()
    problem = ""
    if not file.is_file() and left < 20 and not given.tiny:
        problem = "no time was left; run the same command again"
    elif not file.is_file() and given.tiny:
        finish(name, scale, given)
    elif not file.is_file():
        most = min(left, given.seconds or SECONDS[name])
        print(f"== {name}, at most {most:.0f} of {left:.0f} s", flush=True)
        problem = apart(name, given, most)
    if problem:
        print(f"== {name}: {problem}", flush=True)
        return [{"part": name, **row("the whole part", 0.0, "not finished", problem)}]
    return [{"part": name, **entry} for entry in json.loads(file.read_text())]


def finish(name: str, scale: Scale, given: argparse.Namespace) -> None:
    """Run a part and keep its rows."""
    import torch

    start = time.perf_counter()
    with torch.compiler.set_stance("force_eager" if given.tiny else "default"):  # tiny: no minute in the compiler
        rows = PARTS[name](scale, given.work, given)
    for entry in rows:
        print(f"{name:8s} {entry['what']:40s} {entry['value']:12g} {entry['unit']}  {entry['note']}", flush=True)
    print(f"== {name} took {time.perf_counter() - start:.1f} s", flush=True)
    part = given.work / f"{name}.part"
    part.write_text(json.dumps(rows))
    part.rename(given.work / f"{name}.json")


def apart(name: str, given: argparse.Namespace, left: float) -> str:
    """Run a part in a process of its own, killed with all it started when the time is over; return what went wrong."""
    argv = [sys.executable, __file__, "--part", name, "--work", str(given.work), "--timm", given.timm]
    process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "its time was over; run the same command again"
    return f"it ended with {code}; its error is above" if code else ""


if __name__ == "__main__":
    main()
