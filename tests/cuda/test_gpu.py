"""Training on a GPU, compared with the CPU and with itself.

`cuda` needs a GPU (`make gpu`). `cpu` makes the same calls, so that no line is wrong on
the day a GPU is at hand.
"""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pieces import Trained, compared, slow, tiny

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "distributed"))

from ranks import World, start  # noqa: E402

from kd import config  # noqa: E402
from kd.core.errors import KdError  # noqa: E402
from kd.deploy.export.export import ExportOptions, export  # noqa: E402
from kd.jobs.train import train as job  # noqa: E402

STEPS = 8


@pytest.fixture(
    scope="module", params=[slow("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def kind(request) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    return request.param


@pytest.fixture(scope="module")
def settings(kind, photos, teacher, tmp_path_factory) -> dict[str, Any]:
    """A run of eight steps, three an epoch, in float32 without TensorFloat-32."""
    exact = {"tf32": False} if kind == "cuda" else {"threads": 1}
    every = {"log": 1, "evaluate": STEPS, "checkpoint": STEPS // 2}
    run = {
        "folder": str(tmp_path_factory.mktemp("runs")),
        "steps": STEPS,
        "every": every,
        "keep": 9,
    }
    backend = {"kind": kind, "timeout_seconds": 60, **exact}
    return compared(photos, teacher, run=run, student=tiny(1, 32), backend=backend)


@pytest.fixture(scope="module")
def train(settings) -> Callable[..., Trained]:
    """Train in this process, each run once: `train("live")`, `train("cached",
    "teacher.cache.views=2")`.
    """
    runs: dict[tuple[str, ...], Trained] = {}

    def run(*key: str, backend: dict[str, Any] = settings["backend"]) -> Trained:
        if key not in runs:
            loaded = config.load(
                {**settings, "backend": backend}, [f"run.name={key[0]}", *key[1:]]
            )
            runs[key] = Trained(job(loaded).folder)
        return runs[key]

    return run


@pytest.fixture(scope="module")
def world(settings, tmp_path_factory) -> Callable[..., tuple[World, Trained]]:
    """Train in two processes, both on the first device."""
    file = tmp_path_factory.mktemp("config") / "run.yaml"

    def run(
        name: str, backend: dict[str, Any], *overrides: str
    ) -> tuple[World, Trained]:
        file.write_text(
            yaml.safe_dump({**settings, "backend": {**backend, "precision": "fp32"}})
        )
        env = {"LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        argv = [file, f"run.name={name}", *overrides]
        processes = start(
            "kd.cli.training:train", argv, 2, env, path=(HERE.parent / "distributed",)
        )
        return processes, Trained(Path(settings["run"]["folder"]) / name)

    return run


def test_the_run_is_the_cpus(train):
    here = train("live")
    cpu = train(
        "on_the_cpu", backend={"kind": "cpu", "precision": "fp32", "threads": 1}
    )
    assert here.losses() == pytest.approx(cpu.losses(), rel=1e-3)
    assert here.losses()[-1] < 0.8 * here.losses()[0]


def test_bfloat16_is_near(train):
    exact = train("live").losses()
    rounded = train("bf16", "backend.precision=bf16", "teacher.precision=bf16").losses()
    assert rounded == pytest.approx(exact, rel=0.1)
    assert rounded != exact


def test_a_cached_run_is_the_live_run(train):
    live = train("two_views", "data.views=2")
    cached = train("cached", "teacher.cache.views=2", "teacher.cache.dtype=fp32")
    assert cached.losses() == pytest.approx(live.losses(), rel=1e-5)
    # the third epoch has the first one's views
    assert [row["teacher_images"] for row in cached.rows()] == [12] * 6 + [0] * 2


def test_a_sifted_run_ends(train):
    run = train("sifted", "sifter.kind=history", "sifter.keep=0.7")
    assert run.rows()[-1]["step"] == STEPS
    assert run.losses()[-1] < 0.8 * run.losses()[0]


def test_a_run_resumes_to_the_same_bits(train, settings):
    run = train("live")
    folder = run.folder.with_name("resumed")
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:08d}")
    job(config.load(settings, ["run.name=resumed"]))
    expected = run.checkpoint()
    tensors = Trained(folder).checkpoint()
    assert [
        name for name in expected if not torch.equal(expected[name], tensors[name])
    ] == []


def test_a_run_ends_its_workers(train):
    """Without the garbage collector: what forks later would inherit them, and the
    process would wait for each.
    """
    gc.disable()
    try:
        train("workers", "data.workers=2")
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_a_process_does_not_wait_for_workers_that_fill_pinned_memory(
    settings, tmp_path
):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    lines = [
        "import sys, time",
        "from kd import config",
        "from kd.jobs.train import train",
        "from kd.data import loader",
    ]
    lines += [
        "kept, build = [], loader.LocalLoader.__init__"
    ]  # somebody holds them to the end
    lines += [
        "loader.LocalLoader.__init__ = lambda self, *a, **b: (kept.append(self),"
        " build(self, *a, **b))[1]"
    ]
    lines += [
        "train(config.load(sys.argv[1], ['run.name=kept', 'data.workers=4']))",
        "print(time.time())",
    ]
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), file],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (
        time.time() - float(process.stdout.splitlines()[-1]) < 15
    )  # torch waits 5 s for each of eight


def test_two_processes_on_one_device_are_one(train, world, kind):
    backend = {
        "kind": "outside.shared_gpu",
        "device": "cuda:0" if kind == "cuda" else "cpu",
    }
    processes, pair = world("gloo", backend)
    processes.ended_well()
    assert pair.losses() == pytest.approx(train("live").losses(), rel=1e-3)
    processes, sharded = world("gloo_zero", backend, "optimizer.zero=true")
    processes.ended_well()
    assert sharded.losses() == pair.losses()
    mib = [run.rows()[-1]["optimizer_mib"] for run in (pair, sharded)]
    assert 0.2 * mib[0] < mib[1] < 0.8 * mib[0]


def test_two_processes_over_the_backends_own_group(train, world, kind, settings):
    processes, pair = world("own", {**settings["backend"], "timeout_seconds": 30})
    if kind == "cuda" and any(
        "Duplicate GPU" in log or "invalid usage" in log for log in processes.logs
    ):
        pytest.skip("nccl refuses two ranks on one GPU")
    processes.ended_well()
    assert pair.losses() == pytest.approx(train("live").losses(), rel=1e-3)


def test_compiled_models_say_the_same(train, kind):
    stance = torch.compiler.set_stance(
        "default" if kind == "cuda" else "force_eager"
    )  # a CPU would compile for long
    with stance:
        compiled = train("compiled", "teacher.compile=on", "student.compile=on")
    assert compiled.losses() == pytest.approx(train("live").losses(), rel=1e-3)
    assert compiled.manifest()["modes"]["student"].endswith("+compiled")


def test_a_quantized_teacher_is_near(train, kind):
    if kind == "cuda":
        with pytest.raises(KdError, match=r"teacher\.precision.*cpu"):
            train("int8", "teacher.precision=int8")
        return
    run = train("int8", "teacher.precision=int8")
    assert run.losses() == pytest.approx(train("live").losses(), rel=0.2)
    assert run.manifest()["teacher_error"]["of_std"] > 0


def test_the_exports_outputs_equal_the_students(train, tmp_path):
    written = export(
        train("live").folder, tmp_path / "export", ExportOptions(tolerance=1e-3)
    )
    assert (written.folder / "model.onnx").is_file()
