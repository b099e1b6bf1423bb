"""Recognize the timm network of a file of weights.

Its trainer's record or the file's name tells it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read_weights
from kd.models.fitting import (
    SeveralNetworks,
    candidates,
    config_of,
    match_state_dict,
    origin,
)
from kd.models.load_classifier import built_bare
from kd.models.timm_folder import data_config

# names of timm, torchvision and transformers
POSITIONS = re.compile(r"(.*[.])?pos(ition)?_?embed(ding)?s?").fullmatch


class Recognized(NamedTuple):
    """Name a network that fits a file's tensors."""

    model: str
    by_order: bool  # the names of its tensors are in no table
    why: str  # content of the file, and how it was recognized
    side: int = 0  # pixels of the images its positions are for; 0: not known


def identify(config_path: str, file: Path, model: str = "") -> Recognized:
    """Return the timm network of a file of weights.

    It is `model` if given, else one that its trainer or its name says.
    """
    import timm

    weights = read_weights(config_path, str(file))
    names = [model] if model else weights.named_among(timm.list_models())
    refusals = list[ModelError]()
    for by_order in (False, True):
        contents = dict[str, Recognized]()
        for name in names:
            try:
                contents[name] = _recognized(weights, name, by_order)
            except SeveralNetworks:
                raise
            except ModelError as error:
                refusals.append(error)
        if contents:
            # the network of the weights' own size if possible
            best = min(contents, key=lambda name: "became" in contents[name].why)
            source = "by its file's name"
            if model:
                source = "by you"
            elif best == weights.architecture:
                source = "by what its trainer wrote"
            why = _why_at_own_size(weights, contents[best])
            return contents[best]._replace(why=f"{why}; known {source}")
    if refusals:
        raise refusals[0]
    wrong = (
        f"neither the name of '{file}' nor its trainer says of which network of timm"
        " its weights are"
    )
    remedy = f"Write the name before the file: NAME={file}"
    lookalike = origin(weights, candidates(weights)[0].tensors, {}, "timm")
    if lookalike is not None:
        wrong += f"; it holds {lookalike.content}"
        remedy += f". If timm lacks the network: {lookalike.remedy}"
    raise ModelError(
        config_path, wrong, "NAME=FILE with the network that was trained", remedy
    )


def _recognized(
    weights: Weights, name: str, by_order: bool, size: Mapping[str, int] | None = None
) -> Recognized:
    """Return what a file holds for a network, and the changes that fit it.

    `size` is an argument of the network. ModelError: it does not fit.
    """
    with torch.device("meta"):
        arguments = {**weights.arguments(name), **(size or {})}
        network, heads = built_bare(weights.section, name, arguments)
        choice = "by_order" if by_order else "by_name"
        _, tensors, steps = match_state_dict(weights, network, name, choice, heads)
    rows = next((len(tensors[head]) for head in heads if head in tensors), 0)
    classes = f"{rows:,} classes" if rows else "no classifier"
    why = ", ".join([f"{len(tensors)} tensors of {name}", classes, *steps])
    return Recognized(name, by_order, why, trained_side(weights, network))


def _why_at_own_size(weights: Weights, recognized: Recognized) -> str:
    """Return what a file holds for its network, built for the file's positions."""
    if "became" in recognized.why:
        size = {"img_size": recognized.side}
        # some networks take no size
        with suppress(ModelError):
            model, by_order = recognized[:2]
            return _recognized(weights, model, by_order, size).why
    return recognized.why


def trained_side(weights: Weights, network: Any) -> int:
    """Return the side in pixels of the images that a network was trained for.

    The file's positions tell it, else its trainer, else timm's default for the network.
    It is 0 if the network is for any size.
    """
    if not config_of(network).get("fixed_input_size"):
        return 0
    side = weights.trainer.get("img_size", weights.trainer.get("input_size"))
    side = side[-1] if isinstance(side, (list, tuple)) else side
    recorded = [side] if isinstance(side, int) else []
    default = data_config(network)["input_size"][-1]
    return next(iter([*_position_sides(weights, network), *recorded, default]))


def _position_sides(weights: Weights, network: Any) -> Iterator[int]:
    """Yield the side of the images for each square grid of positions in a file."""
    positions = getattr(network, "pos_embed", None)
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if not isinstance(positions, Tensor) or not grid:
        return
    width = positions.shape[-1]
    prefix = positions.numel() // width - math.prod(grid)
    for tensors in weights.sets.values():
        for name, tensor in tensors.items():
            if POSITIONS(name) and tensor.shape[-1:] == (width,):
                count = max(0, tensor.numel() // width - prefix)
                side = math.isqrt(count)
                if side * side == count > 0:
                    yield side * network.patch_embed.patch_size[-1]
