"""Fit the tensors of a file of weights to a network's parameter names.

Steps, with the tables of `kd/models/weights.json`: candidates (averaged or raw, without
wrappers and prefixes), names, grid. Each step reports its change. All shapes must fit
at the end; only a score can show that the meaning fits too.
"""

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from kd.core.errors import ModelError, first_sentence
from kd.models.checkpoints import KNOWN, Tensors, Weights

# whether a set's name shows averaged weights (EMA)
is_averaged = re.compile(KNOWN["averaged"], re.IGNORECASE).search


class TensorSet(NamedTuple):
    """Hold tensors of a file that may be one network, and a phrase per change."""

    name: str  # of the set in its file
    tensors: Tensors
    steps: tuple[str, ...] = ()


class Lookalike(NamedTuple):
    """Say what a file holds whose tensors do not fit, as far as their names tell."""

    content: str
    remedy: str


class SeveralNetworks(ModelError):
    """Report that more than one network of a file fits."""


def match_state_dict(
    weights: Weights,
    network: nn.Module,
    model: str,
    choice: str,
    heads: Collection[str] = (),
    bare: bool = False,
) -> TensorSet:
    """Return the tensors of a file for a network.

    `heads` are the names of its classifier, whose classes may differ.

    `bare`: the network has no classifier, and the file's is left out.
    """
    sets = candidates(weights, choice)
    fitting, differences = _fitting_sets(sets, network, model, heads, bare)
    if not fitting:
        unordered = weights.file.suffix == ".safetensors"
        ordered, differences_in_order = _fitting_sets(
            [] if unordered else sets, network, model, heads, bare, by_order=True
        )
        if differences_in_order and choice == "by_order":
            differences = differences_in_order
        missing = [*differences.values()].count("missing")
        foreign = ordered or 2 * missing > len(network.state_dict())
        lookalike = origin(
            weights, sets[0].tensors if foreign else {}, differences, model
        )
        if choice == "by_order" and not (lookalike and config_of(network)):
            fitting = ordered
        differing = _difference_text(differences)
        if not fitting and lookalike:
            wrong = (
                f"'{weights.file}' holds {lookalike.content}, which '{model}' does not"
                f" take ({differing})"
            )
            allowed = "Weights of that network"
            raise ModelError(weights.config_path, wrong, allowed, lookalike.remedy)
        if not fitting:
            remedy = "Give the name of the network that was trained, and its args"
            if ordered:
                remedy = f"Set {weights.section}.weights=by_order: all shapes fit"
            elif unordered:
                remedy += "; safetensors keep no order for by_order"
            wrong = f"the weights are not those of '{model}' ({differing})"
            raise ModelError(weights.config_path, wrong, "", remedy)
    names = [name for name in fitting if is_averaged(name)] or [*fitting]
    if len(names) > 1:
        wrong = f"'{weights.file}' holds several networks that fit: {names}"
        remedy = f"Set {weights.section}.weights to its name, in a configuration"
        raise SeveralNetworks(weights.config_path, wrong, "One of them", remedy)
    chosen = fitting[names[0]]
    alternatives = [name for name in fitting if name not in names]
    choice_text = f"the set '{chosen.name}'" if chosen.name else ""
    if alternatives:
        choice_text += (
            f"; {alternatives} would fit too ({weights.section}.weights: raw, or a"
            " name)"
        )
    wrote = (
        first_sentence(f"its trainer wrote: {weights.trainer}")
        if weights.trainer
        else ""
    )
    steps = (choice_text, *chosen.steps, wrote)
    return chosen._replace(steps=tuple(filter(None, steps)))


def candidates(weights: Weights, choice: str = "by_name") -> list[TensorSet]:
    """Return what may be one network in a file, as far as a choice allows it."""
    sets = [
        variant
        for name, tensors in weights.sets.items()
        for variant in _variants(TensorSet(name, tensors))
    ]
    if choice in ("by_name", "by_order"):
        return sets
    allowed = [
        tensor_set
        for tensor_set in sets
        if tensor_set.name == choice
        or (choice == "raw" and not is_averaged(tensor_set.name))
    ]
    if not allowed:
        wrong = f"is '{choice}', and '{weights.file}' has no such set of tensors"
        set_names = filter(None, (tensor_set.name for tensor_set in sets))
        names = dict.fromkeys(["by_name", "by_order", "raw", *set_names])
        raise ModelError(
            f"{weights.section}.weights",
            wrong,
            f"One of {', '.join(names)}",
            "Choose one",
        )
    return allowed


