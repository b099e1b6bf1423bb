"""Write the configuration of a first run, with a comment on each choice."""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kd.config.json_schema import EDITOR_LINE, FILE, json_schema
from kd.config.tuning import Augment
from kd.core import recommended
from kd.core.errors import ConfigError
from kd.core.host import cores, free_mib
from kd.jobs.init.folder import ImageFolder, Keys, inspect_folder
from kd.jobs.init.networks import (
    ChosenTeacher,
    find_teacher,
    resampled_note,
)
from kd.jobs.init.students import COARSE, Budget, choose_student
from kd.jobs.init.trial import FEWEST, tried
from kd.models.timm_folder import input_keys, takes_any_size
from kd.setup.open_store import decoded_bytes, keep_rules

FRAME = r"(.*\d[^/]*\D)\d+\.\w+$"
"""A name as of a frame: it ends with a number after another one, as clip7_0012.jpg does
and IMG_0012.jpg does not.
"""
log = logging.getLogger("kd")
RAM_SHARE = 0.3  # largest share of the free memory for decoded images


def init(
    folder: Path,
    to: Path | None,
    teacher_weights: str,
    student_weights: Sequence[str],
    ms: float | None,
    mb: float | None,
) -> tuple[Path, list[str]]:
    """Inspect, choose and write; return the file and the next commands."""
    name = re.sub(r"[^\w.-]+", "_", folder.resolve().name or "images")
    file = to or Path(f"{name}.yaml")
    if file.exists() or not os.access(file.parent, os.W_OK):
        wrong = f"'{file.parent}' is no folder that can be written to"
        if file.exists():
            wrong = f"'{file}' exists"
        raise ConfigError("-o", wrong, "A new file", "Name another one with -o")
    images = inspect_folder(folder)
    gpu = torch.cuda.is_available()
    for note in images.data.notes:
        log.info("data: %s", note)
    teacher = find_teacher(teacher_weights, images.data.classes, gpu)
    _require_weights(images, teacher, student_weights)
    size = recommended.image_side(images.side, gpu, teacher is not None)
    if teacher is not None:
        teacher = tried(teacher, images, size)
    classes = images.data.classes or ("a", "b")  # or the teacher's names
    if teacher and teacher.role == "features" and images.labels == "none":
        classes = ()
    student = choose_student(student_weights, teacher, size, classes, Budget(ms, mb))
    lines = [
        EDITOR_LINE,
        f"# Written by `kd init {folder}`: keys with the reason for each choice; lines"
        " behind # are choices for you",
        *_config_lines(images, teacher, size, gpu, *student),
        "",
    ]
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write("\n".join(lines))
        schema = json.dumps(json_schema(), indent=1) + "\n"
        file.with_name(FILE).write_text(schema, encoding="utf-8")
    except OSError as error:
        wrong = f"'{file}' cannot be written ({error.strerror})"
        raise ConfigError("-o", wrong, "A new file", "Name another") from error
    if "init" not in student[0]:
        log.info(
            "%s from random weights: expect much less (docs/tutorial.md). Better:"
            " %s--student FILE (docs/weights.md, Where weights come from)",
            "the student starts" if teacher else "teacher and student start",
            "" if teacher else "--teacher FILE and ",
        )
    limits = ["drop<=3"]
    limits += [f"{key}<={limit:g}" for key, limit in (("ms", ms), ("mb", mb)) if limit]
    config = _yaml(str(file))
    run = f"runs/{file.stem}"
    return file, [
        f"kd train {config} --check",
        f"kd train {config}",
        f'kd export {run} --accept "{" ".join(limits)}"',
        f"kd serve {run}/export",
        f"kd verify {run}/export --data {_yaml(str(folder))}",
    ]


