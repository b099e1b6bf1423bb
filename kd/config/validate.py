"""Report contradictions between the keys of a configuration before it is built."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kd.config.reads import build_task, label_of, loss_facts, reads
from kd.config.schema import (
    FITTED,
    QUANTIZED,
    RUNTIMES,
    STUDENTS,
    Config,
    DataSection,
    NetworkSection,
    StudentSection,
    TeacherSection,
)
from kd.core.errors import EXCLUSIVE, ConfigError, KdError, MissingExtra, did_you_mean
from kd.core.evaluation import Task
from kd.core.facts import BackendFacts, LossFacts
from kd.core.host import installed
from kd.parts import registry


def validate(
    config: Config, here: bool = True, cluster: bool = True
) -> Iterator[KdError]:
    """Yield an error for every rule that a well-formed configuration breaks.

    `here`: also check the packages that the run imports on this machine. `cluster`:
    also check the address of its Ray cluster.
    """
    losses = loss_facts(config.losses)
    read = reads(config.losses)
    task = build_task(config.task)
    pipelined = read.teacher_logits and "tokens" not in read.features
    if config.teacher.pipeline and not pipelined:
        wrong = (
            "passes logits and pooled features on, but the losses need other outputs"
        )
        remedy = "Set teacher.pipeline=0; teacher.shard works for any outputs"
        yield ConfigError(
            "teacher.pipeline",
            wrong,
            "Losses on logits, with or without pooled features",
            remedy,
        )
    yield from _data(config.data, config.teacher)
    yield from _progressive(config.data, read.features)
    yield from _remote(config.data, here, here and cluster)
    yield from _losses(config, losses)
    sifting = registry.facts(
        "sifters", config.sifter.kind, config.sifter.options, "sifter.kind"
    )
    yield from _task(config, losses, task)
    yield from _by_class(config.data, config.sifter.kind, sifting.by_class, task)
    stored = read.teacher_logits and task.logits == "softmax"
    if sifting.answers and not (config.teacher.cache.views and stored):
        wrong = (
            f"is {config.sifter.kind}, which reads stored teacher logits, but nothing"
            " stores them"
        )
        yield ConfigError(
            "sifter.kind",
            wrong,
            "A loss on logits and a cache",
            "Set teacher.cache.views=4",
        )
    yield from _of_one_section(config)
    if config.data.labels == "none":
        yield from _unlabelled(config, losses)
    yield from _student(config.student)
    yield from _by_order(config)
    if "tokens" in read.features and config.student.args.get("patch_drop_rate"):
        wrong = (
            f"is {config.student.args['patch_drop_rate']}, but a loss compares the"
            " tokens of all patches"
        )
        yield ConfigError(
            "student.args.patch_drop_rate",
            wrong,
            "0, or other losses",
            "Leave one of them out",
        )
    yield from _divided(config.teacher)
    if config.teacher.model:
        yield from _several(config.teacher)
    elif config.teacher.also:
        yield ConfigError(
            "teacher.also",
            "names further teachers, but there is no first",
            "",
            "Set teacher.model",
        )
    facts = registry.facts(
        "backends", config.backend.kind, config.backend.options, "backend.kind"
    )
    yield from _optimizer(config, facts)
    yield from _execution(
        config.teacher,
        config.student,
        config.backend.kind,
        facts,
        bool(read.features),
        here,
    )


def _data(data: DataSection, teacher: TeacherSection) -> Iterator[KdError]:
    key = registry.facts("datasets", data.kind, data.options, "data.kind").test
    if key and data.test_fraction:
        wrong = f"is {data.test_fraction:g}, but data.{key} names a test split"
        remedy = "Leave one of them out"
        yield ConfigError("data.test_fraction", wrong, EXCLUSIVE, remedy)
    if 0 < data.store_size < data.image_size:
        allowed = f"0, or at least {data.image_size}: training would enlarge them"
        wrong = f"is {data.store_size}, but data.image_size is {data.image_size}"
        yield ConfigError(
            "data.store_size",
            wrong,
            allowed,
            f"Set data.store_size=0 or {data.image_size}",
        )
    if data.store == "views" and not (data.views or teacher.cache.views):
        wrong = "is views, but no view is shown twice"
        remedy = "Set data.views or teacher.cache.views, or data.store=ram"
        yield ConfigError("data.store", wrong, "One of none, ram and disk", remedy)
    if data.labels_per_class and data.labels == "none":
        yield ConfigError(
            "data.labels_per_class",
            "needs labels",
            "data.labels: some, or all",
            "Change either",
        )
    cached = teacher.cache.views
    if data.views and cached not in (0, "auto", data.views):
        wrong = f"is {cached}, but data.views is {data.views}"
        remedy = f"Set teacher.cache.views={data.views}, or leave data.views at 0"
        yield ConfigError(
            "teacher.cache.views",
            wrong,
            "The cache keeps the views that the run shows",
            remedy,
        )


def _progressive(data: DataSection, features: Sequence[str]) -> Iterator[KdError]:
    """Yield options that are incompatible with data.progressive."""
    size = data.progressive.size
    until = data.progressive.until
    size_key = "data.progressive.size"
    until_key = "data.progressive.until"
    if not (size or until):
        return
    if not 8 <= size < data.image_size:
        wrong = f"is {size}, but data.image_size is {data.image_size}"
        remedy = "Change it, or leave data.progressive out"
        yield ConfigError(size_key, wrong, f">= 8 and < {data.image_size}", remedy)
    if not until:
        wrong = f"is 0, but {size_key} is {size}"
        yield ConfigError(until_key, wrong, "> 0 and <= 1", f"Set {until_key}=0.6")
    if data.loader == "ray":
        wrong = (
            f"is {size}, but data.loader is ray, whose decoders make images of one size"
        )
        remedy = "Set data.loader=local"
        yield ConfigError(size_key, wrong, "0, or data.loader: local", remedy)
    if "tokens" in features:
        wrong = f"is {size}, but a loss compares the tokens of all patches"
        remedy = "Leave one of them out"
        yield ConfigError(size_key, wrong, "0, or other losses", remedy)


def _remote(data: DataSection, here: bool, cluster: bool) -> Iterator[KdError]:
    """Yield options that are incompatible with data.loader=ray."""
    if data.loader != "ray":
        return
    if data.store != "none":
        wrong = (
            f"is {data.store}, but with data.loader=ray other hosts decode, which do"
            " not share it"
        )
        yield ConfigError(
            "data.store", wrong, "none", "Set data.store=none, or data.loader=local"
        )
    if here and not installed("ray"):
        remedy = "pip install 'PATH/kd[ray]', or set data.loader=local"
        yield MissingExtra("data.loader", "is ray, which is not installed", "", remedy)
    elif cluster and not os.environ.get("RAY_ADDRESS"):
        wrong = "is ray, but the variable RAY_ADDRESS names no cluster"
        remedy = "Start with kd-launch or as in docs/scale.md, or set data.loader=local"
        yield ConfigError("data.loader", wrong, "HOST:PORT", remedy)


def _losses(config: Config, losses: Sequence[LossFacts]) -> Iterator[KdError]:
    if not config.losses:
        remedy = "Start with `losses: [{kind: kl}]`"
        yield ConfigError(
            "losses",
            "is empty",
            f"At least one of: {', '.join(registry.names('losses'))}",
            remedy,
        )
    elif not any(term.weight > 0 for term in config.losses):
        yield ConfigError(
            "losses", "all weights are 0", "At least one weight > 0", "Raise one"
        )
    for i, (term, facts) in enumerate(zip(config.losses, losses, strict=True)):
        if facts.teacher and not config.teacher.model:
            remedy = (
                "Set teacher.model, or learn from labels alone with losses: [{kind:"
                " ce}]"
            )
            yield ConfigError(
                "teacher.model",
                f"is missing, but losses[{i}] ('{term.kind}') needs it",
                "",
                remedy,
            )
        if facts.unmixed and config.data.augment.mixes:
            wrong = (
                f"'{term.kind}' needs one label per image, but mixup or cutmix is on"
            )
            mixing = _losses_where(lambda loss: not loss.unmixed)
            allowed = f"Losses that mix: {', '.join(mixing)}"
            remedy = (
                "Set data.augment.mixup=0 data.augment.cutmix=0, or take another loss"
            )
            yield ConfigError(f"losses[{i}].kind", wrong, allowed, remedy)


def _task(config: Config, losses: Sequence[LossFacts], task: Task) -> Iterator[KdError]:
    """Yield an error where labels, losses or other keys do not fit the task."""
    texts = {
        "class": "an image has one label",
        "set": "images have several labels",
        "": f"the task is {task.name}",
    }
    label = label_of(config.data)
    have = texts[label]
    for i, (term, facts) in enumerate(zip(config.losses, losses, strict=True)):
        if facts.logits and facts.logits != task.logits:
            wrong = f"'{term.kind}' reads logits by a {facts.logits}, but {have}"
            allowed = "Losses on features"
            if task.logits:
                fitting = _losses_where(lambda loss: loss.logits == task.logits)
                allowed = f"Losses on logits by a {task.logits}: {', '.join(fitting)}"
            remedy = "Take one of these"
            yield ConfigError(f"losses[{i}].kind", wrong, allowed, remedy)
    if label not in ("", task.label):
        scored = {"class": "one label", "set": "a set of labels"}[task.label]
        wrong = f"{have}, but the task {task.name} is scored by {scored}"
        allowed = "none: the student is compared with its teacher"
        yield ConfigError("data.labels", wrong, allowed, "Set data.labels=none")
    if task.logits and not any(loss.logits for loss in losses):
        wrong = f"is {task.name}, but no loss reads logits"
        yield ConfigError(
            "task.kind",
            wrong,
            "auto, or a loss on logits",
            "Leave task.kind out, or add a loss",
        )
    if config.run.baseline and not task.logits:
        wrong = (
            "is true, but the losses train an embedding model, which labels alone"
            " do not"
        )
        yield ConfigError(
            "run.baseline",
            wrong,
            "Losses on logits",
            "Set run.baseline=false, or add a loss such as ce",
        )
    topk = config.teacher.cache.topk
    if topk > 0 and not task.keeps_topk:
        wrong = (
            f"is {topk}: top-k storage needs softmax losses, and these are sigmoid"
            " losses"
        )
        yield ConfigError(
            "teacher.cache.topk", wrong, "0: all logits", "Set teacher.cache.topk=0"
        )


def _losses_where(test: Callable[[LossFacts], bool]) -> list[str]:
    """Return the names of kd's losses that pass a test with default options."""
    names = []
    for name in registry.names("losses"):
        options = registry.default_options("losses", name)
        if test(registry.facts("losses", name, options, "losses")):
            names.append(name)
    return names


