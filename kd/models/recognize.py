"""Recognize the timm network of a file of weights, by the file's name, else by the shapes of its tensors."""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read
from kd.models.fitting import SeveralNetworks, candidates, config_of, origin, take
from kd.models.load_classifier import built_bare
from kd.models.shapes import by_shapes

TRIED = 60  # most candidates with equal shapes to try; 46 networks share those of a ViT-B/16


class Recognized(NamedTuple):
    """A network that fits a file's tensors."""

    model: str
    by_order: bool  # the names of its tensors are in no table
    why: str  # content of the file, and how it was recognized


def identify(where: str, file: Path, model: str = "") -> Recognized:
    """Return the timm network of a file of weights. Only `model` is tried if given, else all that may fit."""
    # Weights with unknown names belong more often to a network `tf_...` than to its twin, since they were converted
    # from TensorFlow.
    import timm

    plain = partial(re.sub, "[^a-z0-9]", "")
    weights, stem = read(where, str(file)), plain(file.stem.lower())
    named = [model] if model else [name for name in timm.list_models() if plain(name.removeprefix("tf_")) in stem]
    offered = [] if model else candidates(weights)
    shaped = [*dict.fromkeys(name for candidate in offered for name in by_shapes(candidate.tensors) if ":" not in name)]
    for by_order in (False, True):
        named.sort(key=lambda name: ((plain(name) in stem) == by_order, -len(name)))
        shaped.sort(key=lambda name: (name.startswith("tf_") != by_order, len(name)))
        tried = [*dict.fromkeys([*named, *shaped])][:TRIED]
        fitting = {name: told for name in tried if (told := _fits(weights, name, by_order)) is not None}
        exact = [name for name in fitting if "became" not in fitting[name]]
        for name in [*(one for one in exact if one in named), *exact, *fitting]:
            how = "named by you" if model else "by its file's name" if name in named else "by the shapes of its tensors"
            twins = [one for one in (exact or fitting) if one != name and one not in named]
            how += f"; {', '.join(twins[:3])} would fit too (NAME=FILE)" if twins and name not in named else ""
            return Recognized(name, by_order, f"{fitting[name]}; known {how}")
    for tensors in weights.sets.values():
        if (known := origin(weights, tensors, {}, model or "timm")) is not None:
            raise known
    wrong = f"'{file}' holds the weights of no network of timm whose name is in the file's name, or whose shapes fit"
    tried = ", ".join([*named, *shaped][:8]) or "none"
    raise ModelError(where, wrong, "NAME=FILE, where NAME has a fitting network", f"Tried: {tried}")


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
        patch = getattr(network, "patch_embed", None)
        grid, size = getattr(patch, "grid_size", None), getattr(patch, "patch_size", None)
        rows = next((len(taken.tensors[head]) for head in heads if head in taken.tensors), 0)
        facts = [f"{len(taken.tensors)} tensors of {name}", f"{rows:,} classes" if rows else "no classifier"]
        facts += [f"patches of {size[0]}x{size[1]} px"] if isinstance(size, tuple) else []
        facts += [f"{grid[0]}x{grid[1]} of them at {config_of(network)['input_size'][-1]} px"] if grid else []
        return ", ".join(facts + (["in its order, under other names"] if by_order else [*taken.steps]))
