"""Fit the tensors of a file of weights to a network's parameter names.

Steps, with the tables of `kd/models/weights.json`: set (averaged or raw), prefix, names, grid. Each step reports its
change. All shapes must fit at the end; only a score can show that the meaning fits too.
"""

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from kd.core.errors import ModelError
from kd.models.checkpoints import KNOWN, Tensors, Weights


class Taken(NamedTuple):
    """A file's tensors under a network's names, and a phrase for each change."""

    tensors: Tensors
    steps: tuple[str, ...] = ()


def take(
    weights: Weights, network: nn.Module, model: str, choice: str, heads: Collection[str] = (), bare: bool = False
) -> Taken:
    """Return the tensors of a file for a network; `heads`: names of its classifier, whose classes may differ.

    `bare`: the network has no classifier, and the file's is left out.
    """
    names, fitting, nearest = _ordered(weights, choice), dict[str, Taken](), dict[str, str]()
    own, closest = network.state_dict(), Tensors()
    for name in names:
        ordered = "its tensors are taken by their order, whatever their names" if choice == "by_order" else ""
        given = [("", _in_order(weights, name, own, bare))] if ordered else _stripped(weights.sets[name])
        ways = ((prefix, *way) for prefix, tensors in given for way in _named(tensors, network, model))
        for prefix, whose, tensors in ways:
            tensors = _settled(tensors, own, network, bare)
            off = {n: what for n, what in _differences(own, tensors).items() if n not in heads}
            if not closest or len(off) < len(nearest):
                nearest, closest = off, tensors
            if not off:
                left_out = f"the prefix '{prefix}' is left out" if prefix else ""
                steps = (ordered or whose, left_out, _grid(weights, name, tensors))
                fitting[name] = Taken(tensors, tuple(filter(None, steps)))
                break
    if not fitting:
        raise _refused(weights, names[0], model, own, closest, nearest)
    name, found = next(iter(fitting.items()))
    others = ", ".join(repr(other) for other in fitting if other != name)
    kind = " (averaged, or a teacher beside its student)" if name.endswith("teacher") else " (averaged)"
    chosen = f"the set '{name}'{kind * is_averaged(name)}" if len(weights.sets) > 1 else ""
    chosen += f"; {others} would fit too ({weights.key}: raw, or a name)" if others else ""
    return Taken(found.tensors, tuple(filter(None, (chosen, *found.steps, weights.says))))


def is_averaged(name: str) -> bool:
    """Return whether a set's name shows averaged weights (EMA)."""
    return not {*KNOWN["averaged"]}.isdisjoint(re.split(r"[._]", name.lower()))


def _ordered(weights: Weights, choice: str) -> list[str]:
    """Return the sets that a choice allows, averaged ones first, because trainers evaluate these."""
    names = sorted(weights.sets, key=lambda name: (not is_averaged(name), name.count(".")))
    if choice in ("by_name", "by_order"):
        return names
    chosen = [name for name in names if name == choice or (choice == "raw" and not is_averaged(name))]
    if not chosen:
        allowed = ", ".join(["by_name, by_order, raw", *filter(None, names)])
        wrong = f"is '{choice}', and '{weights.file}' has no such set of tensors"
        raise ModelError(weights.key, wrong, f"One of {allowed}", "Choose one")
    return chosen


def _stripped(tensors: Tensors, before: str = "") -> Iterator[tuple[str, Tensors]]:
    """Yield the tensors unchanged, then with each name prefix removed, with and without tensors that lack it."""
    yield before, tensors
    firsts = dict.fromkeys(name.partition(".")[0] for name in tensors if "." in name)
    for first in (first for first in firsts if first in KNOWN["prefixes"]):
        inside = {name.removeprefix(f"{first}."): one for name, one in tensors.items() if name.startswith(f"{first}.")}
        rest = {name: one for name, one in tensors.items() if not name.startswith(f"{first}.")}
        if rest and inside.keys().isdisjoint(rest):
            yield f"{before}{first}.", inside | rest
        yield from _stripped(inside, f"{before}{first}.")


def family_filter(model: str) -> tuple[Callable[..., Tensors], dict[str, Any], str] | None:
    """Return timm's filter for public checkpoints of a network's family; None if it has no filter."""
    import timm

    if not timm.is_model(model):
        return None
    module = sys.modules[timm.model_entrypoint(model).__module__]
    names = ["checkpoint_filter_fn_encoder"] * model.endswith("_enc") + KNOWN["filters"]
    family = module.__name__.rpartition(".")[2]
    options = next((opts for of, part, opts in KNOWN["filter_options"][1:] if of == family and part in model), {})
    return next(((getattr(module, name), options, family) for name in names if hasattr(module, name)), None)


def _named(tensors: Tensors, network: nn.Module, model: str) -> Iterator[tuple[str, Tensors]]:
    """Yield (author of the names, tensors under timm's names) for each known mapping, then unchanged."""
    files, own = [("", tensors)], network.state_dict()
    for pattern, mark, whose, text in KNOWN["renamed"][1:]:
        if mark in tensors and re.fullmatch(pattern, model):
            rules = text.split()
            renamed = {n: n for n in tensors} if rules else dict(zip(tensors, own, strict=False))
            for old, new in zip(rules[::2], rules[1::2], strict=True):
                renamed = {n: re.sub(old, new, one) for n, one in renamed.items()}
            files.append((f"its names are {whose}", {one: tensors[n] for n, one in renamed.items()}))
    found = family_filter(model)
    for whose, one in files:
        with suppress(Exception), warnings.catch_warnings(), torch.device("cpu"):  # the file may be another family's
            warnings.simplefilter("ignore")
            if found is not None:
                function, options, family = found
                try:
                    changed = function(dict(one), network, **options)
                except TypeError:  # as timm's loader: some filters take only the tensors
                    changed = function(dict(one))
                same = whose or changed.keys() <= one.keys()
                yield whose if same else f"its names are its authors' (timm's filter for {family})", dict(changed)
        yield whose, one


