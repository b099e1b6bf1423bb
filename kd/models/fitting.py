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

is_averaged = re.compile(
    KNOWN["averaged"], re.IGNORECASE
).search  # whether a set's name shows averaged weights (EMA)


class Taken(NamedTuple):
    """Tensors of a file that are or may be one network, and a phrase for each
    change.
    """

    name: str  # of the set in its file
    tensors: Tensors
    steps: tuple[str, ...] = ()


class Lookalike(NamedTuple):
    """What a file holds whose tensors do not fit, as far as their names tell."""

    content: str
    remedy: str

    def refusal(
        self, weights: Weights, model: str, differences: Mapping[str, str]
    ) -> ModelError:
        wrong = (
            f"'{weights.file}' holds {self.content}, which '{model}' does not take"
            f" ({_listed(differences)})"
        )
        return ModelError(
            weights.config_path, wrong, "Weights of that network", self.remedy
        )


class SeveralNetworks(ModelError):
    """More than one network of a file fits."""


def take(
    weights: Weights,
    network: nn.Module,
    model: str,
    choice: str,
    heads: Collection[str] = (),
    bare: bool = False,
) -> Taken:
    """Return the tensors of a file for a network; `heads`: names of its classifier,
    whose classes may differ.

    `bare`: the network has no classifier, and the file's is left out.
    """
    offered = candidates(weights, choice)
    fitting, differences = _fitting(offered, network, model, heads, bare)
    if not fitting:
        unordered = weights.file.suffix == ".safetensors"
        ordered, moved = _fitting(
            [] if unordered else offered, network, model, heads, bare, by_order=True
        )
        differences = moved if moved and choice == "by_order" else differences
        foreign = ordered or 2 * [*differences.values()].count("missing") > len(
            network.state_dict()
        )
        known = origin(
            weights, offered[0].tensors if foreign else {}, differences, model
        )
        if choice == "by_order" and not (known and config_of(network)):
            fitting = ordered
        if not fitting:
            remedy = (
                "Give the name of the network that was trained, and its args"
                + "; safetensors keep no order for by_order" * unordered
            )
            remedy = (
                f"Set {weights.section}.weights=by_order: all shapes fit"
                if ordered
                else remedy
            )
            wrong = f"the weights are not those of '{model}' ({_listed(differences)})"
            raise (
                known.refusal(weights, model, differences)
                if known
                else ModelError(weights.config_path, wrong, "", remedy)
            )
    names = [name for name in fitting if is_averaged(name)] or [*fitting]
    if len(names) > 1:
        wrong = f"'{weights.file}' holds several networks that fit: {names}"
        remedy = f"Set {weights.section}.weights to its name, in a configuration"
        raise SeveralNetworks(weights.config_path, wrong, "One of them", remedy)
    taken = fitting[names[0]]
    others = [name for name in fitting if name not in names]
    chosen = f"the set '{taken.name}'" if taken.name else ""
    chosen += (
        f"; {others} would fit too ({weights.section}.weights: raw, or a name)"
        if others
        else ""
    )
    wrote = (
        first_sentence(f"its trainer wrote: {weights.trainer}")
        if weights.trainer
        else ""
    )
    return taken._replace(steps=tuple(filter(None, (chosen, *taken.steps, wrote))))


def candidates(weights: Weights, choice: str = "by_name") -> list[Taken]:
    """Return what may be one network in a file, as far as a choice allows it."""
    found = [
        part
        for name, tensors in weights.sets.items()
        for part in _parts(Taken(name, tensors))
    ]
    if choice in ("by_name", "by_order"):
        return found
    allowed = [
        taken
        for taken in found
        if taken.name == choice or (choice == "raw" and not is_averaged(taken.name))
    ]
    if not allowed:
        wrong = f"is '{choice}', and '{weights.file}' has no such set of tensors"
        names = dict.fromkeys(
            [
                "by_name",
                "by_order",
                "raw",
                *(taken.name for taken in found if taken.name),
            ]
        )
        raise ModelError(
            f"{weights.section}.weights",
            wrong,
            f"One of {', '.join(names)}",
            "Choose one",
        )
    return allowed