def _variants(source: TensorSet) -> Iterator[TensorSet]:
    """Yield a set, then without wrappers in its names, then without each prefix.

    A prefix is left out with and without the other tensors.
    """
    yield source
    name, tensors, steps = source
    unwrapped = {
        re.sub(KNOWN["wrappers"], "", key): tensor for key, tensor in tensors.items()
    }
    if unwrapped.keys() != tensors.keys():
        tensors = unwrapped
        yield TensorSet(name, tensors, steps)
    names = "\n".join(tensors)
    prefixes = dict.fromkeys(re.findall(KNOWN["prefixes"], names, re.MULTILINE))
    for prefix in prefixes:
        inside = {}
        outside = {}
        for key, tensor in tensors.items():
            if key.startswith(prefix):
                inside[key.removeprefix(prefix)] = tensor
            else:
                outside[key] = tensor
        changes = (*steps, f"the prefix '{prefix}' is left out")
        if outside and inside.keys().isdisjoint(outside):
            yield TensorSet(name, inside | outside, changes)
        if outside:
            [example, *_] = outside
            changes += (f"and {len(outside)} other tensors, such as '{example}'",)
        inner = f"{name}.{prefix}".strip(".") if len(prefixes) > 1 else name
        yield from _variants(TensorSet(inner, inside, changes))


def _fitting_sets(
    sets: list[TensorSet],
    network: nn.Module,
    model: str,
    heads: Collection[str],
    bare: bool,
    by_order: bool = False,
) -> tuple[dict[str, TensorSet], dict[str, str]]:
    """Return the sets that fit, by name, and the differences of the nearest other."""
    state = network.state_dict()
    fitting: dict[str, TensorSet] = {}
    nearest: dict[str, str] = {}
    for name, stored, steps in sets:
        if name in fitting:
            continue
        if by_order:
            author = "its tensors are taken by their order, under other names"
            ways = iter([(author, _renamed_by_order(stored, state, bare))])
        else:
            ways = _under_timm_names(stored, network, model, heads)
        for author, renamed in ways:
            tensors = _adapt_shapes(renamed, state, bare)
            differences = _differences(state, tensors, heads)
            if {*differences.values()} <= {"missing head"}:
                changes = (author, *steps, _resampling_text(stored, tensors))
                fitting[name] = TensorSet(name, tensors, changes)
                break
            if not nearest or len(differences) < len(nearest):
                nearest = differences
    return fitting, nearest


def family_filter(
    model: str,
) -> tuple[Callable[..., Tensors], dict[str, Any], str] | None:
    """Return timm's filter for public checkpoints of a family; None if it has none."""
    import timm

    if not timm.is_model(model):
        return None
    module = sys.modules[timm.model_entrypoint(model).__module__]
    names = ["checkpoint_filter_fn_encoder"] * model.endswith("_enc") + KNOWN["filters"]
    family = module.__name__.rpartition(".")[2]
    filters = [getattr(module, name) for name in names if hasattr(module, name)]
    if not filters:
        return None
    options = [
        arguments
        for filter_family, text, arguments in KNOWN["filter_options"][1:]
        if filter_family == family and text in model
    ]
    return filters[0], options[0] if options else {}, family


def rename_by_rules(rules: str, names: Collection[str]) -> dict[str, str]:
    """Return the new name of each name.

    `rules` are pairs of a pattern and its replacement, applied in order.
    """
    words = rules.split()
    renamed = {name: name for name in names}
    for pattern, replacement in zip(words[::2], words[1::2], strict=True):
        renamed = {
            name: re.sub(pattern, replacement, new) for name, new in renamed.items()
        }
    return renamed


def _under_timm_names(
    tensors: Tensors, network: nn.Module, model: str, heads: Collection[str]
) -> Iterator[tuple[str, Tensors]]:
    """Yield (author of the names, tensors under timm's names) for known mappings.

    The unchanged tensors follow.
    """
    readings = [("", tensors)]
    [head, *_] = [*heads, "head.weight"]
    head = head.removesuffix("weight")
    for pattern, mark, author, rules in KNOWN["renamed"][1:]:
        if not re.fullmatch(pattern, model):
            continue
        if not any(re.fullmatch(mark, name) for name in tensors):
            continue
        if rules:
            names = rename_by_rules(rules.replace("HEAD.", head), tensors)
        else:
            names = dict(zip(tensors, network.state_dict(), strict=False))
        if len({*names.values()}) == len(tensors):
            renamed = {new: tensors[name] for name, new in names.items()}
            readings.append((f"its names are {author}", renamed))
    timm_filter = family_filter(model)
    for author, reading in readings:
        # the file may be another family's
        with suppress(Exception), warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            if timm_filter is not None:
                function, options, family = timm_filter
                try:
                    filtered = function(dict(reading), network, **options)
                # as timm's loader: some filters take only the tensors
                except TypeError:
                    filtered = function(dict(reading))
                filter_author = author
                if not author and not filtered.keys() <= reading.keys():
                    filter_author = (
                        f"its names are its authors' (timm's filter for {family})"
                    )
                yield filter_author, dict(filtered)
        yield author, reading