def _by_class(
    data: DataSection, sifter: str, sifted: bool, task: Task
) -> Iterator[KdError]:
    """Yield options that are incompatible with drawing by class."""
    if data.balance and sifter != "none":
        wrong = (
            f"is {data.balance:g}, but sifter.kind is {sifter}, which chooses the"
            " images of an epoch too"
        )
        yield ConfigError(
            "data.balance", wrong, EXCLUSIVE, "Set sifter.kind=none or data.balance=0"
        )
    if not (data.balance or sifted):
        return
    key = "data.balance" if data.balance else "sifter.kind"
    remedy = "Set data.balance=0" if data.balance else "Set sifter.kind=none"
    if data.labels != "all":
        wrong = f"is {data.labels}, but {key} reads the class of each image"
        yield ConfigError("data.labels", wrong, "All images have labels", remedy)
    elif task.label != "class":
        wrong = "reads the class of each image, but images have several labels"
        yield ConfigError(key, wrong, "", remedy)


def _of_one_section(config: Config) -> Iterator[KdError]:
    for config_path, tuning in (
        ("student.tuning", config.student.tuning),
        ("teacher.fit.tuning", config.teacher.fit.tuning),
    ):
        if tuning.freeze_epochs and not tuning.freeze:
            wrong = f"is {tuning.freeze_epochs}, but {config_path}.freeze names nothing"
            yield ConfigError(
                f"{config_path}.freeze_epochs",
                wrong,
                "Patterns in freeze",
                f"Set {config_path}.freeze, or 0",
            )
    steps = list(config.profile.steps)
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        allowed = "The first and the last step, counted from 1"
        yield ConfigError(
            "profile.steps", f"is {steps}", allowed, "Set profile.steps=[20, 30]"
        )
    elif steps and 0 < config.run.steps < steps[1]:
        wrong = f"is {steps}, but run.steps is {config.run.steps}"
        remedy = f"Set profile.steps=[1, {config.run.steps}]"
        yield ConfigError("profile.steps", wrong, "Steps of the run", remedy)
    price = config.price
    if price.instance and not price.per_hour:
        # only if a machine is named
        from kd.config.instances import PRICED, TABLE, find_machine, price_per_hour

        if price_per_hour(price.instance):
            return
        wrong = f"is {price.instance!r}, whose price kd does not know"
        priced = [name for name, machine in TABLE.items() if machine.usd]
        hint = did_you_mean(price.instance, priced)
        if find_machine(price.instance):
            hint = ""
        yield ConfigError(
            "price.instance",
            wrong,
            f"{PRICED}, or any with price.per_hour",
            f"{hint} Set price.per_hour".lstrip(),
        )