def _parts(whole: Taken) -> Iterator[Taken]:
    """Yield a set, then without wrappers in its names, then without each prefix, with
    and without the other tensors.
    """
    yield whole
    name, tensors, steps = whole
    unwrapped = {
        re.sub(KNOWN["wrappers"], "", key): tensor for key, tensor in tensors.items()
    }
    if unwrapped.keys() != tensors.keys():
        tensors = unwrapped
        yield Taken(name, tensors, steps)
    firsts = dict.fromkeys(
        re.findall(KNOWN["prefixes"], "\n".join(tensors), re.MULTILINE)
    )
    for first in firsts:
        inside = {
            key.removeprefix(first): tensor
            for key, tensor in tensors.items()
            if key.startswith(first)
        }
        rest = {
            key: tensor for key, tensor in tensors.items() if not key.startswith(first)
        }
        shorter = (*steps, f"the prefix '{first}' is left out")
        if rest and inside.keys().isdisjoint(rest):
            yield Taken(name, inside | rest, shorter)
        if rest:
            shorter = (
                *shorter,
                f"and {len(rest)} other tensors, such as '{next(iter(rest))}'",
            )
        yield from _parts(
            Taken(
                f"{name}.{first}".strip(".") if len(firsts) > 1 else name,
                inside,
                shorter,
            )
        )


def _fitting(
    offered: list[Taken],
    network: nn.Module,
    model: str,
    heads: Collection[str],
    bare: bool,
    by_order: bool = False,
) -> tuple[dict[str, Taken], dict[str, str]]:
    """Return the sets that fit, by name, and the differences of the nearest candidate
    that does not.
    """
    own, fitting, nearest = network.state_dict(), dict[str, Taken](), dict[str, str]()
    for name, given, steps in offered:
        ordered = [
            (
                "its tensors are taken by their order, under other names",
                _in_order(given, own, bare),
            )
        ]
        ways = ordered if by_order else _named(given, network, model, heads)
        for whose, tensors in ways if name not in fitting else ():
            tensors = _settled(tensors, own, bare)
            differences = _differences(own, tensors, heads)
            if {*differences.values()} <= {"missing head"}:
                fitting[name] = Taken(
                    name, tensors, (whose, *steps, _resampled(given, tensors))
                )
                break
            if not nearest or len(differences) < len(nearest):
                nearest = differences
    return fitting, nearest


def family_filter(
    model: str,
) -> tuple[Callable[..., Tensors], dict[str, Any], str] | None:
    """Return timm's filter for public checkpoints of a network's family; None if it has
    no filter.
    """
    import timm

    if not timm.is_model(model):
        return None
    module = sys.modules[timm.model_entrypoint(model).__module__]
    names = ["checkpoint_filter_fn_encoder"] * model.endswith("_enc") + KNOWN["filters"]
    family = module.__name__.rpartition(".")[2]
    options = next(
        (
            opts
            for of, part, opts in KNOWN["filter_options"][1:]
            if of == family and part in model
        ),
        {},
    )
    return next(
        (
            (getattr(module, name), options, family)
            for name in names
            if hasattr(module, name)
        ),
        None,
    )


def renamed(rules: str, names: Collection[str]) -> dict[str, str]:
    """Return the new name of each name; `rules`: pairs of a pattern and its
    replacement, applied in order.
    """
    pairs, changed = rules.split(), {name: name for name in names}
    for pattern, replacement in zip(pairs[::2], pairs[1::2], strict=True):
        changed = {
            name: re.sub(pattern, replacement, new) for name, new in changed.items()
        }
    return changed


def _named(
    tensors: Tensors, network: nn.Module, model: str, heads: Collection[str]
) -> Iterator[tuple[str, Tensors]]:
    """Yield (author of the names, tensors under timm's names) for each known mapping,
    then unchanged.
    """
    files, own, head = (
        [("", tensors)],
        network.state_dict(),
        next(iter(heads), "head.weight").removesuffix("weight"),
    )
    for pattern, mark, whose, text in KNOWN["renamed"][1:]:
        if re.fullmatch(pattern, model) and any(
            re.fullmatch(mark, name) for name in tensors
        ):
            names = (
                renamed(text.replace("HEAD.", head), tensors)
                if text
                else dict(zip(tensors, own, strict=False))
            )
            if len({*names.values()}) == len(tensors):
                files.append(
                    (
                        f"its names are {whose}",
                        {new: tensors[name] for name, new in names.items()},
                    )
                )
    found = family_filter(model)
    for whose, one in files:
        with (
            suppress(Exception),
            warnings.catch_warnings(),
            torch.device("cpu"),
        ):  # the file may be another family's
            warnings.simplefilter("ignore")
            if found is not None:
                function, options, family = found
                try:
                    changed = function(dict(one), network, **options)
                except (
                    TypeError
                ):  # as timm's loader: some filters take only the tensors
                    changed = function(dict(one))
                same = whose or changed.keys() <= one.keys()
                yield (
                    (
                        whose
                        if same
                        else f"its names are its authors' (timm's filter for {family})"
                    ),
                    dict(changed),
                )
        yield whose, one


def config_of(network: nn.Module) -> dict[str, Any]:
    """Return timm's pretrained configuration of a network; empty for other networks."""
    return getattr(network, "pretrained_cfg", None) or {}


