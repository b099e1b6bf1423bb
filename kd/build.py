"""2. BUILD. Config -> Run. The only module that meets concrete parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kd import parts
from kd.config import Config
from kd.contracts import Backend, RunStore, Source, Teacher, Watcher
from kd.data.loader import evaluation_plan
from kd.data.views import Mixing
from kd.engine.criterion import Criterion, Distillation
from kd.engine.evaluate import Evaluator
from kd.engine.run import Run, RunLength
from kd.errors import ConfigError, DataError
from kd.models.classifier import Classifier
from kd.models.ensemble import TeacherModel, first
from kd.models.load import Spec, load
from kd.models.select import select_weights
from kd.models.teacher import NoTeacher
from kd.optim.ema import EMA
from kd.optim.groups import groups
from kd.optim.schedule import Schedule
from kd.seeds import seed_from
from kd.start.batch import BatchSplit, arithmetic, choose_batch, provisional
from kd.start.cache import cached
from kd.start.kernels import Kernel, images_of
from kd.start.loading import loaders
from kd.start.loading import views as views_of
from kd.start.sifter import sifter
from kd.start.student import choose_student
from kd.start.teacher import Taught, asked_of_teacher, choose_teacher, found_of_teacher, refusals
from kd.start.workers import choose_workers
from kd.types import Dims

LOGIT_LOSSES = "Losses of logits alone: ce, kl, hard, zscore, dkd, nkd, dist, wttm"


@dataclass(frozen=True, slots=True)
class Data:
    """The two splits of a run."""

    train: Source
    val: Source
    kept: tuple[Source, Source] | None = None
    """The same splits behind a store of decoded pixels, where there is one."""

    @property
    def fingerprint(self) -> str:
        """A hash of both listings and the class order."""
        text = "\n".join([self.train.fingerprint, self.val.fingerprint, *self.train.classes])
        return hashlib.sha256(text.encode()).hexdigest()


def backend(config: Config) -> Backend:
    """Build the backend; the caller sets it up and closes it."""
    section = config.backend
    precision = "fp32" if section.precision == "auto" else section.precision
    context = {"precision": precision, "timeout_seconds": section.timeout_seconds}
    return parts.build("backends", section.kind, section.options, "backend.kind", **context)


def data(config: Config) -> Data:
    """List both splits; nothing is decoded or rendered yet.

    Raises:
        DataError: missing or empty folders, fewer than two classes.
    """
    section = config.data
    train = parts.build("datasets", section.kind, section.options, "data.kind", split="train", classes=None)
    val = parts.build("datasets", section.kind, section.options, "data.kind", split="val", classes=train.classes)
    if len(train.classes) < 2:
        raise DataError(
            "data.kind",
            f"the training split has {len(train.classes)} class ({', '.join(train.classes)})",
            "At least two classes",
            "Check that each class has a folder of its own",
        )
    if list(val.classes) != list(train.classes):
        raise DataError("data.kind", "the validation split has other classes than the training split", "", "Correct it")
    return Data(train, val)


def criterion(config: Config, dims: Dims) -> Criterion:
    """Build the loss terms.

    Raises:
        ModelError: a term needs features that a model does not have.
    """
    terms = []
    for i, section in enumerate(config.losses):
        term = parts.build("losses", section.kind, section.options, f"losses[{i}]", dims=dims)
        terms.append((section.kind, section.weight, term))
    return Criterion(terms)


def needs(config: Config) -> frozenset[str]:
    """Return what the losses of a config need, before any model is built.

    Raises:
        ConfigError: a loss needs a teacher or hard labels that the run does not have.
    """
    found: set[str] = set()
    augment = config.data.augment
    mixing = Mixing(augment.mixup, augment.cutmix, augment.mix_probability).on
    for i, section in enumerate(config.losses):
        module = parts.find("losses", section.kind, f"losses[{i}].kind")
        probe = module.build(section.options, Dims(2, 1, 1))
        found |= probe.needs
        if "teacher" in probe.needs and not config.teacher.model:
            remedy = "Set teacher.model, or learn from labels alone with losses: [{kind: ce}]"
            raise ConfigError("teacher.model", f"is missing, but losses[{i}] ('{section.kind}') needs it", "", remedy)
        if "hard_labels" in probe.needs and mixing:
            raise ConfigError(
                f"losses[{i}].kind",
                f"'{section.kind}' needs one label an image, but mixup or cutmix is on",
                "Losses that mix: ce, kl, hard, zscore, dist, wttm, feature",
                "Set data.augment.mixup=0 data.augment.cutmix=0, or take another loss",
            )
    if config.teacher.also and "features" in found:
        wrong = "averages probabilities, but a loss needs the features of one teacher"
        raise ConfigError("teacher.also", wrong, LOGIT_LOSSES, "Keep one teacher, or take another loss")
    if config.teacher.cache.views and "features" in found:
        raise ConfigError(
            "teacher.cache.views",
            "keeps the teacher's logits, but a loss needs its features",
            LOGIT_LOSSES,
            "Set teacher.cache.views=0, or take another loss",
        )
    for refusal in refusals(config, "features" in found):
        raise refusal
    return frozenset(found)


def student_model(config: Config, classes: Any, with_features: bool) -> Classifier:
    """Build the student from the run's seed."""
    section = config.student
    torch.manual_seed(seed_from(config.run.seed, "student"))
    spec = Spec("student", section.model, section.args, classes, section.checkpoint, section.init == "pretrained")
    return load(spec, config.data.image_size, with_features)