def _require_weights(
    images: ImageFolder, teacher: ChosenTeacher | None, student_weights: Sequence[str]
) -> None:
    """Refuse choices that need pretrained weights of a teacher where it has none."""
    if images.labels == "none" and (teacher is None or teacher.role == "fit"):
        wrong = f"the images have no labels ({images.why}), and "
        wrong += (
            "a teacher cannot be fitted on them"
            if teacher
            else "no pretrained weights are here"
        )
    elif student_weights and teacher is None:
        wrong = (
            "a student with pretrained weights has little to learn from a teacher with"
            " random ones"
        )
    else:
        return
    remedy = "Name a file, a folder or a model"
    raise ConfigError("--teacher", wrong, "Pretrained weights", remedy)


def _yaml(value: Any) -> str:
    """Return a value in the flow style of YAML, words without quotation marks."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{key}: {_yaml(entry)}" for key, entry in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    plain = isinstance(value, str) and re.fullmatch(
        r"(?!(?:true|false|yes|no|on|off|null)$)[A-Za-z./][\w./-]*", value
    )
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _section_lines(keys: Keys, why: str) -> list[str]:
    """Return lines of a section, the first with a comment."""
    lines = [f"  {key}: {_yaml(value)}" for key, value in keys.items()]
    return [f"{lines[0]}  # {why}", *lines[1:]]


def _config_lines(
    images: ImageFolder,
    teacher: ChosenTeacher | None,
    size: int,
    gpu: bool,
    student: Keys,
    why: str,
) -> list[str]:
    count = len(images.data.train)
    batch, epochs = recommended.length(count, gpu, "init" in student)
    steps = epochs * (count // batch)
    lines = [
        "run:",
        f"  epochs: {epochs}  # of {count:,} images: {steps * batch:,} views;"
        " --check says how long that takes",
        f"  every: {{evaluate: {max(1, steps // 20)}}}  # 20 times in {steps:,} steps",
    ]
    if images.counts:
        lines.append(
            "  # baseline: true  # the same student on labels alone too: what does the"
            " teacher add?"
        )
    lines += ["data:", *_data_lines(images, size, batch, gpu)]
    lines += _teacher_lines(images, teacher, epochs, batch, size)
    lines += ["student:", *_section_lines(student, why)]
    if "init" in student:
        rate = recommended.RATES[takes_any_size(student["model"])][0]
        example = "grocery"
    else:
        lines.append(
            "  # far more accurate where images are few: pretrained weights, kd init"
            " --student WEIGHTS"
        )
        rate = 0.003 if "xcit" in student["model"] else 0.002
        example = "vit_food"
    return [
        *lines,
        f"losses: {_losses_text(images, teacher)}",
        f"optimizer: {{lr: {rate}, warmup_ratio: 0.1}}  # as in configs/{example}.yaml",
    ]


def _data_lines(images: ImageFolder, size: int, batch: int, gpu: bool) -> list[str]:
    data = images.data
    counts = images.counts
    layout = ", ".join(
        f"{len(source):,} {split}" for split, source in data.splits.items()
    )
    lines = _section_lines(images.keys, layout)
    lines += [f"  # {note}" for note in data.notes]
    if 0 < images.bits < 16:
        lines.append(
            f"  bits: {max(9, images.bits)}  # used by the sampled images of 16 bits"
        )
    labels = "# labels: none" if images.labels == "all" else f"labels: {images.labels}"
    classes = images.why
    if counts:
        classes = f"{len(counts)} classes of {min(counts):,} to {max(counts):,} images"
    lines += [f"  {labels}  # {classes}", *_group_lines(images)]
    if data.test is None:
        lines.append(
            "  # test_fraction: 0.5  # of the validation images: scored once, when all"
            " is chosen"
        )
    memory = free_mib()
    crop = recommended.crop_scale(images.side, size)
    plan = replace(data.plan, image_size=size, augment=Augment(crop_scale=crop))
    stored = decoded_bytes((data.train, data.val), keep_rules(plan)) / 2**20
    store = "# store: ram" if stored > RAM_SHARE * memory else "store: ram"
    lines += [
        f"  image_size: {size}  # {images.sampled} sampled images have {images.side}"
        f" px (median); {cores()} cores, {memory / 1024:.0f} GB free,"
        f" {'a' if gpu else 'no'} GPU",
        f"  batch_size: {batch}",
        f"  {store}  # each image is decoded once: about {stored:,.0f} MiB",
        f"  augment: {{crop_scale: {crop}, jitter: 0.2}}  # flip: 0.0 where left"
        " and right differ, as in writing",
    ]
    tried = images.sampled + images.damaged
    if images.damaged:
        lines.append(
            f"  on_corrupt: skip  # {images.damaged} of {tried} sampled images are"
            " damaged"
        )
    if 100 * images.damaged > tried:
        lines.append(f"  max_skipped: {min(1, 2 * images.damaged / tried):.2f}")
    return lines


def _group_lines(images: ImageFolder) -> list[str]:
    """Return `data.group` as a choice if names look like numbered frames of series."""
    train = images.data.train
    series = {re.sub(FRAME, r"\1", train.name(id)) for id in range(len(train))}
    # several series of each class
    if not 2 * len(train.classes) < len(series) < len(train) / 3:
        return []
    return [
        f"  # group: '{FRAME}'  # {len(series):,} series of names, as of frames: each"
        " in one split"
    ]


def _teacher_lines(
    images: ImageFolder,
    teacher: ChosenTeacher | None,
    epochs: int,
    batch: int,
    size: int,
) -> list[str]:
    """Return the teacher's section, with the keys that fit it to the labels."""
    count = len(images.data.train)
    if teacher is None:
        keys: Keys = {
            "model": f"xcit_nano_12_p{16 if size >= COARSE else 8}_224",
            "args": {"embed_dim": 128, "depth": 6, "num_heads": 4},
        }
        why = (
            "random weights, as in docs/tutorial.md: no others are here. With some: kd"
            " init --teacher FILE"
        )
        options = {"lr": 0.0015, "warmup_ratio": 0.1}
    else:
        keys = dict(teacher.keys)
        why = teacher.why
        lr, head = recommended.RATES[takes_any_size(keys["model"])]
        options = {"lr": lr, "tuning": {"head_lr_scale": head}}
        batch = min(32, batch)
    warnings = []
    if teacher is None or teacher.role == "fit":
        labelled, val = (
            len(replace(images.data, train=split).with_labels().train)
            for split in (images.data.train, images.data.val)
        )
        batch = min(batch, recommended.largest_power(labelled))
        visits = epochs * count
        if teacher is not None:
            visits = 0
            side = max(size, recommended.TEACHER_SIDE)
            keys |= input_keys(keys["model"], side)
            keys["pretrained"] = True
            if note := resampled_note(teacher.side, side):
                warnings.append(f"  # {note}")
        steps = recommended.fit_visits(labelled, visits) // batch
        keys["fit"] = {
            "steps": steps,
            "evaluate": max(1, steps // 20),
            "batch_size": batch,
            **options,
        }
        why += (
            f"; {steps * batch:,} views of {labelled:,} labelled images fit it to your"
            " classes"
        )
        if val < FEWEST:
            warnings.append(
                f"  min_accuracy: 0.0  # {val} labels of validation do not tell a good"
                " teacher from chance"
            )
    views = recommended.stored_views(epochs)
    cache = (
        f"  cache: {{views: {views}}}  # of {epochs} epochs: the teacher predicts"
        f" {views * count:,} images in all"
    )
    return ["teacher:", *_section_lines(keys, why), *warnings, cache]


def _losses_text(images: ImageFolder, teacher: ChosenTeacher | None) -> str:
    if teacher and teacher.role == "features":
        losses: list[Keys] = [{"kind": "cosine"}]
    elif images.sets:
        losses = [{"kind": "binary_kl"}]
    else:
        losses = [{"kind": "kl", "temperature": recommended.TEMPERATURE}]
    if images.labels != "none" and images.sets:
        losses.append({"kind": "bce", "weight": 0.5})
    elif images.labels != "none":
        losses.append({"kind": "ce", "weight": recommended.LABEL_WEIGHT})
    return _yaml(losses)