def _unlabelled(config: Config, losses: Sequence[LossFacts]) -> Iterator[KdError]:
    teacher = config.teacher
    for i, (term, facts) in enumerate(zip(config.losses, losses, strict=True)):
        if facts.labels:
            wrong = f"'{term.kind}' learns from labels, but data.labels=none"
            unlabelled = _losses_where(lambda loss: loss.teacher and not loss.labels)
            allowed = f"Losses on the teacher's outputs: {', '.join(unlabelled)}"
            yield ConfigError(f"losses[{i}].kind", wrong, allowed, "Drop it")
    labelled = {
        "run.baseline": config.run.baseline,
        "teacher.fit.epochs": teacher.fit.epochs != 0,
        "teacher.fit.steps": teacher.fit.steps > 0,
        "teacher.min_accuracy": teacher.min_accuracy > 0,
    }
    for key, on in labelled.items():
        if on:
            wrong = "needs labels, but data.labels=none"
            remedy = f"Leave {key} out, or set data.labels=all"
            yield ConfigError(key, wrong, "Images with labels", remedy)
    if not teacher.model:
        yield ConfigError(
            "teacher.model",
            "is missing, and the images have no labels",
            "A teacher",
            "Set it",
        )


def _by_order(config: Config) -> Iterator[KdError]:
    networks: dict[str, NetworkSection] = {
        "teacher": config.teacher,
        "student": config.student,
    }
    for i, member in enumerate(config.teacher.also):
        networks[f"teacher.also[{i}]"] = member
    for config_path, model in networks.items():
        fits = model.kind == "timm" and model.checkpoint
        if model.weights == "by_order" and not fits:
            wrong = (
                f"is by_order, but kind is {model.kind} and checkpoint is"
                f" '{model.checkpoint}'"
            )
            yield ConfigError(
                f"{config_path}.weights",
                wrong,
                "Kind timm with a checkpoint",
                f"Leave {config_path}.weights out",
            )


