"""Recognize the timm network of a file of weights, by the file's name, else by the shapes of its tensors."""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read
from kd.models.fitting import SeveralNetworks, candidates, origin, take
from kd.models.load_classifier import built_bare
from kd.models.shapes import by_shapes

TRIED = 60  # most candidates with equal shapes to try; 46 networks share those of a ViT-B/16


class Recognized(NamedTuple):
    """A network that fits a file's tensors."""

    model: str
    by_order: bool  # the names of its tensors are in no table
    why: str  # content of the file, and how it was recognized


def identify(where: str, file: Path, model: str = "") -> Recognized:
    """Return the timm network of a file of weights. Only `model` is tried if given, else all that may fit.

    First the network that the file's trainer wrote into it, as timm's does, then those in the file's name.
    """
    import timm

    plain = partial(re.sub, "[^a-z0-9]", "")
    weights, stem = read(where, str(file)), plain(file.stem.lower())
    offered, written = candidates(weights), str(weights.trainer.get("model", "")).partition(".")[0]
    recorded = [written] if timm.is_model(written) else []
    named = [name for name in timm.list_models() if plain(name.removeprefix("tf_")) in stem]
    shaped = [name for taken in offered for name in by_shapes(taken.tensors) if ":" not in name]
    named.sort(key=lambda name: (plain(name) not in stem, -len(name)))
    shaped.sort(key=lambda name: (name.startswith("tf_"), len(name)))
    tried = [model] if model else [*dict.fromkeys([*recorded, *named, *shaped])][:TRIED]
    for by_order in (False, True):
        fitting = {name: told for name in tried if (told := _fits(weights, name, by_order)) is not None}
        if names := [name for name in fitting if "became" not in fitting[name]] or [*fitting]:
            best = names[0]
            how = "by its file's name" if best in named else "by the shapes of its tensors"
            how = "by what its trainer wrote" if best in recorded else how
            twins = ", ".join([name for name in names[1:] if name not in named][:3])
            certain = {*recorded, *named}
            how += f"; {twins} would fit too (NAME=FILE)" if twins and best not in certain else ""
            return Recognized(best, by_order, f"{fitting[best]}; known {'by you' if model else how}")
    wrong = f"'{file}' holds the weights of no network of timm whose name is in the file's name, or whose shapes fit"
    remedy = f"Tried: {', '.join(tried[:8]) or 'none'}"
    known = origin(weights, offered[0].tensors, {}, model or "timm")
    raise known or ModelError(where, wrong, "NAME=FILE, where NAME has a fitting network", remedy)


def _fits(weights: Weights, name: str, by_order: bool) -> str | None:
    """Return the changes that fit a file's tensors to a network, and the result; None if they do not fit."""
    with torch.device("meta"):
        try:
            network, heads = built_bare(weights.section, name)
            taken = take(weights, network, name, "by_order" if by_order else "by_name", heads)
        except SeveralNetworks:
            raise
        except ModelError:
            return None
        rows = next((len(taken.tensors[head]) for head in heads if head in taken.tensors), 0)
        facts = [f"{len(taken.tensors)} tensors of {name}", f"{rows:,} classes" if rows else "no classifier"]
        return ", ".join([*facts, *taken.steps])