def teacher_model(
    config: Config,
    classes: Any,
    with_features: bool,
    folder: str = "",
    on_meta: bool = False,
    where: str = "teacher",
) -> Classifier:
    """Load one teacher with its weights; its classes must be the data's.

    Args:
        config: the configuration; of several teachers, the first is loaded.
        classes: class names in the data's order.
        with_features: return pooled features too.
        folder: an export folder (a fitted teacher) to load instead of `teacher.model`.
        on_meta: build it without weights, on the meta device: another rank has them.
        where: its config path, for messages.
    """
    section = config.teacher
    if on_meta:
        spec = Spec(where, folder or section.model, {} if folder else section.args, classes)
        with torch.device("meta"):
            return load(spec, config.data.image_size, with_features)
    if folder:
        spec = Spec(where, folder, {}, classes, pretrained=True, exact_head=True)
    else:
        own = not section.checkpoint
        spec = Spec(where, section.model, section.args, classes, section.checkpoint, own, exact_head=True)
    return load(spec, config.data.image_size, with_features)


def views(config: Config) -> int:
    """Return how many views an image has; 0: a fresh one every epoch.

    Raises:
        ConfigError: the data's views are not the cache's.
    """
    own, kept = config.data.views, config.teacher.cache.views
    if own and kept and own != kept:
        raise ConfigError(
            "teacher.cache.views",
            f"is {kept}, but data.views is {own}",
            "The cache keeps the views that the run shows",
            f"Set teacher.cache.views={own}, or leave data.views at 0",
        )
    return own or kept


def length(config: Config, split: BatchSplit) -> RunLength:
    """Return how long the run is."""
    section = config.run
    return RunLength(
        epochs=section.epochs,
        steps=section.steps,
        batch_size=split.batch_size,
        accumulate=split.accumulate,
        views=views(config),
        log=section.every.log,
        evaluate=section.every.evaluate,
        checkpoint=section.every.checkpoint,
    )


def optimizer(config: Config, module: nn.Module, backend: Backend) -> torch.optim.Optimizer:
    """Build the optimizer with fused kernels where the device has them."""
    section = config.optimizer
    parameters = groups(_owners(module), section.weight_decay)
    fused = backend.device.type in ("cpu", "cuda")
    if section.kind == "sgd":
        options: dict[str, Any] = {"momentum": section.momentum, "nesterov": section.momentum > 0}
        cls: type[torch.optim.Optimizer] = torch.optim.SGD
    else:
        options, cls = {"betas": tuple(section.betas)}, torch.optim.AdamW
    return backend.optimizer(parameters, cls, section.zero, lr=section.lr, fused=fused, **options)


def _owners(module: nn.Module) -> list[nn.Module]:
    """Return the student's network, which knows what must not decay, and the criterion."""
    network = getattr(module.student, "network", module.student)
    return [network, module.criterion]  # type: ignore[list-item]


