"""Choose the teacher and the student of a first run: local pretrained weights, measured
students.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kd.core.errors import ModelError
from kd.core.text import nfc
from kd.models.live_teacher import count_parameters
from kd.models.load_classifier import load, require_weights
from kd.models.recognize import identify
from kd.models.spec import Spec
from kd.models.timm_folder import cached, folder_config, input_keys
from kd.parts import registry
from kd.study.sweeps.costs import timed

WHERE = "--teacher"
# largest MB of weights chosen by default without a GPU: a ViT-S has 88, a ViT-B 346
LARGEST_MB = 120
STUDENTS: dict[str, dict[str, Any]] = {
    "xcit_nano_12_p8_224": {"embed_dim": 64, "depth": 6, "num_heads": 4},
    "repvit_m0_9": {"embed_dim": [24, 48, 96, 192], "depth": [1, 1, 4, 1]},
    "mobilenetv4_conv_small_050": {},
    "lcnet_050": {},
}
"""Students from docs/guide.md, "How small may the student be?", most accurate first:
one per kind and cost.
"""
# images of at least this side get patches of 16 px instead of 8, at a quarter of the
# cost
COARSE = 96
WEIGHT_ENDINGS = (
    ".pth",
    ".pt",
    ".bin",
    ".ckpt",
    ".tar",
    ".safetensors",
)  # of files that a trainer writes
SERVING_MS = 1.0  # milliseconds that kd-serve adds: decoding a small JPEG, and HTTP

log = logging.getLogger("kd")


class ChosenTeacher(NamedTuple):
    """The chosen teacher and the reason."""

    keys: dict[str, Any]  # of the section
    why: str  # the reason for the choice
    # what the student learns from: "logits", "features", or "fit" (logits after a fit
    # to the labels)
    role: str


def find_teacher(text: str, classes: Sequence[str], gpu: bool) -> ChosenTeacher | None:
    """Return the named teacher, else the largest local one; without `classes` no
    teacher can be fitted.
    """
    here, why = cached(), f"named by {WHERE}"
    if not text:
        sizes = {name: file.stat().st_size / 1e6 for name, file in here.items()}
        text = max(
            (name for name in sizes if gpu or sizes[name] <= LARGEST_MB),
            key=sizes.__getitem__,
            default="",
        )
        why = f"the largest of {', '.join(sorted(here))} in the hub's cache here"
    if not text:
        return None
    path = here[text].parent if "/" in text and text in here else Path(text)
    if path.name == "model.safetensors" and path.with_name("config.json").is_file():
        path, text = (
            path.parent,
            str(path.parent),
        )  # the folder also has the input size and the normalization
    if not path.is_dir():
        keys, facts = pretrained_keys(WHERE, text)
        return (
            _local_teacher(keys, facts, classes)
            if facts
            else ChosenTeacher(keys, why, "fit" if classes else "logits")
        )
    config = folder_config(path, WHERE)
    if not config:
        allowed = "A folder that kd-export, timm or transformers wrote"
        raise ModelError(
            WHERE, f"no config.json in '{path}'", allowed, "Name the file of weights"
        )
    if "model_type" not in config:
        return _local_teacher({"model": text}, why, classes)
    names = sorted(map(nfc, config.get("id2label", {}).values()))  # transformers'
    own = bool(names) and (not classes or names == sorted(map(nfc, classes)))
    return ChosenTeacher(
        {"kind": "transformers", "model": text}, why, "logits" if own else "features"
    )


def _local_teacher(
    keys: dict[str, Any], why: str, classes: Sequence[str]
) -> ChosenTeacher:
    """Return a teacher of weights that are here; it needs a fit unless kd-train takes
    its outputs as the classes.
    """
    spec = Spec(
        WHERE,
        args={},
        classes=classes or None,
        pretrained="checkpoint" not in keys,
        exact_head=True,
        **keys,
    )
    options = registry.default_options("networks", "timm")
    try:
        made = registry.build(
            "networks", "timm", options, WHERE, spec=spec, image_size=0, features=()
        )
    except ModelError:
        return ChosenTeacher(keys, why, "fit")
    # A vision transformer would be built for the data's size.
    return ChosenTeacher(
        keys | input_keys(keys["model"], made.input_size),
        f"{why}; its outputs are the classes",
        "logits",
    )


def pretrained_keys(config_path: str, text: str) -> tuple[dict[str, Any], str]:
    """Return the keys of the pretrained weights NAME, FILE or NAME=FILE, and the facts
    in a file.
    """
    model, _, file = text.rpartition("=")
    is_name = (
        not model
        and Path(file).suffix not in WEIGHT_ENDINGS
        and not Path(file).is_file()
    )
    if is_name:
        require_weights(Spec(config_path, text, {}, (), pretrained=True))
        return {"model": text}, ""
    model, by_order, why = identify(config_path, Path(file), model)
    log.info("%s: %s", file, why)
    return {
        "model": model,
        "checkpoint": file,
        **({"weights": "by_order"} if by_order else {}),
    }, why


def find_student(
    size: int, classes: Sequence[str], ms: float | None, mb: float | None
) -> tuple[dict[str, Any], str]:
    """Return keys of `student` and the reason: the first in the list within `ms` and
    `mb`, timed here.
    """
    misses = []
    for name, args in STUDENTS.items():
        name = name.replace("_p8_", "_p16_") if size >= COARSE else name
        make = partial(load, Spec("student", name, args, classes, free_size=True), size)
        with torch.device("meta"):
            parameters = count_parameters(make())
        found, took = (
            f"{parameters / 1e6:.2f} M parameters, {4 * parameters / 1e6:.1f} MB",
            0.0,
        )
        small = mb is None or 4 * parameters / 1e6 <= mb
        if small and ms is not None:
            log.info("timing %s on images of %d px ...", name, size)
            took = SERVING_MS + timed({name: make}, {name: size})[name].get(
                "ms", float("inf")
            )
            found += (
                f", {took:.1f} ms here on one thread, {SERVING_MS:g} of them for"
                " kd-serve"
            )
        if small and took <= (ms or took):
            return {
                "model": name,
                **({"args": args} if args else {}),
            }, f"{found}; see docs/guide.md, Many settings"
        misses.append(f"{name}: {found}")
    raise ModelError(
        "--latency, --mb",
        f"no student is within them: {'; '.join(misses)}",
        "",
        "Allow more",
    )
