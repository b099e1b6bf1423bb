"""Keys of a configuration that are each well-formed and do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from kd import parts
from kd.errors import ConfigError
from kd.schema import Config


def contradictions(config: Config) -> Iterator[ConfigError]:
    """Yield what no single key of a well-formed configuration is to blame for."""
    workers = config.data.workers
    if workers != "auto" and not (isinstance(workers, int) and workers >= 0):
        yield ConfigError("data.workers", f"is {workers!r}", "Allowed: `auto` or a whole number >= 0", "Change it")
    yield from _divided(config)
    yield from _several(config)
    if not config.losses:
        remedy = "Start with `losses: [{kind: kl}]`"
        yield ConfigError("losses", "is empty", f"At least one of: {', '.join(parts.names('losses'))}", remedy)
    elif not any(term.weight > 0 for term in config.losses):
        yield ConfigError("losses", "all weights are 0", "At least one weight > 0", "Raise one")
    if not config.student.model:
        yield ConfigError("student.model", "is missing", "A timm model name, a folder or a hub id", "Add it")
    if config.student.checkpoint and config.student.init != "pretrained":
        allowed = "A checkpoint to start from goes with `student.init: pretrained`"
        yield ConfigError("student.init", f"is '{config.student.init}', but checkpoint is set", allowed, "Set it")
    if config.student.init == "teacher" and not config.teacher.model:
        yield ConfigError("student.init", "is 'teacher', but there is no teacher", "", "Set teacher.model")
    if config.student.init == "teacher" and config.run.baseline:
        allowed = "The labels-only student must not know the teacher"
        remedy = "Set student.init=scratch or run.baseline=false"
        yield ConfigError("run.baseline", "is true, but student.init is 'teacher'", allowed, remedy)
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        yield ConfigError("optimizer.betas", f"is {list(config.optimizer.betas)}", "Each >= 0 and < 1", "Change them")


def _divided(config: Config) -> Iterator[ConfigError]:
    """Yield what does not go with a teacher divided over ranks, or with a batch size that is still to be found."""
    divided, micro = config.teacher.shard or config.teacher.pipeline, config.data.micro_batch
    if config.teacher.shard and config.teacher.pipeline:
        wrong = "is true, but teacher.pipeline divides the teacher already"
        yield ConfigError("teacher.shard", wrong, "One of the two", "Set teacher.pipeline=0 or teacher.shard=false")
    if config.data.batch_size != "auto":
        return
    if micro:
        remedy = "Set data.micro_batch=0, or data.batch_size to a number"
        yield ConfigError("data.micro_batch", f"is {micro}, but data.batch_size is auto, which finds it", "", remedy)
    if divided:
        wrong = "is auto, but a rank that runs out of memory inside a divided teacher would leave the others waiting"
        allowed = "A number goes with teacher.shard and teacher.pipeline"
        yield ConfigError("data.batch_size", wrong, allowed, "Set data.batch_size")


def _several(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with further teachers."""
    section = config.teacher
    if section.also and not section.model:
        yield ConfigError("teacher.also", "names further teachers, but there is no first", "", "Set teacher.model")
    if section.also and (section.shard or section.pipeline):
        allowed = "Several teachers, or one that is divided over the ranks"
        yield ConfigError("teacher.also", "does not go with teacher.shard and teacher.pipeline", allowed, "Drop one")
    seen = [(section.model, section.args, section.checkpoint)]
    for i, member in enumerate(section.also):
        key = (member.model, member.args, member.checkpoint)
        where = f"teacher.also[{i}]"
        if not member.model:
            yield ConfigError(f"{where}.model", "is missing", "A timm model name, a folder or a hub id", "Add it")
        elif key in seen:
            yield ConfigError(where, "is a teacher that is there already", "Each teacher once", "Change its weight")
        seen.append(key)
