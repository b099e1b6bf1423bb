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
from kd.data.loader import LocalLoader, evaluation_plan
from kd.data.workers import worker_error
from kd.engine.criterion import StudentWithLoss
from kd.engine.monitor.timeline import region
from kd.engine.optim import EMA, Schedule
from kd.engine.run import Logger, Run, RunStore
from kd.models.examination import require_apart
from kd.models.live_teacher import LiveTeacher, NoTeacher
from kd.parts import registry
from kd.setup.build_teacher import RunContext, TeacherReport, choose_teacher
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
        explained = worker_error(error) or backend.explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        backend.close()


def build_backend(section: BackendSection) -> Backend:
    """Build the backend; the caller sets it up and closes it."""
    precision = "fp32" if section.precision == "auto" else section.precision
    arguments = ("backends", section.kind, section.options, "backend.kind")
    backend = registry.build(
        *arguments, precision=precision, timeout_seconds=section.timeout_seconds
    )
    backend.facts = registry.facts(*arguments)
    return backend


def build_optimizer(
    recipe: Recipe, module: StudentWithLoss, backend: Backend
) -> torch.optim.Optimizer:
    """Build the optimizer, with fused kernels if the device has them."""
    section = recipe.config.optimizer
    parameters = parameter_groups(recipe.student.tuning, section.weight_decay, module)
    betas = tuple(section.betas)
    options: dict[str, Any] = {"fused": backend.facts.complete}
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    if section.kind == "muon":
        from timm.optim.muon import Muon  # loads all of timm's optimizers

        cls = Muon
        options = {"betas": betas, "nesterov": True}
    elif section.kind == "sgd":
        cls = torch.optim.SGD
        options |= {"momentum": section.momentum, "nesterov": section.momentum > 0}
    else:
        options["betas"] = betas
    return backend.optimizer(parameters, cls, section.zero, lr=recipe.lr, **options)


def settings_of(
    recipe: Recipe, distillation: StudentWithLoss, backend: Backend
) -> dict[str, Any]:
    """Return the fields of a `Run` that follow from its recipe.

    The module is on the device, and the backend is set up.
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
            recipe.lr, section.warmup_ratio, section.min_lr_ratio, section.schedule
        ),
        "average": (
            EMA(distillation.student, section.ema_decay) if section.ema_decay else None
        ),
        "skip_nonfinite": section.on_nonfinite == "skip",
    }


@dataclass(frozen=True, slots=True)
class Built:
    """Hold a run, and the findings of its set-up."""

    run: Run
    facts: dict[str, Any]  # see `setup_facts`
    val: Source  # number of validation images
    test: Source | None  # number of test images; 0: no test split
    # builds the test split's evaluator, if there is one
    test_evaluator: Callable[[], Evaluator]


def build_run(context: RunContext, store: RunStore, logger: Logger) -> Built:
    """Build a run; without a teacher model it trains on labels alone."""
    recipe = context.recipe
    backend = context.backend
    data = context.data
    split = context.split
    model = context.teachers.model
    distillation = build_distillation(recipe, context.teachers, split.micro_batch)
    teachers = dict(zip(recipe.members, context.teachers.members, strict=False))
    require_apart(distillation.student, teachers, "student.model")  # type: ignore[arg-type]
    distillation.to(backend.device)

    with region("choose teacher"):
        report = choose_teacher(context)
    logger.info(f"teacher: {report.line}" if report.line else "")
    with region("open cache"):
        teacher: Teacher = report.live if recipe.read.teacher else NoTeacher()
        if model is not None and recipe.read.teacher and recipe.teacher.cache.views:
            from kd.setup.open_cache import open_cache  # only if outputs are stored

            teacher = open_cache(report, context)
    with region("choose student"):
        mode = choose_student(context, distillation, report.live)
        apply_mode(mode, distillation, backend)
    loader, val_loader = loaders(
        data.views(), data.plan, split, backend, recipe.backend.timeout_seconds
    )
    sifter, warning = build_sifter(context, getattr(teacher, "stored", None))
    logger.info(warning)
    evaluation = _evaluation(context, distillation, report, val_loader)
    run = Run(
        accumulate=split.accumulate,
        teacher=teacher,
        loader=loader,
        sifter=sifter,
        evaluator=recipe.task.evaluator(evaluation),
        store=store,
        logger=logger,
        **settings_of(recipe, distillation, backend),
    )
    test = partial(test_evaluator, context, evaluation, report.live)
    # on XLA the set-up would otherwise be part of the first step's graph
    backend.end_step()
    facts = setup_facts(context, report, mode, run)
    return Built(run, facts, data.val, data.test, test)


def _evaluation(
    context: RunContext,
    distillation: StudentWithLoss,
    report: TeacherReport,
    val_loader: LocalLoader,
) -> Evaluation:
    recipe = context.recipe
    data = context.data
    split = context.split
    bank = data.stored[0] if data.stored else data.train
    bank_ids = torch.tensor(evenly_spaced(len(bank), BANK))
    scored = recipe.read.teacher_logits or not recipe.task.logits
    scored = scored and context.teachers.model is not None
    plan = evaluation_plan(len(data.val), split.eval_batch * split.world_size)
    return Evaluation(
        backend=context.backend,
        val=Split(val_loader, plan),
        teacher=report.live.validation() if scored else None,
        num_classes=len(data.classes),
        labelled=data.labelled,
        partly=data.plan.labels == "some",
        bank=partial(shown_split, context, bank, bank_ids),
        bank_teacher=report.live,
        agreement=distillation.criterion.agreement,
        projected=distillation.criterion.projected,
        members=len(context.teachers.members),
    )


def setup_facts(
    context: RunContext, report: TeacherReport, mode: ExecutionMode, run: Run
) -> dict[str, Any]:
    """Return the findings of a set-up for the manifest; `mode` is the student's."""
    facts = {
        "decides": run.evaluator.selection_metric,
        "task": context.recipe.task.name,
        "scores": context.recipe.task.scores.record(),
        "modes": {
            **({"teacher": str(report.mode)} if report.mode else {}),
            "student": str(mode),
        },
        "threads": torch.get_num_threads() if run.backend.facts.cpu else 0,
        "batch": str(context.split),
        "lr": context.recipe.lr,
        "workers": getattr(run.loader, "workers", 0),
    }
    if report.error:
        facts["teacher_error"] = report.error
    rank_mib = run.backend.counters().get("teacher_mib")
    # divided over the ranks
    if rank_mib is not None and isinstance(report.live, LiveTeacher):
        facts["teacher_mib"] = {"whole": report.live.mib, "rank": rank_mib}
    return facts


