"""What the networks share: class names, normalization, checks of a first output."""

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
        if (len(self.mean), len(self.std)) not in ((0, 0), (3, 3)):
            raise ValueError(
                "mean and std are three numbers each, for pixels in 0..1; set both or"
                " neither"
            )
        is_std_valid = all(0 < deviation <= 1 for deviation in self.std)
        if not is_std_valid or not all(abs(mean) <= 1 for mean in self.mean):
            raise ValueError(
                f"mean is {list(self.mean)} and std is {list(self.std)}, for pixels in"
                " 0..1; each mean is in 0..1 and each std above 0, at most 1; divide"
                " those for 0..255 by 255"
            )


def require_normalization(config_path: str, mean: Sequence[float]) -> None:
    """Require `mean` and `std`, without which a model with float input is another."""
    if not mean:
        wrong = (
            "is missing: the model takes float pixels, and nothing says how they are"
            " normalized"
        )
        allowed = "mean and std, three numbers each, for pixels in 0..1"
        remedy = (
            "Set both; mean=[0, 0, 0] and std=[1, 1, 1] where the model normalizes by"
            " itself"
        )
        raise ModelError(f"{config_path}.mean", wrong, allowed, remedy)


def read_names(path: str, config_path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        wrong = f"'{path}' cannot be read ({error})"
        allowed = "A text file, one class a line"
        raise ModelError(config_path, wrong, allowed, "") from error
    names = [nfc(line.strip()) for line in lines]
    while names and not names[-1]:
        names.pop()
    counts = Counter(names)
    repeated = [name for name in counts if not name or counts[name] > 1]
    if names and not repeated:
        return names
    wrong = f"'{path}' has no class"
    if repeated:
        wrong = f"'{path}' has the class '{repeated[0]}' twice, or an empty line"
    allowed = "Each class once, one a line"
    raise ModelError(config_path, wrong, allowed, "Correct the file")


def refuse_classes(spec: Spec, **options: Any) -> None:
    """Refuse options that set the classes of a student."""
    for key, value in options.items():
        if value and spec.config_path == "student":
            wrong = "is set, but a student has the data's classes"
            raise ModelError(f"{spec.config_path}.{key}", wrong, "", "Leave it out")


class Binary(nn.Module):
    """Converts a single logit z, of the second class, to the two logits 0 and z.

    Their softmax is sigmoid(z).
    """

    def forward(self, logit_B1: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(logit_B1), logit_B1], 1)


Selection = tuple[tuple[str, ...], nn.Module]


def select_classes(
    spec: Spec, count: int, model_names: Sequence[str], file: str
) -> Selection:
    """Return the class names of a model's logits, and the module that selects them.

    The names are the data's; for unlabelled data they are the teacher's.

    Args:
        spec: the model.
        count: number of the model's logits.
        model_names: its own names, if any.
        file: the option `classes`: new names for all logits, or those of `model_names`
            that stand for the data's classes.
    """
    config_path = f"{spec.config_path}.classes" if file else f"{spec.config_path}.model"
    is_student = spec.config_path == "student"
    classes = spec.classes
    if count == 1 and not model_names and not is_student and spec.softmax:
        names, pick = select_classes(spec, 2, model_names, file)
        return names, nn.Sequential(Binary(), pick)
    if is_student and classes is not None and count != len(classes):
        wrong = f"has {count} classes, the data has {len(classes)}"
        allowed = "Both must be equal: all are trained"
        remedy = "Set their number in student.args"
        raise ModelError(config_path, wrong, allowed, remedy)
    model_names = [nfc(name) for name in model_names]
    names = read_names(file, config_path) if file else model_names
    if file and _reordered(model_names, names) and len(model_names) == len(names):
        wrong = (
            f"'{file}' has the model's own class names in another order:"
            f" {', '.join(model_names[:6])}"
        )
        remedy = "Leave it out: kd reorders the outputs by their names"
        raise ModelError(config_path, wrong, "The order of the model", remedy)
    if file and len(names) != count and set(names) <= set(model_names):
        return _selection(config_path, names, model_names, classes)
    if names and len(names) != count:
        wrong = (
            f"names {len(names)} classes, but the model returns {count} numbers per"
            " image"
        )
        unknown = [name for name in names if name not in model_names]
        if model_names and unknown:
            wrong += f"; '{unknown[0]}' is not one of its own"
        allowed = "One name for each number, or some of the model's own"
        raise ModelError(config_path, wrong, allowed, "Correct the names")
    if classes is None:
        numbered = (f"class_{label}" for label in range(count))
        return tuple(names or numbered), nn.Identity()
    is_enough = count == len(classes) or (file and count > len(classes))
    if is_enough and not is_student and _reordered(names, classes):
        return _selection(config_path, classes, names, classes)
    if count != len(classes):
        wrong = f"has {count} classes, the data has {len(classes)}"
        allowed = "Both must be equal, or the teacher's must be more"
        remedy = (
            "Name the data's classes in a file, one a line in the data's order, as the"
            f" teacher's names of them: {spec.config_path}.classes=FILE (without names"
            f" of its own, all {count}); or use one fitted on this data"
        )
        raise ModelError(config_path, wrong, allowed, remedy)
    check_classes(config_path, names or classes, classes)
    return tuple(classes), nn.Identity()


