"""Recognize the timm network of a file of weights.

Its trainer's record or the file's name tells it.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read_weights
from kd.models.fitting import SeveralNetworks, candidates, match_state_dict, origin
from kd.models.load_classifier import built_bare


class Recognized(NamedTuple):
    """Name a network that fits a file's tensors."""

    model: str
    by_order: bool  # the names of its tensors are in no table
    why: str  # content of the file, and how it was recognized


def identify(config_path: str, file: Path, model: str = "") -> Recognized:
    """Return the timm network of a file of weights.

    It is `model` if given, else one that its trainer or its name says.
    """
    import timm

    weights = read_weights(config_path, str(file))
    names = [model] if model else weights.named_among(timm.list_models())
    refusals = list[ModelError]()
    for by_order in (False, True):
        contents = dict[str, str]()
        for name in names:
            try:
                contents[name] = _describe_fit(weights, name, by_order)
            except SeveralNetworks:
                raise
            except ModelError as error:
                refusals.append(error)
        if contents:
            # without resampling if possible
            best = min(contents, key=lambda name: "became" in contents[name])
            source = "by its file's name"
            if model:
                source = "by you"
            elif best == weights.architecture:
                source = "by what its trainer wrote"
            return Recognized(best, by_order, f"{contents[best]}; known {source}")
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


def _describe_fit(weights: Weights, name: str, by_order: bool) -> str:
    """Return what a file holds for a network, and the changes that fit it.

    ModelError: it does not fit.
    """
    with torch.device("meta"):
        network, heads = built_bare(weights.section, name, weights.arguments(name))
        choice = "by_order" if by_order else "by_name"
        _, tensors, steps = match_state_dict(weights, network, name, choice, heads)
    rows = next((len(tensors[head]) for head in heads if head in tensors), 0)
    classes = f"{rows:,} classes" if rows else "no classifier"
    return ", ".join([f"{len(tensors)} tensors of {name}", classes, *steps])
