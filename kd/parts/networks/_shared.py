"""Shared by the networks: class names, normalization, finding functions and files,
checking a first output.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from kd.core.errors import ModelError
from kd.core.keys import Keys, file_key, keys
from kd.core.text import nfc
from kd.models.classifier import Pick
from kd.models.load_classifier import check_classes
from kd.models.spec import Spec
from kd.parts.registry import named_module


@keys
class Options(Keys):
    """Options that a module or graph does not contain."""

    mean: tuple[float, ...] = ()
    """Mean per channel, for pixels in 0..1; [0, 0, 0] if the model normalizes its input
    itself. Not for a uint8 graph.
    """
    std: tuple[float, ...] = ()
    """Standard deviation per channel, likewise; [1, 1, 1] if the model normalizes its
    input itself.
    """
    input_size: NonNegativeInt = 0
    """Input side of a module, or of a graph with free size, pixels. 0:
    `data.image_size`.
    """
    outputs: Literal["logits", "probabilities"] = "logits"
    """Kind of the model's outputs."""
    classes: str = file_key("")
    """Text file of its class names, one per line, in the order of the outputs. Empty:
    the data's order is assumed.
    """

    def __post_init__(self) -> None:
        mean, std = self.mean, self.std
        if len(mean) not in (0, 3) or len(std) not in (0, 3) or bool(mean) != bool(std):
            raise ValueError(
                "mean and std are three numbers each, for pixels in 0..1; set both or"
                " neither"
            )
        if not all(0 < one <= 1 for one in std) or not all(
            abs(one) <= 1 for one in mean
        ):
            wrong = f"mean is {list(mean)} and std is {list(std)}, for pixels in 0..1"
            allowed = (
                "each mean is in 0..1 and each std above 0, at most 1; divide those for"
                " 0..255 by 255"
            )
            raise ValueError(f"{wrong}; {allowed}")


def require_normalization(config_path: str, mean: Sequence[float]) -> None:
    """Require `mean` and `std` for a model with float input: another normalization
    gives other outputs.
    """
    if not mean:
        wrong = (
            "is missing: the model takes float pixels, and nothing says how they are"
            " normalized"
        )
        remedy = (
            "Set both; mean=[0, 0, 0] and std=[1, 1, 1] where the model normalizes by"
            " itself"
        )
        raise ModelError(
            f"{config_path}.mean",
            wrong,
            "mean and std, three numbers each, for pixels in 0..1",
            remedy,
        )


def read_names(path: str, config_path: str) -> list[str]:
    try:
        names = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            config_path,
            f"'{path}' cannot be read ({error})",
            "A text file, one class a line",
            "",
        ) from error
    names = [nfc(name.strip()) for name in names]
    while names and not names[-1]:
        names.pop()
    twice = next(
        (name for name, count in Counter(names).items() if not name or count > 1), None
    )
    if twice is not None or not names:
        wrong = (
            f"'{path}' has no class"
            if not names
            else f"'{path}' has the class '{twice}' twice, or an empty line"
        )
        raise ModelError(
            config_path, wrong, "Each class once, one a line", "Correct the file"
        )
    return names


class Binary(nn.Module):
    """Convert a teacher's single logit z (of the second class) to two logits, 0 and z,
    whose softmax is sigmoid(z).
    """

    def forward(self, logit_B1: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(logit_B1), logit_B1], 1)


Named = tuple[tuple[str, ...], nn.Module]


def named(spec: Spec, count: int, own: Sequence[str], file: str) -> Named:
    """Return the class names of a teacher's logits (the data's), and the module that
    selects their logits.
    """
    # `own`: the model's own names, if any. `file`: the option `classes`: new names for
    # all `count` logits, or the names in `own` that stand for the data's classes. For
    # unlabelled data the teacher's names are used.
    config_path = f"{spec.config_path}.classes" if file else f"{spec.config_path}.model"
    if count == 1 and not own and spec.config_path != "student" and spec.softmax:
        names, pick = named(spec, 2, own, file)
        return names, nn.Sequential(Binary(), pick)
    if (
        spec.config_path == "student"
        and spec.classes is not None
        and count != len(spec.classes)
    ):
        wrong = f"has {count} classes, the data has {len(spec.classes)}"
        raise ModelError(
            config_path,
            wrong,
            "Both must be equal: all are trained",
            "Set their number in student.args",
        )
    own = [nfc(name) for name in own]
    names = read_names(file, config_path) if file else own
    if file and _reordered(own, names) and len(own) == len(names):
        wrong = (
            f"'{file}' has the model's own class names in another order:"
            f" {', '.join(own[:6])}"
        )
        raise ModelError(
            config_path,
            wrong,
            "The order of the model",
            "Leave it out: kd reorders the outputs by their names",
        )
    if file and len(names) != count and set(names) <= set(own):
        return _chosen(config_path, names, own, spec.classes)
    if names and len(names) != count:
        wrong = (
            f"names {len(names)} classes, but the model returns {count} numbers per"
            " image"
        )
        unknown = [name for name in names if own and name not in own]
        wrong += f"; '{unknown[0]}' is not one of its own" if unknown else ""
        raise ModelError(
            config_path,
            wrong,
            "One name for each number, or some of the model's own",
            "Correct the names",
        )
    if spec.classes is None:
        return (
            tuple(names) or tuple(f"class_{label}" for label in range(count)),
            nn.Identity(),
        )
    enough = count == len(spec.classes) or (file and count > len(spec.classes))
    if enough and spec.config_path != "student" and _reordered(names, spec.classes):
        return _chosen(config_path, spec.classes, names, spec.classes)
    if count != len(spec.classes):
        wrong = f"has {count} classes, the data has {len(spec.classes)}"
        remedy = (
            "Name the data's classes in a file, one a line in the data's order, as the"
            " teacher's names of them: "
        )
        remedy += (
            f"{spec.config_path}.classes=FILE (without names of its own, all {count}); or use"
            " one fitted on this data"
        )
        raise ModelError(
            config_path,
            wrong,
            "Both must be equal, or the teacher's must be more",
            remedy,
        )
    check_classes(config_path, names or spec.classes, spec.classes)
    return tuple(spec.classes), nn.Identity()


