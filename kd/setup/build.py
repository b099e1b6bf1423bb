"""Assemble a run from plans; the only place that does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kd.config.schema import BackendSection
from kd.core.contracts import Backend, Sifter, Source, Teacher
from kd.core.evaluation import Evaluation, Evaluator, Split
from kd.core.seeds import evenly_spaced
from kd.core.types import SiftContext
from kd.data.loader import evaluation_plan
from kd.data.workers import worker_error
from kd.engine.criterion import StudentWithLoss
from kd.engine.monitor.timeline import region
from kd.engine.optim import EMA, Schedule
from kd.engine.run import Logger, Run, RunStore
from kd.models.examination import require_apart
from kd.models.live_teacher import LiveTeacher, NoTeacher
from kd.parts import registry
from kd.setup.build_teacher import Setting, TeacherReport, choose_teacher
from kd.setup.data import BatchSplit, Data, evaluation_loader, loaders
from kd.setup.modes import ExecutionMode
from kd.setup.recipe import Recipe
from kd.setup.student import (
    apply_mode,
    build_distillation,
    choose_student,
    parameter_groups,
)

# most training images in the k-NN index that scores an embedding student; shown without
# augmentation
BANK = 10_000


@contextmanager
def distributed(section: BackendSection) -> Iterator[Backend]:
    """Join a backend's process group for this block."""
    backend = build_backend(section)
    backend.setup()
    try:
        yield backend
    except RuntimeError as error:
        known = worker_error(error) or backend.explain(error)
        if known is None:
            raise
        raise known from error
    finally:
        backend.close()


def build_backend(section: BackendSection) -> Backend:
    """Build the backend; the caller sets it up and closes it."""
    precision = "fp32" if section.precision == "auto" else section.precision
    kind, options, seconds = section.kind, section.options, section.timeout_seconds
    made = registry.build(
        "backends",
        kind,
        options,
        "backend.kind",
        precision=precision,
        timeout_seconds=seconds,
    )
    made.facts = registry.facts("backends", kind, options, "backend.kind")
    return made


def build_optimizer(
    recipe: Recipe, module: StudentWithLoss, backend: Backend
) -> torch.optim.Optimizer:
    """Build the optimizer, with fused kernels if the device has them."""
    section = recipe.config.optimizer
    parameters = parameter_groups(recipe.student.tuning, section.weight_decay, module)
    fused, betas = backend.facts.complete, tuple(section.betas)
    cls: type[torch.optim.Optimizer]
    if section.kind == "muon":
        from timm.optim.muon import Muon  # loads all of timm's optimizers

        cls, options = Muon, {"betas": betas, "nesterov": True}
    elif section.kind == "sgd":
        cls, options = (
            torch.optim.SGD,
            {
                "momentum": section.momentum,
                "nesterov": section.momentum > 0,
                "fused": fused,
            },
        )
    else:
        cls, options = torch.optim.AdamW, {"betas": betas, "fused": fused}
    return backend.optimizer(parameters, cls, section.zero, lr=section.lr, **options)


def settings_of(
    recipe: Recipe, distillation: StudentWithLoss, backend: Backend
) -> dict[str, Any]:
    """Return the fields of a `Run` that follow from its recipe; the module is on the
    device, the backend set up.
    """
    section = recipe.config.optimizer
    return {
        "seed": recipe.seed,
        "length": recipe.length,
        "max_norm": section.clip_grad_norm,
        "backend": backend,
        "module": backend.wrap(distillation),
        "distillation": distillation,
        "optimizer": build_optimizer(recipe, distillation, backend),
        "schedule": Schedule(
            section.lr, section.warmup_ratio, section.min_lr_ratio, section.schedule
        ),
        "average": (
            EMA(distillation.student, section.ema_decay) if section.ema_decay else None
        ),
        "skip_nonfinite": section.on_nonfinite == "skip",
    }


@dataclass(frozen=True, slots=True)
class Built:
    """A run, and the findings of its set-up."""

    run: Run
    facts: dict[str, Any]  # see `found_out`
    val: Source  # number of validation images
    test: Source | None  # number of test images; 0: no test split
    test_evaluator: Callable[
        [], Evaluator
    ]  # builds the test split's evaluator, if there is one


def build_run(setting: Setting, store: RunStore, logger: Logger) -> Built:
    """Build the run of a setting; without a teacher model it trains on labels alone."""
    recipe, backend, data, split = (
        setting.recipe,
        setting.backend,
        setting.data,
        setting.split,
    )
    model, task = setting.teachers.model, recipe.task
    distillation = build_distillation(recipe, setting.teachers, split.micro_batch)
    teachers = dict(zip(recipe.members, setting.teachers.members, strict=False))
    require_apart(distillation.student, teachers, "student.model")  # type: ignore[arg-type]
    distillation.to(backend.device)

    with region("choose teacher"):
        report = choose_teacher(setting)
    logger.info(f"teacher: {report.line}" if report.line else "")
    with region("open cache"):
        answering: Teacher = report.live if recipe.read.teacher else NoTeacher()
        if model is not None and recipe.read.teacher and recipe.teacher.cache.views:
            from kd.setup.open_cache import open_cache  # only if outputs are stored

            answering = open_cache(report, setting)
    with region("choose student"):
        mode = choose_student(setting, distillation, report.live)
        apply_mode(mode, distillation, backend)
    loader, val_loader = loaders(
        data.views(), data.plan, split, backend, recipe.backend.timeout_seconds
    )
    sifter, line = build_sifter(setting, getattr(answering, "stored", None))
    logger.info(line)
    bank = data.stored[0] if data.stored else data.train
    scored = model is not None and (recipe.read.teacher_logits or not task.logits)
    evaluation = Evaluation(
        backend=backend,
        val=Split(
            val_loader,
            evaluation_plan(len(data.val), split.eval_batch * backend.world_size),
        ),
        teacher=report.live.validation() if scored else None,
        num_classes=len(data.classes),
        labelled=data.labelled,
        partly=data.plan.labels == "some",
        bank=partial(
            shown_split, setting, bank, torch.tensor(evenly_spaced(len(bank), BANK))
        ),
        bank_teacher=report.live,
        agreement=distillation.criterion.agreement,
        projected=distillation.criterion.projected,
        members=len(setting.teachers.members),
    )
    run = Run(
        accumulate=split.accumulate,
        teacher=answering,
        loader=loader,
        sifter=sifter,
        evaluator=task.evaluator(evaluation),
        store=store,
        logger=logger,
        **settings_of(recipe, distillation, backend),
    )
    test = partial(test_evaluator, setting, evaluation, report.live)
    # on XLA the set-up would otherwise be part of the first step's graph
    backend.end_step()
    facts = found_out(setting, report, mode, run)
    return Built(run, facts, data.val, data.test, test)


