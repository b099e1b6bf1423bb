"""Plans -> Run: the only place where a run is assembled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kd.config.schema import BackendSection
from kd.core.contracts import Backend, Loader, Sifter, Source, Teacher, TeacherModel
from kd.core.evaluation import Evaluation, Evaluator, Split, Task
from kd.core.facts import BackendFacts
from kd.core.seeds import evenly_spaced
from kd.core.types import SiftContext
from kd.data.loader import evaluation_plan
from kd.data.workers import worker_error
from kd.engine.criterion import Distillation
from kd.engine.monitor.timeline import region
from kd.engine.optim import EMA, Schedule
from kd.engine.run import Logger, Run, RunStore
from kd.models.teacher import LiveTeacher, NoTeacher
from kd.parts import registry
from kd.setup.loaders import BatchSplit, evaluation_loader, loaders, split_batch
from kd.setup.recipe import LoopPlan, Session, StudentPlan, TeacherPlan
from kd.setup.student import apply_mode, build_distillation, choose_student
from kd.setup.teacher import TeacherReport, Teachers, choose_teacher
from kd.setup.tuning import parameter_groups

BANK = 10_000
"""Most training images in the k-NN index that scores an embedding student."""


@contextmanager
def distributed(section: BackendSection) -> Iterator[Backend]:
    """Join the world of a backend, and leave it again."""
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
    return registry.build("backends", kind, options, "backend.kind", precision=precision, timeout_seconds=seconds)


def build_optimizer(plan: LoopPlan, module: Distillation, backend: Backend) -> torch.optim.Optimizer:
    """Build the optimizer with fused kernels where the device has them."""
    section = plan.optimizer
    parameters = parameter_groups(plan.tuning, section.weight_decay, module)
    fused = backend.device.type in ("cpu", "cuda")
    if section.kind == "sgd":
        options: dict[str, Any] = {"momentum": section.momentum, "nesterov": section.momentum > 0}
        cls: type[torch.optim.Optimizer] = torch.optim.SGD
    else:
        options, cls = {"betas": tuple(section.betas)}, torch.optim.AdamW
    return backend.optimizer(parameters, cls, section.zero, lr=section.lr, fused=fused, **options)


@dataclass(frozen=True, slots=True)
class Results:
    """Where the rows of a run go."""

    store: RunStore
    """Metrics and checkpoints."""
    logger: Logger
    """Shows them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives."""

    distillation: Distillation
    """The student and its losses, on the device."""
    teacher: Teacher
    """Answers in a step: live, or behind its cache."""
    loader: Loader
    """Of the training images."""
    sifter: Sifter
    evaluator: Evaluator


def assemble(plan: LoopPlan, accumulate: int, backend: Backend, made: Parts, results: Results) -> Run:
    """Put a run together from its parts; the backend is set up. `accumulate`: micro-batches a step on this rank."""
    section, distillation = plan.optimizer, made.distillation
    return Run(
        seed=plan.seed,
        length=plan.length,
        accumulate=accumulate,
        max_norm=section.clip,
        backend=backend,
        module=backend.wrap(distillation),
        distillation=distillation,
        teacher=made.teacher,
        loader=made.loader,
        sifter=made.sifter,
        optimizer=build_optimizer(plan, distillation, backend),
        schedule=Schedule(section.lr, section.warmup, section.min_lr, section.schedule),
        average=EMA(distillation.student, section.ema) if section.ema else None,
        evaluator=made.evaluator,
        store=results.store,
        logger=results.logger,
        skip_nonfinite=section.on_nonfinite == "skip",
    )


@dataclass(frozen=True, slots=True)
class Built:
    """A run, and what its set-up found out."""

    run: Run
    facts: dict[str, Any]
    """For the manifest: what runs, and how."""
    val: Source
    """Images of the validation split."""
    test: Source | None
    """Those of the test split, where there is one."""
    test_evaluator: Callable[[], Evaluator]
    """Makes what scores the test split; only where there is one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a run takes place: its teachers with their data, and the backend, set up."""

    teachers: Teachers
    backend: Backend
    machine: BackendSection

    @property
    def facts(self) -> BackendFacts:
        """What the options of the backend say."""
        return registry.facts("backends", self.machine.kind, self.machine.options, "backend.kind")


def build_run(
    teacher: TeacherPlan,
    student: StudentPlan,
    loop: LoopPlan,
    setting: Setting,
    results: Results,
) -> Built:
    """Build the run of a recipe from its parts; without a teacher model it learns labels alone."""
    backend, model, data = setting.backend, setting.teachers.model, setting.teachers.data
    logger, num_images = results.logger, len(data.train)
    session = Session(backend, data, split_batch(data.plan, backend.world_size, num_images))
    distillation = build_distillation(student, setting.teachers).to(backend.device)

    with region("choose teacher"):
        report = choose_teacher(session, teacher, model)
    logger.info(f"teacher: {report.line}" if report.line else "")
    with region("open cache"):
        answering = step_teacher(teacher, report, model, session)
    with region("choose student"):
        mode = choose_student(session, distillation, student, report.live)
        apply_mode(mode, distillation, backend)
    loader, val_loader = loaders(data.views(), data.plan, session.split, backend, setting.machine.timeout_seconds)
    sifter, line = build_sifter(session, loop, getattr(answering, "stored", None))
    logger.info(line)
    evaluation = evaluation_of(setting, session, distillation, report.live, val_loader)
    if model is None or not (teacher.logits or not student.task.logits):
        evaluation = replace(evaluation, teacher=None)
    made = Parts(distillation, answering, loader, sifter, student.task.evaluator(evaluation))
    test = partial(test_evaluator, setting, session, student.task, evaluation, report.live)
    run = assemble(loop, session.split.accumulate, backend, made, results)
    backend.end_step()  # on XLA what was built so far would otherwise be part of the first step's graph
    facts = {
        "decides": run.evaluator.decides,
        "task": student.task.name,
        "scores": student.task.scores.record(),
        "modes": {**({"teacher": str(report.mode)} if report.mode else {}), "student": str(mode)},
        "threads": torch.get_num_threads() if backend.device.type == "cpu" else 0,
        "batch": str(session.split),
        "workers": loader.workers,
    }
    return Built(run, facts | teacher_facts(report, backend), data.val, data.test, test)


def step_teacher(plan: TeacherPlan, report: TeacherReport, model: TeacherModel | None, session: Session) -> Teacher:
    """Return the step's teacher: live, cached, or NoTeacher if no loss needs one."""
    if model is None or not plan.needed:
        return NoTeacher()
    if not plan.cache.views:
        return report.live
    from kd.setup.cache import open_cache  # only where answers are stored

    return open_cache(plan, report, model, session)