def test_evaluator(
    context: RunContext, evaluation: Evaluation, live: LiveTeacher | NoTeacher
) -> Evaluator:
    """Return the evaluator of the test split, built at the end of a run."""
    source = context.data.test
    assert source is not None
    split = shown_split(context, source, torch.arange(len(source)))
    split = replace(split, name="test")
    teacher = live.validation(test=True) if evaluation.teacher is not None else None
    evaluation = replace(evaluation, val=split, teacher=teacher)
    return context.recipe.task.evaluator(evaluation)


def shown_split(context: RunContext, source: Source, ids: torch.Tensor) -> Split:
    """Return evaluation's view of a source's images, by their ids [N]."""
    data = context.data
    split = context.split
    seconds = context.recipe.backend.timeout_seconds
    loader = evaluation_loader(
        data.evaluation_views(source), data.plan, split, context.backend, seconds
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


def build_sifter(context: RunContext, answers: Any) -> tuple[Sifter, str]:
    """Build the sifter; also return a warning if its delay exceeds the run.

    `answers`: stored outputs, or None.
    """
    recipe = context.recipe
    data = context.data
    sifting = sift_context(
        len(data.train), data.labels, context.backend, context.split, recipe.seed
    )
    plan = data.plan
    sifting = replace(sifting, views=plan.views, balance=plan.balance, answers=answers)
    return sifter_of(recipe, sifting)


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
    """Build the sifter of a context.

    Also return a warning if its delay exceeds the run.
    """
    kind = recipe.config.sifter.kind
    options = recipe.config.sifter.options
    length = recipe.length
    warning = ""
    facts = registry.facts("sifters", kind, options, "sifter.kind")
    steps_in_epoch = context.num_images // length.batch_size
    steps = length.steps or length.epochs * steps_in_epoch
    period = "the run"
    if facts.each_epoch and steps_in_epoch < steps:
        steps = steps_in_epoch
        period = "an epoch"
    if steps <= facts.delay:
        warning = (
            f"sifter '{kind}' waits for {facts.delay} steps and {period} has {steps}:"
            " everything is visited. Lower sifter.sift_delay"
        )
        kind = "none"
        options = registry.default_options("sifters", kind)
    sifter = registry.build("sifters", kind, options, "sifter.kind", context=context)
    return sifter, warning
