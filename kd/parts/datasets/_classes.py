"""Number the labels of a storage: order of classes, label sets, unlabelled images."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.core.text import class_order, first_few, nfc
from kd.parts.datasets._columns import Categorical

# limit of numeric labels; a larger one is a date or an article number
MOST_CLASSES = 1_000_000
INTEGER = re.compile("-?[0-9]+")
WHOLE_NUMBER = re.compile(r"(-?[0-9]+)[.,]0*")  # with a decimal point
FRACTION = re.compile(r"-?[0-9]*[.,][0-9]*[1-9][0-9]*")


def as_classes(labels: Categorical, config_path: str) -> Categorical:
    """Return labels as written (1.0 as 1 if all are numbers); refuse measurements."""
    names = [name for name in labels.categories if name]
    patterns = (WHOLE_NUMBER, FRACTION, INTEGER)
    if not all(any(pattern.fullmatch(name) for pattern in patterns) for name in names):
        return labels
    if fractions := [name for name in names if FRACTION.fullmatch(name)]:
        wrong = (
            f"{len(fractions)} labels are numbers with a fraction, such as"
            f" {min(fractions)}: kd classifies"
        )
        remedy = (
            "Choose the column of the classes, or write a name for each range of"
            " numbers, such as low and high"
        )
        raise DataError(
            config_path, wrong, "Names of classes, or whole numbers", remedy
        )
    return labels._replace(
        categories=[WHOLE_NUMBER.sub(r"\1", name) for name in labels.categories]
    )


def name_labels(
    labels: Categorical, names: Sequence[str]
) -> tuple[Categorical, list[str]]:
    """Return each image's class name, "" if it is unlabelled, and all classes in order.

    Integers are positions in `names`, the class names in order; if `names` is empty,
    they are names themselves.
    """
    labels = labels._replace(categories=[nfc(text) for text in labels.categories])
    labels = as_classes(labels, "data.label_key")
    names = [nfc(name) for name in names]
    distinct = {*labels.categories} - {""}
    integers = {
        text: int(text) for text in distinct if re.fullmatch(r"-?[0-9]{1,18}", text)
    }
    name_of: dict[str, str] = {}
    if names:
        for text, value in integers.items():
            if 0 <= value < len(names):
                name_of[text] = names[value]
        order = names
    elif len(integers) == len(distinct):
        name_of = {text: str(value) for text, value in integers.items()}
        largest = max(integers.values(), default=-1)
        if largest >= MOST_CLASSES:
            raise DataError(
                "data.label_key",
                f"an image has the label {largest}",
                f"Numbers below {MOST_CLASSES}: each is a class",
                "Write names, or choose the key that holds the class",
            )
        order = [str(value) for value in range(largest + 1)]
    else:
        order = class_order(distinct)
    named = labels._replace(
        categories=[name_of.get(text, text) for text in labels.categories]
    )
    return named, order


def require_labels(
    column: Categorical, config_path: str, subject: Callable[[int], str]
) -> None:
    """Refuse an image without a label; `subject` names the image of a row."""
    for code, value in enumerate(column.categories):
        if value is None or value == "":
            wrong = f"{subject(_first_row(column, code))} has no label"
            if value is None:
                wrong += " (an empty list would say that it shows no class)"
            raise DataError(
                config_path,
                wrong,
                "A label for each image",
                "Add it, or set data.labels=some",
            )


def _first_row(column: Categorical, code: int) -> int:
    return int(np.flatnonzero(column.codes == code)[0])


def number_classes(
    column: Categorical,
    declared: Sequence[str] | None,
    classes: Sequence[str] | None,
    config_path: str,
    split: str,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class order and the label of each image, int32 [N]; -1: unlabelled.

    `declared`: this split's classes in order; None: those that occur. Training's
    `classes` are used instead; None for the training split itself.
    """
    names = [nfc(name or "") for name in column.categories]
    labelled = {*names} - {""}
    if not labelled:
        raise DataError(
            config_path,
            f"the split '{split}' has no labelled image",
            "data.labels=some",
            "Label some, or set data.labels=none",
        )
    if classes is not None:
        order = tuple(classes)
    elif declared is not None:
        order = tuple(name for name in declared if name)
    else:
        order = tuple(class_order(labelled))
    if len(order) < 2:
        wrong = f"the split '{split}' has only one class, '{first_few(order)}'"
        remedy = "Point it at the folder or table that holds all classes"
        raise DataError(
            config_path, wrong, "A classifier needs at least two classes", remedy
        )
    label_of = {name: label for label, name in enumerate(order)}
    unknown = sorted(labelled - {*order})
    if unknown:
        suffix = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        whose = "listed" if classes is None else "of training"
        wrong = (
            f"the split '{split}' has the class '{unknown[0]}'{suffix}, which is not"
            f" among the {len(order)} classes {whose}"
        )
        remedy = did_you_mean(unknown[0], order) or "Rename or remove it"
        raise DataError(config_path, wrong, f"Allowed: {first_few(order)}", remedy)
    labels = np.array([label_of.get(name, -1) for name in names], np.int32)
    return order, labels[column.codes]


def number_sets(
    column: Categorical,
    declared: Sequence[str] | None,
    classes: Sequence[str] | None,
    config_path: str,
    subject: Callable[[int], str],
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class order and the sets, int8 [N, C] of 0 and 1; -1: unlabelled.

    The values of `column` are sets of class names, or None. See `number_classes`.
    """
    name_sets = [
        names if names is None else {nfc(name) for name in names}
        for names in column.categories
    ]
    if classes is not None:
        order = tuple(classes)
    elif declared is not None:
        order = tuple(declared)
    else:
        order = tuple(
            class_order({name for names in name_sets for name in names or ()})
        )
    position = {name: i for i, name in enumerate(order)}
    sets = np.zeros((len(name_sets), len(order)), np.int8)
    for code, names in enumerate(name_sets):
        if unknown := sorted({*(names or ())} - {*order}):
            wrong = (
                f"{subject(_first_row(column, code))} has the label '{unknown[0]}',"
                " which no training image has"
            )
            remedy = did_you_mean(unknown[0], order) or "Rename it"
            raise DataError(config_path, wrong, f"Allowed: {first_few(order)}", remedy)
        sets[code] = -(names is None)
        sets[code, [position[name] for name in names or ()]] = 1
    return order, sets[column.codes]
