"""Which teacher and which student a first run has: pretrained weights that are here, students that were measured."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kd.core.errors import ModelError
from kd.files.json_file import read_json
from kd.models.live_teacher import count_parameters
from kd.models.load_classifier import load, require_weights
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.models.timm_folder import cached, folder_classes, takes_any_size
from kd.study.sweeps.frontier import timed

WHERE = "--teacher"
LARGEST_MB = 120  # of weights that are taken unasked where there is no GPU: a ViT-S has 88, a ViT-B 346
STUDENTS: dict[str, dict[str, Any]] = {
    "xcit_nano_12_p8_224": {"embed_dim": 64, "depth": 6, "num_heads": 4},
    "repvit_m0_9": {"embed_dim": [24, 48, 96, 192], "depth": [1, 1, 4, 1]},
    "mobilenetv4_conv_small_050": {},
    "lcnet_050": {},
}
"""Students of docs/guide.md, "How small may the student be?", the most accurate first: one of each kind and cost."""
COARSE = 96  # images from this side on are cut into patches of 16 px instead of 8: a quarter of the cost
SERVING_MS = 1.0  # what kd-serve adds to the graph's time: a small JPEG is decoded, and HTTP

log = logging.getLogger("kd")


class Teacher(NamedTuple):
    """Which teacher, and why."""

    keys: dict[str, Any]  # of the section
    why: str  # the fact that chose them
    role: str  # what the student learns: its "logits", its "features", or, after a fit to the labels, "fit"
    any_size: bool = False  # it takes images of any size as they are, as convolutions do


def find_teacher(text: str, classes: Sequence[str], gpu: bool) -> Teacher | None:
    """Return the teacher that a text names, else the largest that is here; without `classes` none is fitted."""
    here, why = cached(), f"named by {WHERE}"
    if not text:
        sizes = {name: file.stat().st_size / 1e6 for name, file in here.items()}
        text = max((name for name in sizes if gpu or sizes[name] <= LARGEST_MB), key=sizes.__getitem__, default="")
        why = f"the largest of {', '.join(sorted(here))} in the hub's cache here"
    if not text:
        return None
    path, role = here[text].parent if "/" in text and text in here else Path(text), "fit" if classes else "logits"
    if not path.is_dir():
        keys, of_file = named(WHERE, text)
        return Teacher(keys, of_file or why, role, takes_any_size(keys["model"]))
    if not (path / "config.json").is_file():
        allowed = "A folder that kd-export, timm or transformers wrote"
        raise ModelError(WHERE, f"no config.json in '{path}'", allowed, "Name the file of weights")
    config = read_json(path / "config.json", WHERE, "Write the folder anew")
    foreign = "model_type" in config  # transformers'
    names = [*config.get("id2label", {}).values()] if foreign else folder_classes(path, WHERE)
    own = bool(names) and (not classes or names == [*classes])
    keys = {"kind": "transformers", "model": text} if foreign else {"model": text}
    return Teacher(keys, why, "logits" if own else "features" if foreign else "fit")


def named(where: str, text: str) -> tuple[dict[str, Any], str]:
    """Return the keys of the pretrained weights NAME, FILE or NAME=FILE, and the facts in a file."""
    model, _, file = text.rpartition("=")
    if not Path(file).is_file():
        require_weights(Spec(where, text, {}, (), pretrained=True))
        return {"model": text}, ""
    model, by_order, why = identify(where, Path(file), model)
    log.info("%s: %s", file, why)
    return {"model": model, "checkpoint": file, **({"weights": "by_order"} if by_order else {})}, why


def find_student(size: int, classes: Sequence[str], ms: float | None, mb: float | None) -> tuple[dict[str, Any], str]:
    """Return keys of `student` and why: the first of the list within `ms` and `mb`, timed here with random weights."""
    misses = []
    for name, args in STUDENTS.items():
        name = name.replace("_p8_", "_p16_") if size >= COARSE else name
        make = partial(load, Spec("student", name, args, classes, free_size=True), size)
        with torch.device("meta"):
            parameters = count_parameters(make())
        found, took = f"{parameters / 1e6:.2f} M parameters, {4 * parameters / 1e6:.1f} MB", 0.0
        small = mb is None or 4 * parameters / 1e6 <= mb
        if small and ms is not None:
            log.info("timing %s on images of %d px ...", name, size)
            took = SERVING_MS + timed({name: make}, {name: size})[name].get("ms", float("inf"))
            found += f", {took:.1f} ms here on one thread, {SERVING_MS:g} of them for kd-serve"
        if small and took <= (ms or took):
            return {"model": name, **({"args": args} if args else {})}, f"{found}; see docs/guide.md, Many settings"
        misses.append(f"{name}: {found}")
    raise ModelError("--latency, --mb", f"no student is within them: {'; '.join(misses)}", "", "Allow more")
