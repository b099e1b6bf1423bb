"""Recipe -> Run: the only place where a run is assembled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kd import parts
from kd.config.schema import BackendSection, OptimizerSection, RunSection
from kd.contracts import Backend, Loader, Logger, RunStore, Sifter, Teacher, TeacherModel
from kd.data.loader import evaluation_plan
from kd.data.views import Views
from kd.data.workers import worker_error
from kd.engine import threads as threads_of_a_step
from kd.engine.criterion import Distillation
from kd.engine.embedding import EmbeddingEvaluator, Split
from kd.engine.evaluate import Evaluator
from kd.engine.label_sets import LabelSetEvaluator
from kd.engine.run import Run, RunLength
from kd.host import cores
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.monitor.region import region
from kd.optim import EMA, Schedule, groups
from kd.setup.batch import choose_batch, provisional_batch
from kd.setup.cache import open_cache
from kd.setup.data import BatchSplit, Data, evaluation_loader, evenly_spaced, loaders, split_batch, views
from kd.setup.gate import choose_sifter, sift_context
from kd.setup.recipe import Choices, Recipe, Session
from kd.setup.student import apply_mode, build_criterion, build_student, choose_student, sizes
from kd.setup.teacher import TeacherReport, choose_teacher

BANK = 10_000
"""Training images at most, evenly spaced, that an embedding student's neighbours are looked for among."""


@contextmanager
def distributed(section: BackendSection) -> Iterator[Backend]:
    """Join the world of a backend, and leave it again.

    Raises:
        BackendError: the world is not whole, or another rank is gone.
        RunError: a worker process of the data has ended.
    """
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
    context = {"precision": precision, "timeout_seconds": section.timeout_seconds}
    return parts.build("backends", section.kind, section.options, "backend.kind", **context)


def run_length(section: RunSection, split: BatchSplit, views: int) -> RunLength:
    """Return how long the run is."""
    return RunLength(
        epochs=section.epochs,
        steps=section.steps,
        batch_size=split.batch_size,
        accumulate=split.accumulate,
        views=views,
        log=section.every.log,
        evaluate=section.every.evaluate,
        checkpoint=section.every.checkpoint,
    )


def build_optimizer(section: OptimizerSection, module: Distillation, backend: Backend) -> torch.optim.Optimizer:
    """Build the optimizer with fused kernels where the device has them."""
    network: nn.Module = getattr(module.student, "network", module.student)  # it knows what must not decay
    parameters = groups([network, module.criterion], section.weight_decay)
    fused = backend.device.type in ("cpu", "cuda")
    if section.kind == "sgd":
        options: dict[str, Any] = {"momentum": section.momentum, "nesterov": section.momentum > 0}
        cls: type[torch.optim.Optimizer] = torch.optim.SGD
    else:
        options, cls = {"betas": tuple(section.betas)}, torch.optim.AdamW
    return backend.optimizer(parameters, cls, section.zero, lr=section.lr, fused=fused, **options)


def assemble(
    section: OptimizerSection,
    seed: int,
    length: RunLength,
    backend: Backend,
    distillation: Distillation,
    teacher: Teacher,
    loader: Loader,
    sifter: Sifter,
    evaluator: Evaluator | EmbeddingEvaluator,
    store: RunStore,
    logger: Logger,
) -> Run:
    """Put a run together from its parts.

    Args:
        section: the optimizer, its schedule and its averaged weights.
        seed: of the run.
        length: how long it is.
        backend: set up.
        distillation: the student and its losses, on the device.
        teacher: answers in a step: live, or behind its cache.
        loader: of the training images.
        sifter: plans the epochs.
        evaluator: of the validation split.
        store: metrics and checkpoints.
        logger: shows them.
    """
    return Run(
        seed=seed,
        length=length,
        max_norm=section.clip,
        backend=backend,
        module=backend.wrap(distillation),
        distillation=distillation,
        teacher=teacher,
        loader=loader,
        sifter=sifter,
        optimizer=build_optimizer(section, distillation, backend),
        schedule=Schedule(section.lr, section.warmup, section.min_lr, section.schedule),
        average=EMA(distillation.student, section.ema) if section.ema else None,
        evaluator=evaluator,
        store=store,
        logger=logger,
        skip_nonfinite=section.on_nonfinite == "skip",
    )


