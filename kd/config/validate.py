"""The rules between keys: every contradiction of a well-formed configuration, all at once, before anything is built."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kd import instances, parts
from kd.config.schema import (
    QUANTIZED,
    RUNTIMES,
    Augment,
    Config,
    DataSection,
    LossSection,
    OptimizerSection,
    PriceSection,
    ProfileSection,
    StudentSection,
    TeacherSection,
)
from kd.errors import ConfigError, KdError, MissingExtra, did_you_mean
from kd.types import NOT_FEATURES, BackendFacts, Dims

ANY_DIMS = Dims(2, 1, 1, (1, 1), (1, 1))


def validate(config: Config, here: bool = True, cluster: bool = True) -> Iterator[KdError]:
    """Yield every rule that a configuration breaks; each of its keys is well-formed.

    Args:
        config: with the backend's kind resolved.
        here: also require the packages that the run would import on this machine.
        cluster: also require the address of the cluster, where the run decodes on one.
    """
    needed = needs(config.losses)
    read = reads(config.losses)
    features = bool(read.features)
    if config.run.mirror and "://" not in config.run.mirror:
        yield ConfigError("run.mirror", f"is '{config.run.mirror}'", "A URL such as s3://BUCKET/runs", "Correct it")
    yield from _embedding(config, read)
    yield from _data(config.data, config.teacher)
    yield from _remote(config.data, here, here and cluster)
    yield from _losses(config.losses, needed, config.data.augment, config.teacher)
    yield from _labels(config, needed)
    yield from _label_sets(config, needed, read)
    yield from _student(config.student)
    yield from _optimizer(config.optimizer)
    if (config.backend.kind, config.optimizer.zero, config.optimizer.on_nonfinite) == ("xla", True, "skip"):
        wrong = "is 'skip', but torch_xla's ZeRO applies every step"
        yield ConfigError("optimizer.on_nonfinite", wrong, "error, or no ZeRO", "Set optimizer.zero=false")
    yield from _divided(config.teacher)
    yield from _price(config.price)
    if config.teacher.model:
        yield from _several(config.teacher)
    elif config.teacher.also:
        yield ConfigError("teacher.also", "names further teachers, but there is no first", "", "Set teacher.model")
    yield from _profile(config.profile)
    yield from _execution(config.teacher, config.student, config.backend.kind, features, here)


def needs(losses: Sequence[LossSection]) -> list[frozenset[str]]:
    """Return what each loss needs: "teacher", "hard_labels", and names of features such as "pooled"."""
    built = [parts.build("losses", term.kind, term.options, "losses", dims=ANY_DIMS) for term in losses]
    return [getattr(term, "needs", frozenset()) for term in built]


@dataclass(frozen=True, slots=True)
class Reads:
    """The outputs that the losses of a run read."""

    student_logits: bool
    """False: the student is an embedding model, without a classifier."""
    teacher_logits: bool
    """False: the teacher needs no classes; its features are all that is asked of it."""
    features: tuple[str, ...]
    """Names of features, of both models."""
    sigmoid: bool = False
    """Whether a logit answers for its class alone, because an image has several labels; else a softmax is meant."""


def reads(losses: Sequence[LossSection]) -> Reads:
    """Return which outputs the losses read."""
    needed = needs(losses)
    on_logits = [one for one in needed if "logits" in one or not one - NOT_FEATURES]
    features = frozenset().union(*needed) - NOT_FEATURES
    if not on_logits:
        features |= {"pooled"}  # what is exported, and evaluated
    of_teacher = any("teacher" in one for one in on_logits) or not features
    sigmoid = any("sigmoid" in one for one in on_logits)
    return Reads(bool(on_logits), of_teacher, tuple(sorted(features)), sigmoid)


def _data(data: DataSection, teacher: TeacherSection) -> Iterator[KdError]:
    if isinstance(data.workers, int) and data.workers < 0:
        allowed = "Allowed: `auto` or a whole number >= 0"
        yield ConfigError("data.workers", f"is {data.workers!r}", allowed, "Change it")
    if 0 < data.store_size < data.image_size:
        allowed = f"0, or at least {data.image_size}: training would enlarge them"
        wrong = f"is {data.store_size}, but data.image_size is {data.image_size}"
        yield ConfigError("data.store_size", wrong, allowed, f"Set data.store_size=0 or {data.image_size}")
    kept = teacher.cache.views
    if data.views and kept and data.views != kept:
        wrong = f"is {kept}, but data.views is {data.views}"
        remedy = f"Set teacher.cache.views={data.views}, or leave data.views at 0"
        yield ConfigError("teacher.cache.views", wrong, "The cache keeps the views that the run shows", remedy)
    if data.batch_size != "auto":
        return
    if data.micro_batch:
        wrong = f"is {data.micro_batch}, but data.batch_size is auto, which finds it"
        yield ConfigError("data.micro_batch", wrong, "", "Set data.micro_batch=0, or data.batch_size to a number")
    if teacher.shard or teacher.pipeline:
        wrong = "is auto, but a rank that runs out of memory inside a divided teacher would leave the others waiting"
        allowed = "A number goes with teacher.shard and teacher.pipeline"
        yield ConfigError("data.batch_size", wrong, allowed, "Set data.batch_size")


def _remote(data: DataSection, here: bool, cluster: bool) -> Iterator[KdError]:
    """Yield what does not go with images that other hosts decode."""
    if data.loader != "ray":
        return
    if data.store != "none":
        wrong = f"is {data.store}, but with data.loader=ray other hosts decode, which do not share it"
        yield ConfigError("data.store", wrong, "none", "Set data.store=none, or data.loader=local")
    if here and not installed("ray"):
        remedy = "pip install 'kd[ray]', or set data.loader=local"
        yield MissingExtra("data.loader", "is ray, which is not installed", "", remedy)
    elif cluster and not os.environ.get("RAY_ADDRESS"):
        wrong = "is ray, but the variable RAY_ADDRESS names no cluster"
        remedy = "Start with kd-launch or as in docs/cluster.md, or set data.loader=local"
        yield ConfigError("data.loader", wrong, "HOST:PORT", remedy)


def _losses(
    losses: Sequence[LossSection], needed: Sequence[frozenset[str]], augment: Augment, teacher: TeacherSection
) -> Iterator[KdError]:
    if not losses:
        remedy = "Start with `losses: [{kind: kl}]`"
        yield ConfigError("losses", "is empty", f"At least one of: {', '.join(parts.names('losses'))}", remedy)
    elif not any(term.weight > 0 for term in losses):
        yield ConfigError("losses", "all weights are 0", "At least one weight > 0", "Raise one")
    for i, (term, wanted) in enumerate(zip(losses, needed, strict=True)):
        if "teacher" in wanted and not teacher.model:
            remedy = "Set teacher.model, or learn from labels alone with losses: [{kind: ce}]"
            yield ConfigError("teacher.model", f"is missing, but losses[{i}] ('{term.kind}') needs it", "", remedy)
        if "hard_labels" in wanted and augment.mixes:
            yield ConfigError(
                f"losses[{i}].kind",
                f"'{term.kind}' needs one label an image, but mixup or cutmix is on",
                "Losses that mix: ce, kl, hard, zscore, dist, wttm, and those on features",
                "Set data.augment.mixup=0 data.augment.cutmix=0, or take another loss",
            )


def _embedding(config: Config, read: Reads) -> Iterator[KdError]:
    """Yield what does not go with models without a classifier."""
    if config.teacher.pipeline and (not read.teacher_logits or "tokens" in read.features):
        wrong = "passes logits and pooled features on, but the losses ask for other outputs"
        remedy = "Set teacher.pipeline=0; teacher.shard works for any outputs"
        yield ConfigError("teacher.pipeline", wrong, "Losses on logits, with or without pooled features", remedy)
    if read.student_logits:
        return
    if config.run.baseline:
        wrong = "is true, but the losses train an embedding model, which labels alone do not"
        yield ConfigError("run.baseline", wrong, "Losses on logits", "Set run.baseline=false, or add a loss such as ce")
    if getattr(config.sifter.options, "score", "") == "entropy":
        wrong = "is entropy, but the losses train an embedding model, which gives no probabilities"
        yield ConfigError("sifter.score", wrong, "loss", "Set sifter.score=loss")


def _labels(config: Config, needed: Sequence[frozenset[str]]) -> Iterator[KdError]:
    """Yield what needs labels that the images do not have."""
    labels, where = config.data.labels, "data.labels"
    if labels != "all" and getattr(config.sifter.options, "balance", False):
        wrong = f"is {labels}, but sifter.balance keeps a share of each class"
        yield ConfigError(where, wrong, "All images have labels", "Set sifter.balance=false")
    if labels != "none":
        return
    for i, (term, wanted) in enumerate(zip(config.losses, needed, strict=True)):
        if "teacher" not in wanted or "hard_labels" in wanted:
            wrong = f"'{term.kind}' learns from labels, but data.labels is none"
            yield ConfigError(f"losses[{i}].kind", wrong, "Losses on the teacher's answers: kl, hard, ...", "Drop it")
    asked = {
        "run.baseline": config.run.baseline,
        "teacher.fit.epochs": config.teacher.fit.epochs > 0,
        "teacher.min_accuracy": config.teacher.min_accuracy > 0,
    }
    for key, on in asked.items():
        if on:
            wrong = "needs labels, but data.labels is none"
            yield ConfigError(key, wrong, "Images with labels", f"Leave {key} out, or set data.labels=all")
    if not config.teacher.model:
        yield ConfigError("teacher.model", "is missing, and the images have no labels", "A teacher", "Set it")


def _label_sets(config: Config, needed: Sequence[frozenset[str]], read: Reads) -> Iterator[KdError]:
    """Yield where data, losses and cache do not mean the same by a logit: one of several answers, or the only one."""
    labelled = config.data.labels != "none"  # else the losses alone say what is meant
    sets = bool(getattr(config.data.options, "label_sets", False)) if labelled else read.sigmoid
    have = "images have several labels" if sets else "an image has one label"
    for i, (term, wanted) in enumerate(zip(config.losses, needed, strict=True)):
        on_logits = "logits" in wanted or not wanted - NOT_FEATURES
        if on_logits and ("sigmoid" in wanted) != sets:
            kinds = "bce, binary_kl" if sets else "ce, kl, hard, ..."
            wrong = f"'{term.kind}' is for {'one label' if sets else 'several labels'} an image, but {have}"
            wrong = wrong if labelled else f"'{term.kind}' reads the logits by a softmax, another term by sigmoids"
            yield ConfigError(f"losses[{i}].kind", wrong, f"Losses on logits: {kinds}", "Take one of these")
    if not sets:
        return
    if labelled and not read.student_logits:
        wrong = "has several labels an image, but the losses train an embedding model, which is scored by one label"
        yield ConfigError("data.labels", wrong, "none, which compares it with its teacher", "Set data.labels=none")
    if getattr(config.sifter.options, "balance", False):
        wrong = "keeps a share of each class, but images have several labels"
        yield ConfigError("sifter.balance", wrong, "false", "Set sifter.balance=false")
    if config.teacher.cache.topk > 0:
        wrong = f"is {config.teacher.cache.topk}, and keeps what a softmax needs, but the losses read each logit alone"
        yield ConfigError("teacher.cache.topk", wrong, "0: all logits", "Set teacher.cache.topk=0")


def _student(student: StudentSection) -> Iterator[KdError]:
    if not student.model:
        yield ConfigError("student.model", "is missing", "A timm model name, a folder or a hub id", "Add it")
    if student.checkpoint and student.init != "pretrained":
        allowed = "A checkpoint to start from goes with `student.init: pretrained`"
        yield ConfigError("student.init", f"is '{student.init}', but checkpoint is set", allowed, "Set it")


def _profile(profile: ProfileSection) -> Iterator[KdError]:
    steps = profile.steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        allowed = "The first and the last step, counted from 1"
        yield ConfigError("profile.steps", f"is {list(steps)}", allowed, "Set profile.steps=[20, 30]")


def _optimizer(optimizer: OptimizerSection) -> Iterator[KdError]:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield ConfigError("optimizer.betas", f"is {list(optimizer.betas)}", "Each >= 0 and < 1", "Change them")


def _price(price: PriceSection) -> Iterator[KdError]:
    if price.instance and not price.per_hour and instances.find(price.instance) is None:
        wrong = f"is {price.instance}, whose price kd does not know"
        remedy = did_you_mean(price.instance, instances.TABLE) or "Set price.per_hour"
        yield ConfigError("price.instance", wrong, "A machine of `kd-plan --instances`, or any with a price", remedy)


def _several(teacher: TeacherSection) -> Iterator[KdError]:
    """Yield what is wrong with further teachers."""
    if teacher.also and (teacher.shard or teacher.pipeline):
        allowed = "Several teachers, or one that is divided over the ranks"
        yield ConfigError("teacher.also", "does not go with teacher.shard and teacher.pipeline", allowed, "Drop one")
    if teacher.fit.epochs and "timm" not in [teacher.kind, *(member.kind for member in teacher.also)]:
        wrong = f"is {teacher.fit.epochs}, but kd does not fit a teacher of kind '{teacher.kind}'"
        yield ConfigError("teacher.fit.epochs", wrong, "Models of timm are fitted", "Set teacher.fit.epochs=0")
    seen = [(teacher.kind, teacher.model, teacher.args, teacher.checkpoint, teacher.options)]
    for i, member in enumerate(teacher.also):
        where = f"teacher.also[{i}]"
        key = (member.kind, member.model, member.args, member.checkpoint, member.options)
        if not member.model:
            yield ConfigError(f"{where}.model", "is missing", "A timm model name, a folder or a hub id", "Add it")
        elif key in seen:
            yield ConfigError(where, "is a teacher that is there already", "Each teacher once", "Change its weight")
        seen.append(key)


def _divided(teacher: TeacherSection) -> Iterator[KdError]:
    """Yield what does not go with a teacher that is divided over the ranks."""
    if teacher.shard and teacher.pipeline:
        wrong = "is true, but teacher.pipeline divides the teacher already"
        yield ConfigError("teacher.shard", wrong, "One of the two", "Set teacher.pipeline=0 or teacher.shard=false")
    if not (teacher.shard or teacher.pipeline):
        return
    key, kinds = ("pipeline", ("timm",)) if teacher.pipeline else ("shard", ("timm", "transformers"))
    if teacher.kind not in kinds:
        wrong = f"is set, but kd does not divide a teacher of kind '{teacher.kind}'"
        yield ConfigError(f"teacher.{key}", wrong, f"Models of {' and '.join(kinds)}", f"Leave teacher.{key} out")
    named = {"runtime": teacher.runtime in RUNTIMES, "precision": teacher.precision in QUANTIZED}
    for key, on in {**named, "compile": teacher.compile == "on"}.items():
        if on:
            wrong = f"is {getattr(teacher, key)}, but the teacher is divided over ranks, which plain torch does"
            remedy = f"Set teacher.{key}=auto, or leave teacher.shard and teacher.pipeline out"
            yield ConfigError(f"teacher.{key}", wrong, "", remedy)
    if teacher.cache.views:
        wrong = "asks the teacher for other images on each rank, but a divided teacher needs all ranks to ask together"
        allowed = "A cache, or teacher.shard / teacher.pipeline"
        yield ConfigError("teacher.cache.views", wrong, allowed, "Leave one of them out")


# ----------------------------------------------------------------------------------- how the models are executed


def _execution(
    teacher: TeacherSection, student: StudentSection, kind: str, features: bool, here: bool
) -> Iterator[KdError]:
    """Yield what a configuration asks of a compiler, a runtime or a quantizer and cannot have on its backend."""
    facts = getattr(parts.find("backends", kind, "backend.kind"), "FACTS", BackendFacts())
    for section, where in ((teacher, "teacher"), (student, "student")):
        if section.compile == "on" and facts.compiles:
            wrong = f"is on, but backend '{kind}' compiles by itself"
            yield ConfigError(f"{where}.compile", wrong, "auto or off", f"Set {where}.compile=auto")
    if not teacher.model:
        return
    if teacher.runtime in RUNTIMES:
        yield from _exported(teacher, kind, facts, features, here)
    elif teacher.precision in QUANTIZED:
        yield from _quantized(teacher, kind, facts, features, here)


def _exported(teacher: TeacherSection, kind: str, facts: BackendFacts, features: bool, here: bool) -> Iterator[KdError]:
    runtime, where = teacher.runtime, "teacher.runtime"
    if not facts.cpu:
        allowed = "onnxruntime and openvino run on backend.kind=cpu"
        yield ConfigError(where, f"is {runtime}, but the backend is '{kind}'", allowed, "Set teacher.runtime=torch")
    if features:
        wrong = f"is {runtime}, but a loss needs the teacher's features, and an exported graph returns logits alone"
        yield ConfigError(where, wrong, "torch, or losses on logits", "Set teacher.runtime=torch")
    if teacher.compile == "on":
        wrong = f"is {runtime}, but teacher.compile is on, and torch.compile is torch's"
        yield ConfigError(where, wrong, "One of the two", "Set teacher.compile=auto or teacher.runtime=torch")
    precisions = ("auto", "fp32", "int8" if runtime == "onnxruntime" else "bf16")
    if teacher.precision not in precisions:
        wrong = f"is {teacher.precision}, which kd does not run on {runtime}"
        remedy = "Set teacher.precision=auto, or another teacher.runtime"
        yield ConfigError("teacher.precision", wrong, f"On {runtime}: {', '.join(precisions)}", remedy)
    if here and not installed(runtime):
        extra = "kd[openvino]" if runtime == "openvino" else runtime
        remedy = f"pip install '{extra}', or set teacher.runtime=torch"
        yield MissingExtra(where, f"is {runtime}, which is not installed", "", remedy)


def _quantized(
    teacher: TeacherSection, kind: str, facts: BackendFacts, features: bool, here: bool
) -> Iterator[KdError]:
    where, precision = "teacher.precision", teacher.precision
    if not (facts.gpu or (facts.cpu and precision == "int8")):
        allowed = "fp8 goes with NVIDIA GPUs, int8 with them and with the CPU"
        wrong = f"is {precision}, which backend '{kind}' does not have"
        yield ConfigError(where, wrong, allowed, "Set teacher.precision=auto")
    elif teacher.exported(facts.cpu):
        if features or teacher.compile == "on":
            why = "a loss needs the teacher's features" if features else "teacher.compile is on"
            wrong = f"is int8, which on a CPU runs as a graph of onnxruntime, but {why}"
            allowed = "torch has int8 too, many times slower on a CPU"
            yield ConfigError(where, wrong, allowed, "Set teacher.runtime=torch")
    elif here and not installed("torchao"):
        remedy = "pip install 'kd[quantize]', or set teacher.precision=auto"
        yield MissingExtra(where, f"is {precision}, for which torch needs torchao", "", remedy)


def installed(package: str) -> bool:
    """Return whether a package can be found; nothing is imported."""
    return importlib.util.find_spec(package) is not None