def _reordered(names: Sequence[str], classes: Sequence[str]) -> bool:
    """Return whether the names have all classes, and not exactly in their order."""
    return set(classes) <= set(names) and list(names) != list(classes)


def _selection(
    config_path: str,
    names: Sequence[str],
    model_names: Sequence[str],
    classes: Sequence[str] | None,
) -> Selection:
    """Return the data's classes, and the module that selects the logits of `names`."""
    counts = Counter(model_names)
    repeated = [name for name in names if counts[name] > 1]
    if repeated:
        wrong = f"'{repeated[0]}' is the name of two of the model's classes"
        raise ModelError(config_path, wrong, "A name that it has once", "")
    if classes is None:
        classes = names
    elif set(names) == set(classes):
        names = classes
    else:
        # a name that the data lacks is believed to stand for the class in its place
        believed = [
            name if name in classes else class_name
            for name, class_name in zip(names, classes, strict=False)
        ]
        check_classes(config_path, [*believed, *names[len(believed) :]], classes)
    position = {name: i for i, name in enumerate(model_names)}
    return tuple(classes), Pick([position[name] for name in names])


def columns(pick: nn.Module) -> dict[str, list[int]]:
    """Return the selected logits for an identity; empty if all are used."""
    return {"columns": pick.columns.tolist()} if isinstance(pick, Pick) else {}  # type: ignore[operator]


def needed_outputs(spec: Spec, features: Collection[str]) -> str:
    """Return the outputs that the losses need as text."""
    return " and ".join([*(["logits"] if spec.logits else []), *sorted(features)])


def require_one_output(spec: Spec, features: Collection[str], kind: str) -> None:
    """Refuse losses that need logits and features, of which this teacher has one."""
    if (spec.logits and features) or set(features) - {"pooled"}:
        needed = needed_outputs(spec, features)
        wrong = f"is {kind}, which has one output, but the losses need {needed}"
        allowed = "Losses on logits, or losses on pooled features"
        raise ModelError(f"{spec.config_path}.kind", wrong, allowed, "Take others")


def require_logits(spec: Spec, answer_BC: Tensor, meaning: str) -> None:
    """Require the first outputs [B, C] of a model to be what its options say."""
    config_path = f"{spec.config_path}.model"
    is_student = spec.config_path == "student"
    fewest = 1 if spec.softmax and not is_student else 2
    if answer_BC.ndim != 2 or answer_BC.shape[1] < fewest:
        shape = "x".join(str(size) for size in answer_BC.shape)
        allowed = (
            "Logits [images, classes], two classes or more; of a teacher also one, of"
            " the second of two classes"
        )
        raise ModelError(config_path, f"returns the shape {shape}", allowed, "")
    if answer_BC.is_meta:  # only its shape is known
        return
    if not answer_BC.isfinite().all():
        wrong = "returns NaN or infinity"
        raise ModelError(config_path, wrong, "Finite numbers", "Check the weights")
    assert spec.task is not None
    outputs_path = f"{spec.config_path}.outputs"
    if answer_BC.shape[1] == 1:  # a single logit may have any value
        if meaning == "probabilities" and ((answer_BC < 0) | (answer_BC > 1)).any():
            wrong = "is probabilities, but some are outside of 0..1"
            raise ModelError(outputs_path, wrong, "", "Set logits")
        return
    if wrong := spec.task.refuse(answer_BC):
        allowed = "Outputs of the losses' task"
        remedy = "Take another teacher, or losses"
        raise ModelError(config_path, wrong, allowed, remedy)
    are_probabilities = spec.task.are_probabilities(answer_BC)
    # a student's random logits may lie in 0..1: its examination tries other weights
    if are_probabilities and not is_student and meaning != "probabilities":
        wrong = f"is {meaning}, but the outputs are probabilities"
        raise ModelError(outputs_path, wrong, "", "Set it to probabilities")
    if not are_probabilities and meaning == "probabilities":
        wrong = f"is {meaning}, but the outputs are no probabilities"
        raise ModelError(outputs_path, wrong, "", "Set it to logits")


def to_logits(spec: Spec, meaning: str) -> Callable[[Tensor], Tensor]:
    """Return the function from a model's outputs to float32 logits.

    `meaning`: "logits" or "probabilities".
    """
    task = spec.task
    if meaning == "logits" or task is None:
        return torch.Tensor.float

    def logits_of(answer_BC: Tensor) -> Tensor:
        if answer_BC.shape[1] == 1:
            # the closest float32 numbers to 0 and 1
            return torch.logit(answer_BC.float(), eps=1e-7)
        return task.from_probabilities(answer_BC.float())

    return logits_of


def find_function(spec: Spec) -> Any:
    """Return the function that `model: module:function` names."""
    config_path = f"{spec.config_path}.model"
    module, colon, name = spec.model.partition(":")
    words = [*module.split("."), name]
    if not colon or not all(word.isidentifier() for word in words):
        allowed = "module:function, such as mylab.models:teacher"
        raise ModelError(config_path, f"is '{spec.model}'", allowed)
    try:
        function = getattr(named_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        wrong = f"the module '{module}' cannot be imported"
        remedy = "Check the spelling and PYTHONPATH"
        raise ModelError(config_path, wrong, "An importable module", remedy) from error
    if not callable(function):
        wrong = f"the module '{module}' has no function '{name}'"
        raise ModelError(config_path, wrong, "", "Check the spelling")
    return function
