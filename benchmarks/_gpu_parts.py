"""The parts of `make gpu` (benchmarks/gpu.py): each measures one thing and returns its
rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLASSES = 8
MODES = ("fp32+fused", "bf16+unfused", "bf16+fused", "bf16+fused+compiled")
"""Of the teacher."""
ANCHOR = "anchor: 8,003 images/s of a 22 M ViT on one H100, compiled, 22.9 % MFU"
"""Reported by others for a training step."""
H100 = 989e12
"""Dense bfloat16 operations a second of an H100 SXM, by NVIDIA's data sheet."""
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
TINY = Scale(
    "cpu", STUDENT, {**_SMALL, "depth": 2, "img_size": 16}, _SMALL, 16, 8, 16, 32, 6, 1
)


def row(name: str, value: float, unit: str, note: str = "") -> Row:
    """Return one measurement."""
    return {"what": name, "value": float(f"{value:.5g}"), "unit": unit, "note": note}


def step(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure the step on ready tensors against the rate of matrix products, and who
    waits for whom.
    """
    import mfu
    import torch

    precision = "bf16" if scale.kind == "cuda" else "fp32"
    argv = [
        "--teacher",
        scale.teacher,
        "--student",
        STUDENT,
        "--size",
        str(scale.size),
        "--batch",
        str(scale.batch),
    ]
    request = mfu.arguments().parse_args(
        [*argv, "--rounds", str(scale.rounds), "--precision", precision, "--compile"]
    )
    request.teacher_args = scale.teacher_args
    request.student_args = scale.student_args
    request.sizes = options.matrices
    device = torch.device(scale.kind)
    measured = mfu.measure(request, device)
    rows = [row("matrix products", measured[0]["gflops"] / 1000, "TFLOP/s", precision)]
    for kernel, name in dict.fromkeys(
        (entry["kernel"], entry["work"]) for entry in measured
    ):
        same = [
            entry
            for entry in measured
            if (entry["kernel"], entry["work"]) == (kernel, name)
        ]
        seconds = statistics.median(entry["ms"] for entry in same) / 1000
        rows.append(
            row(
                f"{name}, {kernel}",
                scale.batch / seconds,
                "images/s",
                f"batch {scale.batch}",
            )
        )
        rows.append(
            row(
                f"{name}, {kernel}",
                100 * same[0]["gflop"] / seconds / same[0]["gflops"],
                "% of that rate",
            )
        )
    fused = mfu.Step(request, "fused", device)
    return [*rows, *waiting("cached", lambda: fused.learn(fused.target), scale, device)]


def waiting(
    name: str, work: Callable[[], object], scale: Scale, device: Any
) -> list[Row]:
    """Measure whether the device ever waits for the host: the time to launch steps
    against the time to finish them.
    """
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


def run(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure whole runs from JPEG files: live teacher, cached, cached with decoded
    images in memory, labels only.
    """
    cached = ("teacher.cache.views=1",)
    labels = ("losses=[{kind: ce}]", "teacher.model=")
    forms = {
        "live": (),
        "cached": cached,
        "cached, store": (*cached, "data.store=ram"),
        "labels only": labels,
    }
    rows = []
    for name, overrides in forms.items():
        fresh = (
            scale.photos // scale.batch
        )  # the first epoch fills the cache and the store
        folder = train(
            scale,
            work,
            name.replace(", ", "_"),
            f"run.steps={fresh + scale.steps}",
            *overrides,
        )
        lines = [line for line in metrics(folder) if line["step"] > fresh]
        manifest = json.loads((folder / "manifest.json").read_text())
        chosen = ", ".join(f"{key} {value}" for key, value in manifest["modes"].items())
        rows += speed_rows(f"kd-train, {name}", lines, chosen)
    return rows


def student(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure the student's step, its target at hand, compiled and not: what a run with
    a warm cache can reach.
    """
    import mfu
    import torch

    device = torch.device(scale.kind)
    precision = "bf16" if scale.kind == "cuda" else "fp32"
    rate = mfu.matrix_rate(device, mfu.DTYPES[precision], options.matrices)
    rows = [row("matrix products", rate / 1e12, "TFLOP/s", precision)]
    for name in ("vit_small_patch16_224", STUDENT):
        argv = [
            "--teacher",
            STUDENT,
            "--student",
            name,
            "--size",
            str(scale.size),
            "--batch",
            str(scale.batch),
        ]
        request = mfu.arguments().parse_args([*argv, "--precision", precision])
        request.teacher_args = request.student_args = scale.student_args
        plain = mfu.Step(request, "unfused", device)
        flops = mfu.counted(partial(plain.learn, plain.target))
        for kernel in ("fused", "fused+compiled"):
            measured = mfu.Step(request, kernel, device)
            seconds = statistics.median(
                finish_steps(
                    partial(measured.learn, measured.target), scale.steps, device
                )
                for _ in range(scale.rounds + 1)
            )
            per_second = scale.steps * scale.batch / seconds
            achieved = scale.steps * flops / seconds
            rows.append(row(f"{name}, {kernel}", per_second, "images/s", ANCHOR))
            rows.append(
                row(
                    f"{name}, {kernel}",
                    100 * achieved / rate,
                    "% of that rate",
                    f"{achieved / 1e12:.3g} TFLOP/s",
                )
            )
            if "h100" in device_name(device):
                rows.append(
                    row(
                        f"{name}, {kernel}",
                        100 * achieved / H100,
                        "% MFU",
                        "of an H100's 989 TFLOP/s",
                    )
                )
    return rows


def configurations(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure two of the shipped configurations with a warm cache: their augmentation,
    batch, losses and optimizer.

    Images are the painted photographs, and all weights are random.
    """
    import yaml

    from kd import config
    from kd.jobs.train import train as job

    rows = []
    for name in ("vit_food_scratch", "vit_food101"):
        content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        data = content["data"]
        learned = content["student"]
        small = content["teacher"]
        common = {
            key: data[key]
            for key in data.keys()
            & {
                "image_size",
                "batch_size",
                "micro_batch",
                "store",
                "augment",
            }
        }
        content["data"] = {
            "kind": "imagefolder",
            "root": str(photographs(scale, work)),
            **common,
        }
        learned.pop("init", None)
        if scale.kind == "cpu":
            content["data"] |= {
                "workers": 0,
                "batch_size": scale.batch,
                "micro_batch": 0,
                "eval_batch": 0,
            }
        if scale.kind == "cpu" and learned["model"] == STUDENT:
            content["data"] |= {"image_size": scale.size}
            learned["args"] = scale.student_args
            small["args"] = scale.teacher_args
            small["model"] = scale.teacher
        sized = {**small.get("args", {}), "img_size": content["data"]["image_size"]}
        folder = teacher_folder(small["model"], sized, work / f"teacher_{name}")
        content["teacher"] = {
            "model": str(folder),
            "min_accuracy": 0,
            "cache": {"views": 1},
        }
        content["backend"] = machine(scale)
        fill = -(-scale.photos // content["data"]["batch_size"])
        for turn, steps in (("cold", fill), ("warm", scale.steps)):
            run = {
                "folder": str(work / "runs"),
                "name": f"{name}_{turn}",
                "steps": steps,
            }
            content["run"] = {**run, "every": {"log": 4, "evaluate": 10**6}}
            shutil.rmtree(work / "runs" / run["name"], ignore_errors=True)
            folder_of_run = job(config.load(content)).folder
        speeds = [
            line for line in metrics(folder_of_run) if line["step"] > 4
        ]  # the first steps open files and workers
        teacher_images = sum(
            line.get("teacher_images", 0) for line in metrics(folder_of_run)
        )
        note = (
            f"batch {content['data']['batch_size']}, {teacher_images:g} images asked of"
            " the teacher"
        )
        rows += speed_rows(f"configs/{name}.yaml, cache warm", speeds, note)
    return rows


def resume(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Compare the weights of a run that was cut in the middle with those of one that
    was not, bit by bit.
    """
    import torch
    from safetensors.torch import load_file

    keys = ("run.steps=8", "run.every.checkpoint=4", "run.keep=9")
    undisturbed = train(scale, work, "whole", *keys)
    cut = work / "runs" / "cut"
    shutil.rmtree(cut, ignore_errors=True)
    shutil.copytree(undisturbed, cut)
    shutil.rmtree(cut / "checkpoints" / "step_00000008")
    train(scale, work, "cut", *keys, fresh=False)
    expected, tensors = (
        load_file(run / "checkpoints/step_00000008/tensors.safetensors")
        for run in (undisturbed, cut)
    )
    apart = [
        name for name in expected if not torch.equal(expected[name], tensors[name])
    ]
    gap = max(
        (
            (expected[name].double() - tensors[name].double()).abs().max().item()
            for name in apart
        ),
        default=0.0,
    )
    rows = [
        row(
            "tensors of other bits after a resume",
            len(apart),
            f"of {len(expected)}",
            ", ".join(apart[:3]),
        )
    ]
    return [*rows, row("largest difference after a resume", gap, "absolute")]


def nccl(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Join a world of one rank, over nccl or on a CPU gloo: reduce, wrap in DDP, and
    compare its gradients.
    """
    import timm as library
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device("cuda", 0) if scale.kind == "cuda" else torch.device("cpu")
    group = "nccl" if scale.kind == "cuda" else "gloo"
    meeting = work / "meeting"
    meeting.unlink(missing_ok=True)
    bound = device if scale.kind == "cuda" else None
    dist.init_process_group(
        group, init_method=f"file://{meeting}", rank=0, world_size=1, device_id=bound
    )
    try:
        sent = torch.ones(2**22 if scale.kind == "cuda" else 2**10, device=device)
        seconds = (
            finish_steps(lambda: dist.all_reduce(sent), scale.steps, device)
            / scale.steps
        )
        model = library.create_model(
            STUDENT, img_size=scale.size, num_classes=CLASSES, **scale.student_args
        ).to(device)
        image = torch.randn(4, 3, scale.size, scale.size, device=device)
        grads = []
        for module in (
            model,
            DistributedDataParallel(model, gradient_as_bucket_view=True),
        ):
            model.zero_grad(set_to_none=True)
            module(image).square().mean().backward()
            grads.append(
                torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                ).clone()
            )
        gap = (grads[0] - grads[1]).abs().max().item()
    finally:
        dist.destroy_process_group()
    size = f"{sent.nbytes / 2**20:g} MiB, one rank"
    rows = [row(f"{group}: all-reduce", 1000 * seconds, "ms", size)]
    return [
        *rows,
        row(f"{group}: gradients of DDP less plain ones", gap, "largest difference"),
    ]


def memory(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure what a step takes at its peak, by the precision of the teacher."""
    import torch

    rows = []
    for precision in ("fp32", "bf16"):
        if scale.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        overrides = ("run.steps=2", f"teacher.precision={precision}")
        folder = train(scale, work, f"memory_{precision}", *overrides)
        peak = (
            torch.cuda.max_memory_allocated() / 2**20 if scale.kind == "cuda" else 0.0
        )
        rows.append(row(f"peak, {precision} teacher", peak, "MiB"))
        memory_of_run = next(
            line["optimizer_mib"]
            for line in reversed(metrics(folder))
            if "optimizer_mib" in line
        )
        rows.append(
            row(
                f"optimizer state, {precision} teacher",
                memory_of_run,
                "MiB",
                "ZeRO-1 divides it by the ranks",
            )
        )
    return rows


def teacher(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Measure the frozen forward in each mode, and how far its logits are from
    float32's.
    """
    from kd.config.schema import TeacherSection
    from kd.jobs.stopwatch import seconds_of
    from kd.models.load_classifier import load
    from kd.models.spec import Spec
    from kd.parts import registry
    from kd.setup.build_teacher import PLAIN, TeacherFactory
    from kd.setup.modes import ExecutionMode, noise_batch, short_message

    module = registry.find("backends", scale.kind, "backend.kind")
    backend = module.build(module.Options(), precision="fp32", timeout_seconds=60.0)
    model = load(
        Spec(
            "teacher", scale.teacher, scale.teacher_args, [str(i) for i in range(101)]
        ),
        scale.size,
    )
    factory = TeacherFactory(TeacherSection(), model, backend, scale.size)
    batch = noise_batch(scale.batch, scale.size, backend)
    exact = factory(PLAIN)(batch).logits
    rows = []
    for precision, kernel, *compiled in (text.split("+") for text in MODES):
        mode = ExecutionMode(precision, kernel, bool(compiled))
        try:
            factory(mode)(batch)
        except Exception as error:  # compilers fail in their own ways
            rows.append(row(f"teacher, {mode}", 0.0, "not run", short_message(error)))
            continue
        live = factory(mode)
        live(batch)
        milliseconds = 1000 * seconds_of(lambda live=live: live(batch).logits)
        error = (live(batch).logits - exact).abs().max().item() / exact.std().item()
        rows.append(
            row(
                f"teacher, {mode}",
                1000 * scale.batch / milliseconds,
                "images/s",
                f"batch {scale.batch}",
            )
        )
        rows.append(
            row(f"teacher, {mode}", error, "largest logit error / standard deviation")
        )
    return rows


def export(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Export a student that was trained here and compare ONNX Runtime with PyTorch."""
    from kd.deploy.export.export import export as job
    from kd.deploy.export.flags import ExportOptions

    folder = train(scale, work, "exported", "run.steps=2")
    start = time.perf_counter()
    written = job(folder, work / "export", ExportOptions(images=32))
    return [
        row("kd-export", time.perf_counter() - start, "s", "; ".join(written.lines))
    ]


def tests(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Run the tests that need a GPU."""
    report = work / "tests.xml"
    marked = (
        ["-m", "cuda"] if scale.kind == "cuda" else ["-m", "cuda", "--collect-only"]
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *marked,
        f"--junitxml={report}",
    ]
    process = subprocess.run(
        [*argv, "tests/cuda"], cwd=ROOT, capture_output=True, text=True
    )
    if process.returncode not in (0, 1):
        raise SystemExit((process.stdout + process.stderr)[-3000:])
    print(process.stdout[-3000:])
    if scale.kind != "cuda":
        return [row("tests marked cuda", process.stdout.count("::test_"), "collected")]
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")),
            None,
        )
        note = (
            " ".join((outcome.get("message") or "").split())[:200]
            if outcome is not None
            else ""
        )
        verdict = "passed" if outcome is None else outcome.tag
        rows.append(
            row(
                f"{case.get('name')}",
                float(case.get("time") or 0),
                f"s, {verdict}",
                note,
            )
        )
    return rows


def timm(scale: Scale, work: Path, options: argparse.Namespace) -> list[Row]:
    """Train beside timm's train.py in turns, where a checkout of timm is given."""
    if not options.timm:
        return [
            row(
                "timm's train.py beside kd",
                0.0,
                "not run",
                "--timm FOLDER was not given",
            )
        ]
    argv = [
        sys.executable,
        "benchmarks/timm_distillation.py",
        "--timm",
        options.timm,
        "--data",
        str(photographs(scale, work)),
    ]
    steps, teacher = ("24", "B") if scale.kind == "cuda" else ("8", "S")
    workers = str(max(1, len(os.sched_getaffinity(0)) - 4))
    argv += (
        f"--rounds 1 --steps {steps} --batch {scale.batch} --teachers {teacher}"
        f" --workers {workers}".split()
    )
    text = subprocess.run(
        argv, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [
        row(
            "timm's train.py beside kd",
            0.0,
            "see its CSV",
            text.strip().splitlines()[-2],
        )
    ]


# ---- what the parts share
# --------------------------------------------------------------------------------


def finish_steps(work: Callable[[], object], steps: int, device: Any) -> float:
    """Return the seconds of so many steps, launched without waiting, after one that is
    not counted.
    """
    import mfu

    work()
    mfu.wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        work()
    mfu.wait(device)
    return time.perf_counter() - start


def device_name(device: Any) -> str:
    """Return the name of a GPU; "" on a CPU."""
    import torch

    return torch.cuda.get_device_name().lower() if device.type == "cuda" else ""


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the training rows of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in rows if line["kind"] == "train"]


def speed_rows(name: str, lines: list[dict[str, Any]], note: str) -> list[Row]:
    """Return images a second, and the share of the time in which the device had no data
    to work on.
    """
    speed, wait = (
        statistics.median(line[key] for line in lines)
        for key in ("images_per_second", "data_wait")
    )
    return [
        row(name, speed, "images/s", note),
        row(f"{name}: waits for data", 100 * wait, "% of the time"),
    ]


def photographs(scale: Scale, work: Path) -> Path:
    """Paint photographs, JPEG files of some detail, once; many names share a file."""
    import numpy as np
    from PIL import Image

    root = work / "photographs"
    if root.is_dir():
        return root
    making = work / "photographs.part"
    side = scale.size + scale.size // 4
    shutil.rmtree(making, ignore_errors=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", scale.photos), ("val", scale.painted)):
        for number in range(count):
            folder = making / split / f"class{number % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            first = folder / f"{number % scale.painted:06d}.jpg"
            if number < scale.painted:
                coarse = generator.integers(0, 256, (side // 8, side // 8, 3), np.uint8)
                Image.fromarray(coarse).resize(
                    (side, side), Image.Resampling.BICUBIC
                ).save(first, quality=90)
            else:
                os.link(first, folder / f"{number:06d}.jpg")
    return making.rename(root)


def teacher_folder(model: str, args: dict[str, Any], folder: Path) -> Path:
    """Write a teacher of random weights as a folder that timm loads, once."""
    import timm as library
    from timm.models import save_for_hf

    if not (folder / "model.safetensors").is_file():
        network = library.create_model(model, num_classes=CLASSES, **args)
        save_for_hf(network, str(folder), model_args=args, safe_serialization=True)
    return folder


def machine(scale: Scale) -> dict[str, Any]:
    """Return the section `backend` of a run."""
    return (
        {"kind": "cuda", "precision": "bf16"}
        if scale.kind == "cuda"
        else {"kind": "cpu", "precision": "fp32", "threads": 1}
    )


def train(
    scale: Scale, work: Path, name: str, *overrides: str, fresh: bool = True
) -> Path:
    """Distill with kd and return the run folder; `fresh`: one that a cut attempt left
    is removed first.
    """
    from kd import config
    from kd.jobs.train import train as job

    settings = {
        "run": {
            "folder": str(work / "runs"),
            "name": name,
            "epochs": 10,
            "every": {"log": 4, "evaluate": 10**6},
        },
        "data": {
            "kind": "imagefolder",
            "root": str(photographs(scale, work)),
            "image_size": scale.size,
        },
        "teacher": {
            "model": str(
                teacher_folder(scale.teacher, scale.teacher_args, work / "teacher")
            ),
            "min_accuracy": 0,
        },
        "student": {"model": STUDENT, "args": scale.student_args},
        "losses": [{"kind": "kl", "temperature": 2.0}],
        "optimizer": {"lr": 1e-3},
        "backend": machine(scale),
    }
    settings["data"] |= {"batch_size": scale.batch}
    if scale.kind == "cpu":
        settings["data"] |= {"workers": 0}
    if fresh:
        shutil.rmtree(work / "runs" / name, ignore_errors=True)
    return job(config.load(settings, list(overrides))).folder