def _reordered(names: Sequence[str], classes: Sequence[str]) -> bool:
    """Return whether the names have all classes, and not exactly in their order."""
    return set(classes) <= set(names) and list(names) != list(classes)


def _chosen(
    config_path: str,
    names: Sequence[str],
    own: Sequence[str],
    classes: Sequence[str] | None,
) -> Named:
    """Return the data's classes, and the module that selects the logits of `names`
    among `own`.
    """
    counts, position = Counter(own), {name: i for i, name in enumerate(own)}
    if twice := [name for name in names if counts[name] > 1]:
        wrong = f"'{twice[0]}' is the name of two of the model's classes"
        raise ModelError(config_path, wrong, "A name that it has once", "")
    if classes is not None and set(names) == set(classes):
        names = classes
    elif classes is not None:
        believed = [
            name if name in classes else own
            for name, own in zip(names, classes, strict=False)
        ]
        check_classes(config_path, [*believed, *names[len(believed) :]], classes)
    return tuple(names if classes is None else classes), Pick(
        [position[name] for name in names]
    )


def columns(pick: nn.Module) -> dict[str, list[int]]:
    """Return the selected logits for an identity; empty if all are used."""
    return {"columns": pick.columns.tolist()} if isinstance(pick, Pick) else {}  # type: ignore[operator]


def require_one_output(spec: Spec, features: Collection[str], kind: str) -> None:
    """Refuse losses that need both logits and features: this teacher returns one of
    them.
    """
    if (spec.logits and features) or set(features) - {"pooled"}:
        needed = " and ".join([*["logits"][: int(spec.logits)], *sorted(features)])
        wrong = f"is {kind}, which has one output, but the losses need {needed}"
        raise ModelError(
            f"{spec.config_path}.kind",
            wrong,
            "Losses on logits, or losses on pooled features",
            "Take others",
        )


def require_logits(spec: Spec, answer_BC: Tensor, meaning: str) -> None:
    config_path = f"{spec.config_path}.model"
    if answer_BC.ndim != 2 or answer_BC.shape[1] < (
        1 if spec.softmax and spec.config_path != "student" else 2
    ):
        shape = "x".join(str(size) for size in answer_BC.shape)
        allowed = (
            "Logits [images, classes], two classes or more; of a teacher also one, of"
            " the second of two classes"
        )
        raise ModelError(config_path, f"returns the shape {shape}", allowed, "")
    if answer_BC.is_meta:  # only its shape is known
        return
    if not answer_BC.isfinite().all():
        raise ModelError(
            config_path,
            "returns NaN or infinity",
            "Finite numbers",
            "Check the weights",
        )
    assert spec.task is not None
    if answer_BC.shape[1] == 1:  # a single logit may have any value
        if meaning == "probabilities" and ((answer_BC < 0) | (answer_BC > 1)).any():
            raise ModelError(
                f"{spec.config_path}.outputs",
                "is probabilities, but some are outside of 0..1",
                "",
                "Set logits",
            )
        return
    if wrong := spec.task.refuse(answer_BC):
        raise ModelError(
            config_path,
            wrong,
            "Outputs of the losses' task",
            "Take another teacher, or losses",
        )
    shares = spec.task.are_probabilities(answer_BC)
    if shares and spec.config_path == "student":
        return  # random logits may lie in 0..1: its examination tries other weights
    if shares != (meaning == "probabilities"):
        wrong = (
            f"is {meaning}, but the outputs are"
            f" {'probabilities' if shares else 'no probabilities'}"
        )
        raise ModelError(
            f"{spec.config_path}.outputs",
            wrong,
            "",
            f"Set it to {'probabilities' if shares else 'logits'}",
        )


def to_logits(spec: Spec, meaning: str) -> Callable[[Tensor], Tensor]:
    """Return the function from a model's outputs ("logits" or "probabilities") to
    float32 logits.
    """
    task = spec.task
    if meaning == "logits" or task is None:
        return torch.Tensor.float

    def change(answer_BC: Tensor) -> Tensor:
        if answer_BC.shape[1] == 1:
            return torch.logit(
                answer_BC.float(), eps=1e-7
            )  # the closest float32 numbers to 0 and 1
        return task.from_probabilities(answer_BC.float())

    return change


def found_function(spec: Spec) -> Any:
    config_path, (module, colon, name) = (
        f"{spec.config_path}.model",
        spec.model.partition(":"),
    )
    if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
        raise ModelError(
            config_path,
            f"is '{spec.model}'",
            "module:function, such as mylab.models:teacher",
        )
    try:
        function = getattr(named_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and not (
            module == error.name or module.startswith(error.name + ".")
        ):
            raise
        wrong = f"the module '{module}' cannot be imported"
        raise ModelError(
            config_path,
            wrong,
            "An importable module",
            "Check the spelling and PYTHONPATH",
        ) from error
    if not callable(function):
        raise ModelError(
            config_path,
            f"the module '{module}' has no function '{name}'",
            "",
            "Check the spelling",
        )
    return function