def evaluation_of(
    setting: Setting, session: Session, distillation: Distillation, live: LiveTeacher | NoTeacher, loader: Loader
) -> Evaluation:
    """Return what the evaluator of a run is made from."""
    data, backend = session.data, session.backend
    plan = evaluation_plan(len(data.val), session.split.eval_batch * backend.world_size)
    return Evaluation(
        backend=backend,
        val=Split(loader, plan),
        teacher=live.validation(),
        num_classes=len(data.classes),
        labelled=data.labelled,
        bank=partial(bank_split, session, setting.machine.timeout_seconds),
        bank_teacher=live,
        agreement=distillation.criterion.agreement,
        projected=distillation.criterion.projected,
        members=len(setting.teachers.members),
    )


def bank_split(session: Session, timeout_seconds: float) -> Split:
    """Return training images without augmentation, up to `BANK`, for evaluations to search in."""
    data = session.data
    source = (data.stored or (data.train, data.val))[0]
    return shown_split(session, source, torch.tensor(evenly_spaced(len(source), BANK)), timeout_seconds)


def test_evaluator(
    setting: Setting, session: Session, task: Task, evaluation: Evaluation, live: LiveTeacher | NoTeacher
) -> Evaluator:
    """Return what scores the test split as an evaluation does the validation split; made at the end of a run."""
    source = session.data.test
    assert source is not None
    split = shown_split(session, source, torch.arange(len(source)), setting.machine.timeout_seconds)
    teacher = live.validation(test=True) if evaluation.teacher is not None else None
    return task.evaluator(replace(evaluation, val=split, teacher=teacher))


def shown_split(session: Session, source: Source, ids: torch.Tensor, timeout_seconds: float) -> Split:
    """Return images of a source as evaluation shows them, by their ids [N]."""
    data, split = session.data, session.split
    loader = evaluation_loader(data.shown(source), data.plan, split, session.backend, timeout_seconds)
    plan = evaluation_plan(len(ids), split.eval_batch * split.world_size)
    return Split(loader, replace(plan, ids=ids[plan.ids]))


def teacher_facts(report: TeacherReport, backend: Backend) -> dict[str, Any]:
    """Return facts about the live teacher for the manifest, besides its mode."""
    facts: dict[str, Any] = {"teacher_error": report.error} if report.error else {}
    held = backend.counters().get("teacher_mib")
    if held is not None and isinstance(report.live, LiveTeacher):  # divided over the ranks
        facts["teacher_mib"] = {"whole": report.live.mib, "rank": held}
    return facts


def sift_context(
    num_images: int, labels: Callable[[], torch.Tensor], backend: Backend, split: BatchSplit, seed: int
) -> SiftContext:
    """Return what a sifter must know of the images and of how they are divided."""
    return SiftContext(
        num_images=num_images,
        batch_size=split.batch_size,
        micro_batch=split.micro_batch,
        rank=backend.rank,
        world_size=backend.world_size,
        seed=seed,
        labels=labels,
        reduce_sum=lambda tensor: backend.reduce_sum(tensor.to(backend.device)).cpu(),
    )


def build_sifter(session: Session, loop: LoopPlan, answers: Any = None) -> tuple[Sifter, str]:
    """Build the sifter of the training images; and a line where its delay leaves it nothing to do.

    `answers`: as in `SiftContext`; None where no answers are stored.
    """
    section, data, split = loop.sifter, session.data, session.split
    context = sift_context(len(data.train), data.labels, session.backend, split, loop.seed)
    context = replace(context, views=data.plan.views, balance=loop.balance, answers=answers)
    delay = registry.facts("sifters", section.kind, section.options, "sifter.kind").delay
    length = loop.length
    steps = length.steps or length.epochs * (len(data.train) // length.batch_size)
    if steps <= delay:
        everything = registry.default_options("sifters", "none")
        line = f"sifter '{section.kind}' waits for {delay} steps and the run has {steps}: everything is visited"
        line += ". Lower sifter.sift_delay"
        return registry.build("sifters", "none", everything, "sifter", context=context), line
    return registry.build("sifters", section.kind, section.options, "sifter.kind", context=context), ""