@dataclass(frozen=True, slots=True)
class Built:
    """A run, and what its set-up found out."""

    run: Run
    facts: dict[str, Any]
    """For the manifest: what was chosen and measured."""


def build_run(
    recipe: Recipe,
    data: Data,
    backend: Backend,
    teacher: TeacherModel | None,
    store: RunStore,
    logger: Logger,
    recorded: Mapping[str, Any] = {},
) -> Built:
    """Build the run of a recipe.

    Args:
        recipe: what is trained.
        data: both splits.
        backend: set up.
        teacher: the loaded teacher, or None for labels alone.
        store: where results go.
        logger: who shows them.
        recorded: choices of an earlier start of this run, so that a resumed run computes the same bits.
    """
    seed, kept = recipe.seed, recipe.teacher.cache.views
    chosen = _with_threads(Choices.read(recorded), recipe.backend, backend)
    searching = recipe.data.batch_size == "auto" and not chosen.batch_size
    provisional = provisional_batch(len(data.train), backend) if searching else chosen.batch_size
    split = split_batch(recipe.data, backend.world_size, len(data.train), provisional)
    session = Session(backend, data, split)
    distillation = _distillation(recipe, data, teacher)
    distillation.to(backend.device)

    visits = recipe.run.images(len(data.train), split.batch_size) // backend.world_size
    asked = min(visits, kept * len(data.train) // backend.world_size) if kept else visits
    reads = "teacher" in recipe.needs
    with region("choose teacher"):
        report = choose_teacher(session, recipe.teacher, teacher, asked if reads else 0, chosen.teacher)
    with region("open cache"):
        answering = _answering(recipe, session, report, teacher)
    student = (session, distillation, recipe.student, recipe.backend.precision)
    with region("choose student"):
        mode = choose_student(*student, report.live, visits, chosen.student)
        apply_mode(mode.mode, distillation, backend)
    for name, summary in (("teacher", report.summary), ("student", mode.summary)):
        logger.info(f"{name}: {summary}" if summary else "")
    search = ""
    if searching:
        with region("choose batch size"):
            found = choose_batch(session, distillation, report.live, recipe.optimizer)
        chosen, search = replace(chosen, batch_size=found.size * backend.world_size), found.summary
        split = split_batch(recipe.data, backend.world_size, len(data.train), chosen.batch_size)
        session = replace(session, split=split)

    loader, val_loader = loaders(views(data, seed), recipe.data, split, backend, recipe.backend.timeout_seconds)
    length = run_length(recipe.run, split, recipe.views)
    context = sift_context(len(data.train), data.labels, backend, split, seed, length.views)
    share = min(1.0, kept / recipe.run.epochs) if kept and not recipe.run.steps else 1.0
    steps = length.steps or length.epochs * (len(data.train) // split.batch_size)
    gated = (session, distillation, recipe.sifter, context, loader, answering, share, steps)
    with region("choose sifter"):
        sifter, decision, summary = choose_sifter(*gated, chosen.sifter)
    logger.info(summary)
    chosen = replace(chosen, teacher=report.mode, student=str(mode.mode), sifter=decision)
    evaluator = _evaluator(recipe, session, distillation, report.live.validation(), teacher, val_loader)
    parts = (distillation, answering, loader, sifter, evaluator, store, logger)
    run = assemble(recipe.optimizer, seed, length, backend, *parts)
    steps = recipe.run.images(len(data.train), split.batch_size) // split.batch_size
    run = _tuned(run, recipe, steps, chosen.threads)
    backend.end_step()  # on XLA what was built so far would otherwise be part of the first step's graph
    facts = {"decides": evaluator.decides, "choices": chosen.record(), "batch": str(split), "workers": loader.workers}
    facts["measured_ms"] = {k: v for k, v in (("teacher", report.table), ("student", mode.table)) if v}
    return Built(run, facts | ({"batch_search": search} if search else {}) | teacher_facts(report, backend))


def _tuned(run: Run, recipe: Recipe, steps: int, threads: int) -> Run:
    """Let a long run on a CPU compare threads on its own steps, where they are left to it."""
    left = run.backend.device.type == "cpu" and getattr(recipe.backend.options, "threads", 1) == 0 and threads > 1
    if left and steps >= threads_of_a_step.SHORTEST:
        run = replace(run, threads=threads_of_a_step.Threads(run.backend, threads, run.logger.info))
    return run


def _answering(recipe: Recipe, session: Session, report: TeacherReport, teacher: TeacherModel | None) -> Teacher:
    """Return who answers in a step: the live teacher, its cache, or nobody where no loss reads a teacher."""
    if teacher is None or "teacher" not in recipe.needs:
        return NoTeacher()
    if not recipe.teacher.cache.views:
        return report.live
    answers = len(session.data.classes) if recipe.reads.teacher_logits else 0
    given = (report, teacher, session, answers, recipe.reads.sigmoid)
    return open_cache(recipe.teacher, recipe.run.folder, recipe.seed, *given)


def _evaluator(
    recipe: Recipe,
    session: Session,
    distillation: Distillation,
    live: Teacher,
    teacher: TeacherModel | None,
    loader: Loader,
) -> Evaluator | EmbeddingEvaluator:
    """Return what scores the student: on its answers, or on its vectors where it has no classifier."""
    backend, data, reads = session.backend, session.data, recipe.reads
    plan = evaluation_plan(len(data.val), session.split.eval_batch * backend.world_size)
    classes = len(data.classes)
    if reads.student_logits:
        answers = teacher is not None and reads.teacher_logits
        kind = LabelSetEvaluator if reads.sigmoid else Evaluator
        return kind(backend, loader, plan, live, answers, classes, data.labelled)
    known = data.labelled and classes > 1
    bank = bank_split(session, recipe.seed, recipe.backend.timeout_seconds) if known else None
    members = len(getattr(teacher, "members", [teacher]))
    return EmbeddingEvaluator(backend, Split(loader, plan), bank, live, distillation.criterion, classes, members)


def bank_split(session: Session, seed: int, timeout_seconds: float) -> Split:
    """Return training images without augmentation, up to `BANK`, for evaluations to search in."""
    data, backend, split = session.data, session.backend, session.split
    source, section = (data.kept or (data.train, data.val))[0], data.section
    shown = Views(source, data.evaluate(), section.image_size, seed, on_corrupt=section.on_corrupt)
    batch = split.eval_batch * split.world_size
    loader = evaluation_loader(shown, section, split, backend, timeout_seconds)
    ids = torch.tensor(evenly_spaced(len(source), BANK))
    plan = evaluation_plan(len(ids), batch)
    return Split(loader, replace(plan, ids=ids[plan.ids]))


def _with_threads(chosen: Choices, section: BackendSection, backend: Backend) -> Choices:
    """Set torch's threads on a CPU as they were when the run began: the bits depend on them.

    An earlier run of this process, such as a teacher's fit, may have left another number.
    """
    if backend.device.type != "cpu":
        return chosen
    rule = getattr(section.options, "threads", 0) or max(1, cores() // backend.local_world_size)
    torch.set_num_threads(chosen.threads or rule)
    return replace(chosen, threads=torch.get_num_threads())


def _distillation(recipe: Recipe, data: Data, teacher: TeacherModel | None) -> Distillation:
    """Build the student and what it minimizes as one module."""
    classes, size, reads = data.classes, data.section.image_size, recipe.reads
    student = build_student(recipe.student, recipe.seed, classes if reads.student_logits else (), size, reads.features)
    dims = sizes(len(classes), student, teacher, size)
    shares = getattr(teacher, "shares", (1.0,))
    return Distillation(student, build_criterion(recipe.losses, dims, recipe.seed, shares, data.labelled_share()))


def teacher_facts(report: TeacherReport, backend: Backend) -> dict[str, Any]:
    """Return facts about the live teacher for the manifest, besides its mode."""
    facts: dict[str, Any] = {"teacher_error": report.error} if report.error else {}
    held = backend.counters().get("teacher_mib")
    if held is not None and isinstance(report.live, LiveTeacher):  # divided over the ranks
        facts["teacher_mib"] = {"whole": report.live.mib, "rank": held}
    return facts