def _student(student: StudentSection) -> Iterator[KdError]:
    if not student.model:
        yield ConfigError(
            "student.model",
            "is missing",
            "A timm model name, a folder or a hub id",
            "Add it",
        )
    if student.checkpoint and student.init != "pretrained":
        allowed = "A checkpoint to start from goes with `student.init: pretrained`"
        yield ConfigError(
            "student.init",
            f"is '{student.init}', but checkpoint is set",
            allowed,
            "Set it",
        )
    facts = registry.facts("networks", student.kind, student.options, "student.kind")
    if not facts.trains:
        wrong = f"is '{student.kind}', whose weights kd cannot train"
        yield ConfigError(
            "student.kind",
            wrong,
            ", ".join(STUDENTS),
            "Choose one; torch builds your own network",
        )
    elif student.init == "pretrained" and not student.checkpoint and not facts.weights:
        wrong = (
            f"is 'pretrained', but a student of kind '{student.kind}' has no checkpoint"
        )
        yield ConfigError(
            "student.init",
            wrong,
            "A file of weights",
            "Set student.checkpoint, or student.init=scratch",
        )


def _several(teacher: TeacherSection) -> Iterator[KdError]:
    if teacher.also and (teacher.shard or teacher.pipeline):
        allowed = "Several teachers, or one that is divided over the ranks"
        yield ConfigError(
            "teacher.also",
            "does not go with teacher.shard and teacher.pipeline",
            allowed,
            "Drop one",
        )
    kinds = {teacher.kind, *(member.kind for member in teacher.also)}
    if teacher.fit.length and not kinds.intersection(FITTED):
        key = "teacher.fit.steps" if teacher.fit.steps else "teacher.fit.epochs"
        wrong = (
            f"is {teacher.fit.length.split()[0]}, but kd does not fit a teacher of kind"
            f" '{teacher.kind}'"
        )
        yield ConfigError(
            key, wrong, f"Kinds {' and '.join(FITTED)} are fitted", f"Set {key}=0"
        )
    networks = [_network(teacher)]
    for i, member in enumerate(teacher.also):
        config_path = f"teacher.also[{i}]"
        network = _network(member)
        again = member.kind in FITTED and teacher.fit.length and not member.checkpoint
        if not member.model:
            yield ConfigError(
                f"{config_path}.model",
                "is missing",
                "A timm model name, a folder or a hub id",
                "Add it",
            )
        elif network in networks and not again:
            allowed = (
                "Each teacher once; one that is to be fitted may come again, with"
                " another seed"
            )
            yield ConfigError(
                config_path, "repeats an earlier teacher", allowed, "Change its weight"
            )
        networks.append(network)


