"""Recognize the timm network of a file of weights, by its trainer's record or by the
file's name.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from kd.core.errors import ModelError
from kd.models.checkpoints import Weights, read
from kd.models.fitting import SeveralNetworks, candidates, origin, take
from kd.models.load_classifier import built_bare


class Recognized(NamedTuple):
    """A network that fits a file's tensors."""

    model: str
    by_order: bool  # the names of its tensors are in no table
    why: str  # content of the file, and how it was recognized


def identify(config_path: str, file: Path, model: str = "") -> Recognized:
    """Return the timm network of a file of weights: `model` if given, else one that its
    trainer or its name says.
    """
    import timm

    weights = read(config_path, str(file))
    tried = [model] if model else weights.named_among(timm.list_models())
    refusals = list[ModelError]()
    for by_order in (False, True):
        contents = dict[str, str]()
        for name in tried:
            try:
                contents[name] = _content(weights, name, by_order)
            except SeveralNetworks:
                raise
            except ModelError as error:
                refusals.append(error)
        if contents:
            best = min(
                contents, key=lambda name: "became" in contents[name]
            )  # without resampling if possible
            source = (
                "by what its trainer wrote"
                if best == weights.architecture
                else "by its file's name"
            )
            return Recognized(
                best,
                by_order,
                f"{contents[best]}; known {'by you' if model else source}",
            )
    if refusals:
        raise refusals[0]
    wrong = (
        f"neither the name of '{file}' nor its trainer says of which network of timm"
        " its weights are"
    )
    remedy = f"Write the name before the file: NAME={file}"
    known = origin(weights, candidates(weights)[0].tensors, {}, "timm")
    if known is not None:
        wrong += f"; it holds {known.content}"
        remedy += f". If timm lacks the network: {known.remedy}"
    raise ModelError(
        config_path, wrong, "NAME=FILE with the network that was trained", remedy
    )


def _content(weights: Weights, name: str, by_order: bool) -> str:
    """Return what a file holds for a network, and the changes that fit it; raise
    ModelError if it does not fit.
    """
    with torch.device("meta"):
        network, heads = built_bare(weights.section, name, weights.arguments(name))
        taken = take(
            weights, network, name, "by_order" if by_order else "by_name", heads
        )
    rows = next(
        (len(taken.tensors[head]) for head in heads if head in taken.tensors), 0
    )
    facts = [
        f"{len(taken.tensors)} tensors of {name}",
        f"{rows:,} classes" if rows else "no classifier",
    ]
    return ", ".join([*facts, *taken.steps])
