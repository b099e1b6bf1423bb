"""Write the configuration of a first run, with a comment on each choice."""

import json
import logging
import os
import re
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
    COARSE,
    ChosenTeacher,
    find_student,
    find_teacher,
    pretrained_keys,
)
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
    student_weights: str,
    ms: float | None,
    mb: float | None,
) -> tuple[Path, list[str]]:
    """Inspect, choose and write; return the file and the next commands."""
    file = to or Path(
        re.sub(r"[^\w.-]+", "_", folder.resolve().name or "images") + ".yaml"
    )
    if file.exists() or not os.access(file.parent, os.W_OK):
        wrong = (
            f"'{file}' exists"
            if file.exists()
            else f"'{file.parent}' is no folder that can be written to"
        )
        raise ConfigError("-o", wrong, "A new file", "Name another one with -o")
    found, gpu = inspect_folder(folder), torch.cuda.is_available()
    for note in found.data.notes:
        log.info("data: %s", note)
    teacher = find_teacher(teacher_weights, found.data.classes, gpu)
    wrong = ""
    if found.labels == "none" and (teacher is None or teacher.role == "fit"):
        wrong = f"the images have no labels ({found.why}), and "
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
    if wrong:
        raise ConfigError(
            "--teacher", wrong, "Pretrained weights", "Name a file, a folder or a model"
        )
    size = recommended.image_side(found.side, gpu, teacher is not None)
    bare = teacher is not None and teacher.role == "features" and found.labels == "none"
    classes = () if bare else found.data.classes or ("a", "b")  # or the teacher's names
    student = (
        _tuned_student(student_weights, size)
        if student_weights
        else find_student(size, classes, ms, mb)
    )
    head = (
        f"# Written by `kd init {folder}`: keys with the reason for each choice; lines"
        " behind # are choices for you"
    )
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(
                "\n".join(
                    [
                        EDITOR_LINE,
                        head,
                        *_config_lines(found, teacher, size, gpu, *student),
                        "",
                    ]
                )
            )
        file.with_name(FILE).write_text(
            json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8"
        )
    except OSError as error:
        wrong = f"'{file}' cannot be written ({error.strerror})"
        raise ConfigError("-o", wrong, "A new file", "Name another") from error
    if not student_weights:
        random, names = (
            ("the student starts", "")
            if teacher
            else ("teacher and student start", "--teacher FILE and ")
        )
        log.info(
            "%s from random weights: expect much less (docs/tutorial.md). Better:"
            " %s--student FILE",
            random,
            names,
        )
    limits = [f"{word}<={limit:g}" for word, limit in (("ms", ms), ("mb", mb)) if limit]
    name, run = _yaml(str(file)), f"runs/{file.stem}"
    accept = f'kd export {run} --accept "{" ".join(["drop<=2", *limits])}"'
    verify = f"kd verify {run}/export --data {_yaml(str(folder))}"
    return file, [
        f"kd train {name} --check",
        f"kd train {name}",
        accept,
        f"kd serve {run}/export",
        verify,
    ]


