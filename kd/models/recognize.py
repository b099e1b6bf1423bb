"""Recognize the timm network of a file of weights, by the file's name, else by the shapes of its tensors.

`python tools/shapes.py` writes the index of shapes, `kd/models/shapes.txt`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read
from kd.models.fitting import config_of, foreign, take
from kd.models.load_classifier import built_bare

INDEX = Path(__file__).with_name("shapes.txt")
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
    shaped = [] if model else [*dict.fromkeys(name for one in weights.sets.values() for name in by_shapes(one))]
    for by_order in (False, True):
        for name in weights.sets if by_order else ():  # names known to be another library's are not matched by position
            if (error := foreign(weights, name, model or "no network of timm")) is not None:
                raise error
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
    wrong = f"'{file}' holds the weights of no network of timm whose name is in the file's name, or whose shapes fit"
    tried = ", ".join([*named, *shaped][:8]) or "none"
    raise ModelError(where, wrong, "NAME=FILE, where NAME has a fitting network", f"Tried: {tried}")


def _fits(weights: Weights, name: str, by_order: bool) -> str | None:
    """Return the changes that fit a file's tensors to a network, and the result; None if they do not fit."""
    with suppress(ModelError), torch.device("meta"):
        network, heads = built_bare(weights.where.partition(".")[0], name)
        taken = take(weights, network, name, "by_order" if by_order else "by_name", heads)
        patch = getattr(network, "patch_embed", None)
        grid, size = getattr(patch, "grid_size", None), getattr(patch, "patch_size", None)
        rows = next((len(taken.tensors[head]) for head in heads if head in taken.tensors), 0)
        facts = [f"{len(taken.tensors)} tensors of {name}", f"{rows:,} classes" if rows else "no classifier"]
        facts += [f"patches of {size[0]}x{size[1]} px"] if isinstance(size, tuple) else []
        facts += [f"{grid[0]}x{grid[1]} of them at {config_of(network)['input_size'][-1]} px"] if grid else []
        return ", ".join(facts + (["in its order, under other names"] if by_order else [*taken.steps]))
    return None


def by_shapes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the timm networks whose matrices have these sizes, up to one or two classifiers."""
    total, counts = signature(tensors)
    index = dict(line.split(" ", 1) for line in INDEX.read_text(encoding="utf-8").splitlines())
    left = [0, *counts, *(2 * one for one in counts)]
    found = (index.get(f"{(total - without) % 2**64:016x}", "") for without in left)
    return [name for names in found for name in names.split()]


def signature(tensors: Mapping[str, Tensor]) -> tuple[int, Counter[int]]:
    """Return the sum of hashes of all matrix and kernel sizes, and the hash of each matrix's size."""
    # Vectors and position tables are left out: they depend on the family's format and on the image size.
    sizes = {n: t for n, t in tensors.items() if t.ndim in (2, 4, 5) and t.shape[0] > 1 and "_pos" not in n}
    hashed = {n: _hash(t.numel()) for n, t in sizes.items() if "pos_" not in n and "position" not in n}
    return sum(hashed.values()), Counter(value for n, value in hashed.items() if sizes[n].ndim == 2)


def _hash(number: int) -> int:
    return int.from_bytes(hashlib.blake2b(str(number).encode(), digest_size=8).digest(), "big")