def _settled(tensors: Tensors, own: Tensors, bare: bool) -> Tensors:
    """Adapt tensors whose shapes differ by axes of length 1 or by colours, and drop
    unused ones.
    """
    from timm.models import adapt_input_conv  # type: ignore[attr-defined]

    idle = re.compile(KNOWN["ignored"])
    left_out = re.compile(KNOWN["classifiers"] if bare else r"\Z").match
    kept = {
        n: t
        for n, t in tensors.items()
        if n in own or not (idle.search(n) or left_out(n))
    }
    kept |= {n: t for n, t in own.items() if n not in kept and idle.search(n)}
    for name, tensor in kept.items():
        needed = own[name].shape if name in own else tensor.shape
        if tensor.shape != needed and [n for n in tensor.shape if n != 1] == [
            n for n in needed if n != 1
        ]:
            kept[name] = tensor.reshape(needed)
        elif (
            len(needed) == tensor.ndim == 4 and tensor.shape[1] == 3 != needed[1]
        ):  # the first layer, of colours
            with suppress(NotImplementedError, AssertionError):
                kept[name] = adapt_input_conv(needed[1], tensor, tensor.shape[1])
    return kept


def _resampled(given: Tensors, tensors: Tensors) -> str:
    """Describe the first tensor that has another size in the network."""
    for name, tensor in tensors.items():
        if (
            name in given
            and tensor.is_floating_point()
            and tensor.numel() != given[name].numel()
        ):
            return f"its {name} {(*given[name].shape,)} became {(*tensor.shape,)}"
    return ""


def _in_order(tensors: Tensors, own: Tensors, bare: bool) -> Tensors:
    """Rename tensors to a network's names, by position."""
    counted = any(
        tensor.ndim == 0 for tensor in tensors.values()
    )  # older files count no batches
    names = [
        name for name in own if counted or not name.endswith("num_batches_tracked")
    ]
    more = [*tensors][
        len(names) + 2 * bare :
    ]  # two may belong to a classifier that the model does not have
    return dict(zip([*names, *more], tensors.values(), strict=False))


def _differences(
    own: Tensors, tensors: Tensors, heads: Collection[str]
) -> dict[str, str]:
    """Return the kind of each difference from a network, except the number of
    classes.
    """
    headless = {*heads}.isdisjoint(tensors)
    kinds = {
        n: "missing head" if headless and n in heads else "missing"
        for n in own
        if n not in tensors
    }
    for name, tensor in tensors.items():
        needed, first = own.get(name), int(name in heads)
        if needed is None:
            kinds[name] = "unexpected"
        elif needed.is_floating_point() and not tensor.is_floating_point():
            kinds[name] = "integers"
        elif tensor.shape[first:] != needed.shape[first:]:
            kinds[f"{name} {(*tensor.shape,)} != {(*needed.shape,)}"] = (
                "other shape" if tensor.numel() else "empty"
            )
    return kinds


def _listed(differences: Mapping[str, str]) -> str:
    """Return the first names of each kind as text."""
    kinds = {
        kind: sorted(n for n, of in differences.items() if of == kind)
        for kind in sorted({*differences.values()})
    }
    return "; ".join(
        f"{kind}: {', '.join(names[:3])} ({len(names)})"
        for kind, names in kinds.items()
    )


def origin(
    weights: Weights, tensors: Tensors, differences: Mapping[str, str], model: str
) -> Lookalike | None:
    """Return the known origin of tensors, or of their differences from a network."""
    lines = sorted(
        f"{kind} {name}"
        for name, kind in {
            **dict.fromkeys(tensors, "unexpected"),
            **differences,
        }.items()
    )
    for pattern, what, remedy, takers in KNOWN["origins"][1:]:
        if re.search(pattern, "\n".join(lines), re.MULTILINE) and not re.fullmatch(
            takers, model
        ):
            likely = next(
                (
                    name
                    for name in _likely(weights, model)
                    if re.fullmatch(takers, name)
                ),
                "NAME",
            )
            return Lookalike(
                what,
                remedy.format(
                    config_path=weights.section, file=weights.file, likely=likely
                ),
            )
    return None


def _likely(weights: Weights, model: str) -> list[str]:
    """Return networks that look like `model`, or like what a file's trainer or name
    says, but have other tensors.
    """
    import timm
    from torchvision import models

    theirs = weights.named_among(models.list_models(models))
    twins = [
        name
        for name in (f"tf_{model}", *weights.named_among(timm.list_models("tf_*")))
        if timm.is_model(name)
    ]
    return [*twins, *(f"torchvision.models:{name}" for name in theirs)]