def _network(model: NetworkSection) -> tuple[Any, ...]:
    return model.kind, model.model, model.args, model.checkpoint, model.options


def _optimizer(config: Config, facts: BackendFacts) -> Iterator[KdError]:
    """Yield options of the optimizer that the backend or another option excludes."""
    section = config.optimizer
    if section.lr_scaling != "none" and not section.lr_batch:
        wrong = f"is 0, but optimizer.lr_scaling is {section.lr_scaling}"
        yield ConfigError(
            "optimizer.lr_batch",
            wrong,
            "The batch size that optimizer.lr was chosen for",
            "Set it, or optimizer.lr_scaling=none",
        )
    zero = facts.own_zero
    frozen = config.student.tuning.freeze_epochs
    if zero and section.zero and section.on_nonfinite == "skip":
        wrong = f"is 'skip', but {zero} applies every step"
        yield ConfigError(
            "optimizer.on_nonfinite",
            wrong,
            "error, or no ZeRO",
            "Set optimizer.zero=false",
        )
    if section.kind == "muon" and not facts.muon:
        wrong = f"is muon, which is untested on {config.backend.kind}"
        yield ConfigError(
            "optimizer.kind", wrong, "adamw or sgd there", "Set optimizer.kind=adamw"
        )
    if zero and section.zero and frozen:
        wrong = f"is {frozen}, but {zero} is untested without some gradients"
        yield ConfigError(
            "student.tuning.freeze_epochs",
            wrong,
            "0, or no ZeRO",
            "Set optimizer.zero=false",
        )