def config_of(network: nn.Module) -> dict[str, Any]:
    """Return timm's pretrained configuration of a network; empty for other networks."""
    return getattr(network, "pretrained_cfg", None) or {}


def _settled(tensors: Tensors, own: Tensors, network: nn.Module, bare: bool) -> Tensors:
    """Adapt tensors whose shapes differ by axes of length 1 or by colours, and drop unused ones."""
    from timm.models import adapt_input_conv  # type: ignore[attr-defined]

    heads, first = (
        (one,) if isinstance(one, str) else tuple(one or ())
        for one in (config_of(network).get("classifier") or "head", config_of(network).get("first_conv"))
    )
    idle = re.compile(KNOWN["ignored"])
    left_out = tuple(f"{head}." for head in heads) if bare else ()
    kept = {n: t for n, t in tensors.items() if n in own or not (idle.search(n) or n.startswith(left_out))}
    kept |= {n: t for n, t in own.items() if n not in kept and idle.search(n)}
    for name, tensor in kept.items():
        needed = own[name].shape if name in own else tensor.shape
        if tensor.shape != needed and [n for n in tensor.shape if n > 1] == [n for n in needed if n > 1]:
            kept[name] = tensor.reshape(needed)
        elif tensor.shape != needed and name.removesuffix(".weight") in first and tensor.ndim == 4:
            with suppress(NotImplementedError, AssertionError):
                kept[name] = adapt_input_conv(needed[1], tensor, tensor.shape[1])
    return kept


def _grid(weights: Weights, name: str, tensors: Tensors) -> str:
    """Describe resampled position embeddings."""
    given = [t for n, t in weights.sets[name].items() if n.endswith(("pos_embed", "pos_embedding"))]
    taken = [t for n, t in tensors.items() if n.endswith("pos_embed")]
    if len(given) != 1 or len(taken) != 1 or given[0].numel() == taken[0].numel():
        return ""
    return f"its position embedding {(*given[0].shape,)} became {(*taken[0].shape,)}"


def _in_order(weights: Weights, name: str, own: Tensors, bare: bool) -> Tensors:
    """Rename tensors to a network's names, by position."""
    if weights.file.suffix == ".safetensors":
        wrong = f"'{weights.file}' is safetensors, which keep no order, but {weights.key} is by_order"
        raise ModelError(weights.where, wrong, "A .pth file", f"Name that, or leave {weights.key} out")
    tensors = weights.sets[name]
    more = [*tensors][len(own) :]  # two may belong to a classifier that the model does not have
    names = [*own] if bare and len(more) <= 2 else [*own, *more]
    return dict(zip(names, tensors.values(), strict=False))


def _differences(own: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that differ between two sets (missing, unexpected, other shape), by kind."""
    off = dict.fromkeys(own.keys() - tensors.keys(), "missing")
    off |= dict.fromkeys(tensors.keys() - own.keys(), "unexpected")
    return off | {n: "other shape" for n in tensors.keys() & own.keys() if tensors[n].shape != own[n].shape}


def _refused(
    weights: Weights, name: str, model: str, own: Tensors, closest: Tensors, off: Mapping[str, str]
) -> ModelError:
    """Return the error for a file that does not fit a network: its origin if known, else the differences."""
    where, kinds = weights.where, ("missing", "unexpected", "other shape")
    lists = {kind: sorted(name for name, what in off.items() if what == kind) for kind in kinds}
    if (error := _known(weights, "changed", lists["unexpected"], model)) is not None:
        return error
    if 2 * len(lists["missing"]) > len(own) and (error := foreign(weights, name, f"'{model}'")) is not None:
        return error
    if lists["missing"] and all(re.search(r"running_(mean|var)$", one) for one in lists["missing"]):
        wrong = f"'{weights.file}' has the parameters of '{model}' without the statistics of its batch norms"
        remedy = "Save model.state_dict(), which has both; named_parameters() leaves them out"
        return ModelError(where, f"{wrong} ({lists['missing'][0]} ...)", "Both of them", remedy)
    lists["other shape"] = [f"{n} {(*closest[n].shape,)} != {(*own[n].shape,)}" for n in lists["other shape"]]
    told = "; ".join(f"{kind}: {', '.join(items[:3])} ({len(items)})" for kind, items in lists.items() if items)
    return ModelError(where, f"the weights are not those of '{model}' ({told})", "", "Correct model or args")


def foreign(weights: Weights, name: str, model: str) -> ModelError | None:
    """Return the error that names a known origin of a set that is not from timm."""
    return _known(weights, "changed", weights.sets[name], model) or _known(
        weights, "foreign", weights.sets[name], model
    )


def _known(weights: Weights, table: str, names: Collection[str], model: str) -> ModelError | None:
    name_of = model.strip("'")
    likely = next((re.sub(p, q, name_of) for p, q in KNOWN["torchvision"].items() if re.fullmatch(p, name_of)), name_of)
    for pattern, what, remedy in KNOWN[table][1:]:
        if any(re.search(pattern, one) for one in names):
            wrong = f"'{weights.file}' holds {what}, and {model} does not take them"
            told = remedy.format(where=weights.where.partition(".")[0], file=weights.file, likely=likely)
            return ModelError(weights.where, wrong, "Weights of that network", told)
    return None