def _yaml(value: Any) -> str:
    """Return a value in the flow style of YAML, words without quotation marks."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
        )
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
    found: ImageFolder,
    teacher: ChosenTeacher | None,
    size: int,
    gpu: bool,
    student: Keys,
    why: str,
) -> list[str]:
    data, counts, count = found.data, found.counts, len(found.data.train)
    tuned = "init" in student
    batch, epochs = recommended.length(count, gpu, tuned)
    steps, memory = epochs * (count // batch), free_mib()
    crop = recommended.crop_scale(found.side, size)
    shrunk = replace(data.plan, image_size=size, augment=Augment(crop_scale=crop))
    stored = decoded_bytes((data.train, data.val), keep_rules(shrunk)) / 2**20
    layout = ", ".join(f"{len(one):,} {split}" for split, one in data.splits.items())
    classes = (
        f"{len(counts)} classes of {min(counts):,} to {max(counts):,} images"
        if counts
        else found.why
    )
    looked, rate = (
        found.sampled + found.damaged,
        (0.003 if "xcit" in student["model"] else 0.002),
    )
    rate = recommended.RATES[takes_any_size(student["model"])][0] if tuned else rate
    machine = (
        f"{cores()} cores, {memory / 1024:.0f} GB free, {'a' if gpu else 'no'} GPU"
    )
    return [
        "run:",
        (
            f"  epochs: {epochs}  # of {count:,} images: {steps * batch:,} views;"
            " --check says how long that takes"
        ),
        f"  every: {{evaluate: {max(1, steps // 20)}}}  # 20 times in {steps:,} steps",
        *[
            "  # baseline: true  # the same student on labels alone too: what does the"
            " teacher add?"
        ]
        * bool(counts),
        "data:",
        *_section_lines(found.keys, layout),
        *(f"  # {note}" for note in data.notes),
        *[f"  bits: {max(9, found.bits)}  # used by the sampled images of 16 bits"]
        * (0 < found.bits < 16),
        (
            f"  {'# ' * (found.labels == 'all')}labels:"
            f" {'none' if found.labels == 'all' else found.labels}  # {classes}"
        ),
        *_group_lines(found),
        *[
            "  # test_fraction: 0.5  # of the validation images: scored once, when all"
            " is chosen"
        ]
        * (data.test is None),
        (
            f"  image_size: {size}  # {found.sampled} sampled images have {found.side}"
            f" px (median); {machine}"
        ),
        f"  batch_size: {batch}",
        (
            f"  {'# ' * (stored > RAM_SHARE * memory)}store: ram  # each image is"
            f" decoded once: about {stored:,.0f} MiB"
        ),
        (
            f"  augment: {{crop_scale: {crop}, jitter: 0.2}}  # flip: 0.0 where left"
            " and right differ, as in writing"
        ),
        *(
            [
                f"  on_corrupt: skip  # {found.damaged} of {looked} sampled images are"
                " damaged"
            ]
            if found.damaged
            else []
        ),
        *(
            [f"  max_skipped: {min(1, 2 * found.damaged / looked):.2f}"]
            if 100 * found.damaged > looked
            else []
        ),
        *_teacher_lines(found, teacher, epochs, batch, size),
        "student:",
        *_section_lines(student, why),
        *[
            "  # far more accurate where images are few: pretrained weights, kd init"
            " --student WEIGHTS"
        ]
        * (not tuned),
        f"losses: {_losses_text(found, teacher)}",
        (
            f"optimizer: {{lr: {rate}, warmup_ratio: 0.1}}  # as in"
            f" configs/{'grocery' if tuned else 'vit_food'}.yaml"
        ),
    ]


def _group_lines(found: ImageFolder) -> list[str]:
    """Return `data.group` as a choice if names look like those of frames: several
    series of each class, numbered.
    """
    train = found.data.train
    series = {re.sub(FRAME, r"\1", train.name(id)) for id in range(len(train))}
    likely = 2 * len(train.classes) < len(series) < len(train) / 3
    return [
        f"  # group: '{FRAME}'  # {len(series):,} series of names, as of frames: each"
        " in one split"
    ] * likely


def _teacher_lines(
    found: ImageFolder,
    teacher: ChosenTeacher | None,
    epochs: int,
    batch: int,
    size: int,
) -> list[str]:
    """Return the teacher's section: local weights, or random ones, and the keys that
    fit them to the labels.
    """
    count, few = len(found.data.train), list[str]()
    if teacher is None:
        model, args = (
            f"xcit_nano_12_p{16 if size >= COARSE else 8}_224",
            {
                "embed_dim": 128,
                "depth": 6,
                "num_heads": 4,
            },
        )
        keys: Keys = {"model": model, "args": args}
        why = (
            "random weights, as in docs/tutorial.md: no others are here. With some: kd"
            " init --teacher FILE"
        )
        options = {"lr": 0.0015, "warmup_ratio": 0.1}
    else:
        keys, why = dict(teacher.keys), teacher.why
        lr, head = recommended.RATES[takes_any_size(keys["model"])]
        options = {"lr": lr, "tuning": {"head_lr_scale": head}}
        batch = min(32, batch)
    if teacher is None or teacher.role == "fit":
        splits = (found.data.train, found.data.val)
        labelled, val = (
            len(replace(found.data, train=split).with_labels().train)
            for split in splits
        )
        batch = min(batch, recommended.largest_power(labelled))
        visits = recommended.fit_visits(
            labelled, epochs * count if teacher is None else 0
        )
        steps = visits // batch
        if teacher is not None:
            keys |= input_keys(keys["model"], max(size, recommended.TEACHER_SIDE)) | {
                "pretrained": True
            }
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
        few = [
            f"  min_accuracy: 0.0  # {val} labels of validation do not tell a good"
            " teacher from chance"
        ] * (val < 50)
    views = recommended.stored_views(epochs)
    cache = (
        f"  cache: {{views: {views}}}  # of {epochs} epochs: the teacher predicts"
        f" {views * count:,} images in all"
    )
    return ["teacher:", *_section_lines(keys, why), *few, cache]


def _tuned_student(weights: str, size: int) -> tuple[Keys, str]:
    """Return keys of a student with pretrained weights, and the reason; `--accept`
    checks its size.
    """
    keys, why = pretrained_keys("--student", weights)
    any_size = takes_any_size(keys["model"])
    shape = (
        input_keys(keys["model"], size) if any_size else {}
    )  # a ViT is built for the data's size
    tuning = {"head_lr_scale": recommended.RATES[any_size][1]}
    return {
        **keys,
        "init": "pretrained",
        **shape,
        "tuning": tuning,
    }, why or "named by --student"


def _losses_text(found: ImageFolder, teacher: ChosenTeacher | None) -> str:
    on_labels = (
        {"kind": "bce", "weight": 0.5}
        if found.sets
        else {"kind": "ce", "weight": recommended.LABEL_WEIGHT}
    )
    own = [on_labels] * (found.labels != "none")
    taught = (
        {"kind": "binary_kl"}
        if found.sets
        else {"kind": "kl", "temperature": recommended.TEMPERATURE}
    )
    return _yaml(
        [{"kind": "cosine"} if teacher and teacher.role == "features" else taught, *own]
    )