def found_out(
    setting: Setting, report: TeacherReport, mode: ExecutionMode, run: Run
) -> dict[str, Any]:
    """Return the findings of a set-up for the manifest: models and execution modes;
    `mode` is the student's.
    """
    facts = {
        "decides": run.evaluator.selection_metric,
        "task": setting.recipe.task.name,
        "scores": setting.recipe.task.scores.record(),
        "modes": {
            **({"teacher": str(report.mode)} if report.mode else {}),
            "student": str(mode),
        },
        "threads": torch.get_num_threads() if run.backend.facts.cpu else 0,
        "batch": str(setting.split),
        "workers": getattr(run.loader, "workers", 0),
        **({"teacher_error": report.error} if report.error else {}),
    }
    held = run.backend.counters().get("teacher_mib")
    if held is not None and isinstance(
        report.live, LiveTeacher
    ):  # divided over the ranks
        facts["teacher_mib"] = {"whole": report.live.mib, "rank": held}
    return facts


def test_evaluator(
    setting: Setting, evaluation: Evaluation, live: LiveTeacher | NoTeacher
) -> Evaluator:
    """Return the evaluator of the test split, built at the end of a run."""
    source = setting.data.test
    assert source is not None
    split = replace(
        shown_split(setting, source, torch.arange(len(source))), name="test"
    )
    teacher = live.validation(test=True) if evaluation.teacher is not None else None
    return setting.recipe.task.evaluator(
        replace(evaluation, val=split, teacher=teacher)
    )


def shown_split(setting: Setting, source: Source, ids: torch.Tensor) -> Split:
    """Return evaluation's view of a source's images, by their ids [N]."""
    data, split, seconds = (
        setting.data,
        setting.split,
        setting.recipe.backend.timeout_seconds,
    )
    loader = evaluation_loader(
        data.shown(source), data.plan, split, setting.backend, seconds
    )
    plan = evaluation_plan(len(ids), split.eval_batch * split.world_size)
    return Split(loader, replace(plan, ids=ids[plan.ids]))


def sift_context(
    num_images: int,
    labels: Callable[[], torch.Tensor],
    backend: Backend,
    split: BatchSplit,
    seed: int,
) -> SiftContext:
    """Return a sifter's context: the images and their split into batches and ranks."""
    return SiftContext(
        num_images=num_images,
        batch_size=split.batch_size,
        micro_batch=split.micro_batch,
        rank=backend.rank,
        world_size=backend.world_size,
        seed=seed,
        labels=labels,
        reduce_sum=lambda tensor: backend.reduce_sum(tensor.to(backend.device)).cpu(),
        on_device=backend.facts.complete,
    )


def build_sifter(setting: Setting, answers: Any = None) -> tuple[Sifter, str]:
    """Build the sifter, with stored outputs (`answers`) or None; also return a warning
    if its delay exceeds the run.
    """
    data = setting.data
    context = sift_context(
        len(data.train),
        data.labels,
        setting.backend,
        setting.split,
        setting.recipe.seed,
    )
    return sifter_of(
        setting.recipe,
        replace(
            context, views=data.plan.views, balance=data.plan.balance, answers=answers
        ),
    )


def sifter_alone(recipe: Recipe, data: Data, split: BatchSplit) -> Sifter:
    """Build the sifter for an estimate: one process, nothing stored."""
    context = SiftContext.alone(data.labels(), split.batch_size, recipe.seed)
    context = replace(
        context,
        micro_batch=split.micro_batch,
        views=data.plan.views,
        balance=data.plan.balance,
    )
    return sifter_of(recipe, context)[0]


def sifter_of(recipe: Recipe, context: SiftContext) -> tuple[Sifter, str]:
    """Build the sifter of a context; also return a warning if its delay exceeds the
    run.
    """
    section, length, line = recipe.config.sifter, recipe.length, ""
    facts = registry.facts("sifters", section.kind, section.options, "sifter.kind")
    in_epoch, delay = context.num_images // length.batch_size, facts.delay
    steps, config_path = length.steps or length.epochs * in_epoch, "the run"
    if facts.each_epoch and in_epoch < steps:
        steps, config_path = in_epoch, "an epoch"
    kind, options = section.kind, section.options
    if steps <= delay:
        line = (
            f"sifter '{kind}' waits for {delay} steps and {config_path} has {steps}:"
            " everything is visited"
        )
        line += ". Lower sifter.sift_delay"
        kind, options = "none", registry.default_options("sifters", "none")
    return (
        registry.build("sifters", kind, options, "sifter.kind", context=context),
        line,
    )