def config_of(network: nn.Module) -> dict[str, Any]:
    """Return timm's pretrained configuration of a network; empty for other networks."""
    return getattr(network, "pretrained_cfg", None) or {}


def _adapt_shapes(tensors: Tensors, state: Tensors, bare: bool) -> Tensors:
    """Adapt shapes that differ by axes of length 1 or by colours; drop idle tensors."""
    from timm.models import adapt_input_conv  # type: ignore[attr-defined]

    idle = re.compile(KNOWN["ignored"])
    left_out = re.compile(KNOWN["classifiers"] if bare else r"\Z").match
    adapted = {
        name: tensor
        for name, tensor in tensors.items()
        if name in state or not (idle.search(name) or left_out(name))
    }
    for name, tensor in state.items():
        if name not in adapted and idle.search(name):
            adapted[name] = tensor
    for name, tensor in adapted.items():
        shape = state[name].shape if name in state else tensor.shape
        long_axes = [length for length in tensor.shape if length != 1]
        if tensor.shape != shape and long_axes == [n for n in shape if n != 1]:
            adapted[name] = tensor.reshape(shape)
        # the first layer, of colours
        elif len(shape) == tensor.ndim == 4 and tensor.shape[1] == 3 != shape[1]:
            with suppress(NotImplementedError, AssertionError):
                adapted[name] = adapt_input_conv(shape[1], tensor, tensor.shape[1])
    return adapted


def _resampling_text(stored: Tensors, tensors: Tensors) -> str:
    """Describe the first tensor that has another size in the network."""
    for name, tensor in tensors.items():
        before = stored.get(name)
        if before is None or not tensor.is_floating_point():
            continue
        if tensor.numel() != before.numel():
            return f"its {name} {(*before.shape,)} became {(*tensor.shape,)}"
    return ""


def _renamed_by_order(tensors: Tensors, state: Tensors, bare: bool) -> Tensors:
    """Rename tensors to a network's names, by position."""
    # older files count no batches
    counted = any(tensor.ndim == 0 for tensor in tensors.values())
    names = [
        name for name in state if counted or not name.endswith("num_batches_tracked")
    ]
    # two may belong to a classifier that the model does not have
    surplus = [*tensors][len(names) + 2 * bare :]
    return dict(zip([*names, *surplus], tensors.values(), strict=False))


def _differences(
    state: Tensors, tensors: Tensors, heads: Collection[str]
) -> dict[str, str]:
    """Return the kind of each difference from a network, except its class count."""
    headless = {*heads}.isdisjoint(tensors)
    kinds = {
        name: "missing head" if headless and name in heads else "missing"
        for name in state
        if name not in tensors
    }
    for name, tensor in tensors.items():
        expected = state.get(name)
        first_axis = int(name in heads)
        if expected is None:
            kinds[name] = "unexpected"
        elif expected.is_floating_point() and not tensor.is_floating_point():
            kinds[name] = "integers"
        elif tensor.shape[first_axis:] != expected.shape[first_axis:]:
            shapes = f"{name} {(*tensor.shape,)} != {(*expected.shape,)}"
            kinds[shapes] = "other shape" if tensor.numel() else "empty"
    return kinds


def _difference_text(differences: Mapping[str, str]) -> str:
    """Return the first names of each kind as text."""
    texts = []
    for kind in sorted({*differences.values()}):
        names = sorted(name for name in differences if differences[name] == kind)
        texts.append(f"{kind}: {', '.join(names[:3])} ({len(names)})")
    return "; ".join(texts)


def origin(
    weights: Weights, tensors: Tensors, differences: Mapping[str, str], model: str
) -> Lookalike | None:
    """Return the known origin of tensors, or of their differences from a network."""
    kinds = {**dict.fromkeys(tensors, "unexpected"), **differences}
    lines = "\n".join(sorted(f"{kind} {name}" for name, kind in kinds.items()))
    for pattern, content, remedy, takers in KNOWN["origins"][1:]:
        if not re.search(pattern, lines, re.MULTILINE) or re.fullmatch(takers, model):
            continue
        lookalikes = filter(re.compile(takers).fullmatch, _lookalikes(weights, model))
        remedy = remedy.format(
            config_path=weights.section,
            file=weights.file,
            likely=next(lookalikes, "NAME"),
        )
        return Lookalike(content, remedy)
    return None


def _lookalikes(weights: Weights, model: str) -> list[str]:
    """Return networks that look like `model`, but have other tensors.

    A name may also come from the file or its trainer.
    """
    import timm
    from torchvision import models

    twins = (f"tf_{model}", *weights.named_among(timm.list_models("tf_*")))
    in_torchvision = weights.named_among(models.list_models(models))
    return [
        *filter(timm.is_model, twins),
        *(f"torchvision.models:{name}" for name in in_torchvision),
    ]