def trainable(config: Config, classes: Any, teacher: TeacherModel | None, with_features: bool) -> Distillation:
    """Build the student and what it minimizes as one module."""
    student = student_model(config, classes, with_features)
    if config.student.init == "teacher" and teacher is not None:
        select_weights(student.network, first(teacher).network)
    dims = Dims(len(classes), student.num_features, teacher.num_features if teacher is not None else 0)
    torch.manual_seed(seed_from(config.run.seed, "criterion"))
    return Distillation(student, criterion(config, dims))


def answers(
    config: Config,
    data: Data,
    teacher: TeacherModel | None,
    asked: bool,
    split: BatchSplit,
    backend: Backend,
    choices: dict[str, str],
) -> tuple[Teacher, Teacher, Taught]:
    """Return the live teacher, what answers in a step (a cache before it, or nobody), and what was found out."""
    count = asked_of_teacher(config, len(data.train), split.batch_size, split.world_size) if asked else 0
    live, taught = choose_teacher(config, teacher, data.val, split.micro_batch, backend, choices, count)
    if not asked or teacher is None:
        return live, NoTeacher(), taught
    if not config.teacher.cache.views:
        return live, live, taught
    return live, cached(config, data.train, teacher, live, backend, Kernel.parse(choices["teacher"])), taught


def run(
    config: Config,
    data: Data,
    backend: Backend,
    teacher: TeacherModel | None,
    sink: RunStore,
    watcher: Watcher,
    pinned: Mapping[str, str] = {},
) -> tuple[Run, dict[str, Any]]:
    """Build a run.

    Args:
        config: the configuration.
        data: both splits.
        backend: set up.
        teacher: the loaded teacher, or None for labels alone.
        sink: where results go.
        watcher: who shows them.
        pinned: kernel choices of an earlier start of this run, so that a resumed run computes the same bits.

    Returns:
        The run, and what was measured and chosen, for the manifest.
    """
    required = needs(config)
    classes = data.train.classes
    choices = dict(pinned)
    split = arithmetic(provisional(config, len(data.train), backend, choices), backend.world_size, len(data.train))
    distillation = trainable(config, classes, teacher, "features" in required).to(backend.device)
    live, answering, taught = answers(config, data, teacher, "teacher" in required, split, backend, choices)
    visits = images_of(config, len(data.train), split.batch_size, backend.world_size)
    times, told = choose_student(config, distillation, live, split.micro_batch, backend, choices, visits)
    measured = {"teacher": taught.table, "student": times}
    for who, line in {"teacher": taught.told, "student": told}.items():
        watcher.say(f"{who}: {line}" if line else "")
    config, search = choose_batch(config, distillation, live, len(data.train), backend, choices)
    split = arithmetic(config, backend.world_size, len(data.train))
    both = views_of(config, *(data.kept or (data.train, data.val)))
    measuring = (config, both[0], distillation, answering, split.micro_batch, backend, choices, pinned)
    workers, told, measured["workers"] = choose_workers(*measuring)
    train_loader, val_loader = loaders(both, backend, split, workers)
    sifting, verdict = sifter(config, data.train, split, backend, train_loader, distillation, answering, choices)
    watcher.say(told)
    watcher.say(verdict)
    section, module = config.optimizer, backend.wrap(distillation)
    built = Run(
        seed=config.run.seed,
        length=length(config, split),
        max_norm=section.clip,
        backend=backend,
        module=module,
        distillation=distillation,
        teacher=answering,
        loader=train_loader,
        sifter=sifting,
        optimizer=optimizer(config, distillation, backend),
        schedule=Schedule(section.lr, section.warmup, section.min_lr, section.schedule),
        average=EMA(distillation.student, section.ema) if section.ema else None,
        evaluator=Evaluator(
            backend,
            val_loader,
            evaluation_plan(len(data.val), split.eval_batch * split.world_size),
            live,
            has_teacher=teacher is not None,
            num_classes=len(classes),
        ),
        sink=sink,
        watcher=watcher,
    )
    backend.end_step()  # on XLA what was built so far would else be part of the first step's graph, a graph of its own
    facts = {"choices": choices, "measured_ms": {k: v for k, v in measured.items() if v}, "batch": str(split)}
    return built, facts | ({"batch_search": search} if search else {}) | found_of_teacher(config, live, taught, backend)
