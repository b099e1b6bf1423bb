"""The memory that `--check` says: counted without values, and as torch's allocator
counts a real step.
"""

from functools import partial

import pytest
import torch
from pieces import slow
from torch.profiler import ProfilerActivity, profile

from kd import config
from kd.engine.criterion import StudentWithLoss
from kd.jobs.description import describe, held_bytes, step_bytes
from kd.models.classifier import set_attention
from kd.models.live_teacher import LiveTeacher, on_meta
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.setup.build import build_backend
from kd.setup.modes import ExecutionMode, Trial
from kd.setup.recipe import Recipe, resolve
from kd.setup.student import apply_mode, build_criterion

SIZE = 32
IMAGES = 48
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3}
VIT = {"patch_size": 4, **SMALL}


def recipe(*overrides: str) -> Recipe:
    settings = {
        "run": {"epochs": 1},
        "data": {"kind": "food_mini", "image_size": SIZE, "batch_size": IMAGES},
        "teacher": {"model": "vit_tiny_patch16_224", "precision": "fp32"},
        "student": {"model": "vit_tiny_patch16_224"},
        "losses": [{"kind": "kl"}],
        "backend": {"kind": "cpu", "precision": "fp32"},
    }
    return resolve(config.load(settings, overrides))


def models(
    plan: Recipe, name: str = "vit_tiny_patch16_224", **args: object
) -> tuple[StudentWithLoss, torch.nn.Module]:
    student, teacher = (
        load(
            Spec(
                "student",
                name,
                VIT if name.startswith("vit") else args,
                ["a", "b", "c"],
            ),
            SIZE,
        )
        for _ in range(2)
    )
    return (
        StudentWithLoss(student, build_criterion(plan.losses, [None], 0), plan.task),
        teacher,
    )


def allocated(work) -> int:
    """Return the peak that torch's allocator reports of a piece of work."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [
        event
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


LOW = ("backend.precision=bf16", "teacher.precision=bf16", "teacher.micro_batch=12")


@pytest.mark.parametrize(
    ("overrides", "name", "args"),
    [
        pytest.param(LOW, "vit_tiny_patch16_224", VIT, id="vit"),
        slow((), "test_resnet", {}, id="resnet"),
    ],
)
def test_a_counted_step_is_a_real_one(overrides, name, args):
    plan = recipe(*overrides)
    distillation, teacher = models(plan, name, **args)
    half = torch.bfloat16 if plan.teacher.precision == "bf16" else torch.float32
    counted = step_bytes(
        plan, on_meta(distillation), on_meta(teacher), IMAGES, reduced=False
    )
    backend = build_backend(plan.backend)
    live = LiveTeacher(teacher, backend.device, half, plan.teacher.micro_batch)
    apply_mode(ExecutionMode(plan.backend.precision, "unfused"), distillation, backend)
    set_attention(live.model, False)
    with Trial(distillation, live, backend, SIZE, IMAGES) as trial:
        trial.step()  # what is made once
        trial.__dict__.pop("outputs")
        real = allocated(trial.step)
    assert counted == pytest.approx(real, rel=0.1)


def test_an_evaluation_of_more_images_than_a_step_is_counted():
    """A fit of an EfficientNet-Lite0 was said to take the memory of a step of 32, and
    evaluated 500 at once.
    """
    plan = recipe()
    distillation, teacher = models(plan)
    count = partial(
        step_bytes, plan, on_meta(distillation), on_meta(teacher), IMAGES, reduced=False
    )
    counted = count(scored=20 * IMAGES)
    step = count()
    pixels = torch.zeros(20 * IMAGES, 3, SIZE, SIZE, dtype=torch.uint8)
    gradients = 4 * sum(p.numel() for p in distillation.parameters())

    @torch.no_grad()
    def evaluate() -> None:
        distillation.eval().student(pixels)

    set_attention(distillation, False)
    evaluate()  # what is made once
    real = allocated(evaluate) + pixels.nbytes + gradients
    assert counted > 1.5 * step
    assert counted == pytest.approx(real, rel=0.15)
    assert count(scored=1) == step


def test_the_peak_is_a_line_in_the_number_of_images():
    """And gradients that stay in the buckets of several ranks are added at
    most once.
    """
    plan = recipe()
    distillation, teacher = models(plan)
    weights = sum(p.numel() for p in distillation.parameters())
    alone = step_bytes(plan, distillation, teacher, 1, reduced=False)
    fixed = step_bytes(plan, distillation, teacher, 1, reduced=True)
    assert alone <= fixed <= alone + 4 * weights
    peaks = [
        step_bytes(plan, distillation, teacher, images, reduced=False)
        for images in (100, 200, 300)
    ]
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "floats"),
    [
        ([], 3),
        (["optimizer.ema_decay=0.9"], 4),
        (["optimizer.kind=sgd"], 2),
        (["optimizer.kind=muon"], 2),
        (["optimizer.zero=true"], 1.5),
    ],
)
def test_held_memory_is_floats_per_weight(overrides, floats):
    plan = recipe(*overrides)
    distillation, _ = models(plan)
    weights = sum(p.numel() for p in distillation.parameters())
    assert held_bytes(plan, distillation, 4) == 4 * weights * floats


def test_check_says_the_peak_of_the_largest_phase(settings):
    fitted = {
        "model": "vit_tiny_patch16_224",
        "args": {"patch_size": 8, **SMALL},
        "fit": {"epochs": 1},
    }
    lines = [
        describe(resolve(config.load({**settings, "teacher": fitted})), answers=full)
        for full in (False, True)
    ]
    fixed, peak = (line.splitlines()[-1].partition("memory    ")[2] for line in lines)
    assert "activations come on top" in fixed
    assert peak.endswith("weights, optimizer and the peak of a step or an evaluation")
    assert " in the fit of teacher" in peak
    assert int(peak.split(" MiB")[0]) >= int(fixed.split(" MiB")[0])