def _divided(teacher: TeacherSection) -> Iterator[KdError]:
    """Yield options that are incompatible with a teacher divided over the ranks."""
    if teacher.shard and teacher.pipeline:
        wrong = "is true, but teacher.pipeline divides the teacher already"
        yield ConfigError(
            "teacher.shard",
            wrong,
            EXCLUSIVE,
            "Set teacher.pipeline=0 or teacher.shard=false",
        )
    if not (teacher.shard or teacher.pipeline):
        return
    key = "pipeline" if teacher.pipeline else "shard"
    kinds = ["timm"] if teacher.pipeline else ["timm", "transformers"]
    if teacher.kind not in kinds:
        wrong = f"is set, but kd does not divide a teacher of kind '{teacher.kind}'"
        yield ConfigError(
            f"teacher.{key}",
            wrong,
            f"Models of {' and '.join(kinds)}",
            f"Leave teacher.{key} out",
        )
    without_torch = {
        "runtime": teacher.runtime in RUNTIMES,
        "precision": teacher.precision in QUANTIZED,
        "compile": teacher.compile == "on",
    }
    for key, on in without_torch.items():
        if on:
            wrong = (
                f"is {getattr(teacher, key)}, but the teacher is divided over ranks,"
                " which plain torch does"
            )
            remedy = (
                f"Leave teacher.{key} out, or leave teacher.shard and"
                " teacher.pipeline out"
            )
            yield ConfigError(f"teacher.{key}", wrong, "", remedy)
    if teacher.cache.views:
        wrong = (
            "sends the teacher other images on each rank, but a divided teacher needs"
            " all ranks at the same time"
        )
        allowed = "A cache, or teacher.shard / teacher.pipeline"
        yield ConfigError(
            "teacher.cache.views", wrong, allowed, "Leave one of them out"
        )


# --------------------------------------------------------------------------------
# execution of the models


def _execution(
    teacher: TeacherSection,
    student: StudentSection,
    kind: str,
    facts: BackendFacts,
    features: bool,
    here: bool,
) -> Iterator[KdError]:
    """Yield compilers, runtimes and precisions that the backend lacks."""
    for section, config_path in ((teacher, "teacher"), (student, "student")):
        if section.compile == "on" and facts.compiles:
            wrong = f"is on, but backend '{kind}' compiles by itself"
            yield ConfigError(
                f"{config_path}.compile", wrong, "off", f"Set {config_path}.compile=off"
            )
    if teacher.model and (
        teacher.runtime in RUNTIMES or teacher.precision in QUANTIZED
    ):
        yield from _exported(teacher, kind, facts, features, here)


def _exported(
    teacher: TeacherSection, kind: str, facts: BackendFacts, features: bool, here: bool
) -> Iterator[KdError]:
    key = "runtime" if teacher.runtime in RUNTIMES else "precision"
    config_path = f"teacher.{key}"
    value = getattr(teacher, key)
    runtime = teacher.exported(cpu=True)
    if not facts.cpu:
        allowed = (
            "Only backend.kind=cpu runs onnxruntime and openvino, and int8 in"
            " onnxruntime"
        )
        yield ConfigError(
            config_path,
            f"is {value}, but the backend is '{kind}'",
            allowed,
            f"Set {config_path}=auto",
        )
    if not runtime:
        allowed = "On a CPU, int8 runs as a graph of onnxruntime"
        yield ConfigError(
            config_path,
            f"is {value}, but teacher.runtime is torch",
            allowed,
            "Set teacher.runtime=auto",
        )
        return
    if features:
        wrong = (
            f"is {value}, but a loss needs the teacher's features, and an exported"
            " graph returns logits alone"
        )
        yield ConfigError(
            config_path, wrong, "torch, or losses on logits", f"Set {config_path}=auto"
        )
    if teacher.compile == "on":
        wrong = f"is {value}, but teacher.compile is on, and torch.compile is torch's"
        yield ConfigError(
            config_path,
            wrong,
            EXCLUSIVE,
            f"Set teacher.compile=off or {config_path}=auto",
        )
    precisions = ("auto", "fp32", "int8" if runtime == "onnxruntime" else "bf16")
    if teacher.precision not in precisions:
        wrong = f"is {teacher.precision}, which kd does not run on {runtime}"
        remedy = "Set teacher.precision=auto, or another teacher.runtime"
        yield ConfigError(
            "teacher.precision", wrong, f"On {runtime}: {', '.join(precisions)}", remedy
        )
    if here and not installed(runtime):
        extra = "PATH/kd[openvino]" if runtime == "openvino" else runtime
        remedy = f"pip install '{extra}', or set {config_path}=auto"
        package = "which" if value == runtime else f"for which {runtime}"
        wrong = f"is {value}, {package} is not installed"
        yield MissingExtra(config_path, wrong, "", remedy)
