"""From labels as a storage holds them to numbers: order of classes, label sets, images
without a label.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from kd.core.errors import DataError, did_you_mean
from kd.core.text import class_order, nfc
from kd.parts.datasets._columns import Repeated, first_few

MOST_CLASSES = (
    1_000_000  # limit of numeric labels; a larger one is a date or an article number
)
WHOLE, BROKEN = (
    re.compile(r"(-?[0-9]+)[.,]0*"),
    re.compile(r"-?[0-9]*[.,][0-9]*[1-9][0-9]*"),
)  # numbers with a fraction


def as_classes(raw: Repeated, config_path: str) -> Repeated:
    """Return labels as written (1.0 as 1 if all are numbers); refuse fractions, which
    are measurements.
    """
    numbers = [text for text in raw.texts if text]
    if not all(
        WHOLE.fullmatch(text)
        or BROKEN.fullmatch(text)
        or re.fullmatch("-?[0-9]+", text)
        for text in numbers
    ):
        return raw
    if broken := [text for text in numbers if BROKEN.fullmatch(text)]:
        wrong = (
            f"{len(broken)} labels are numbers with a fraction, such as {min(broken)}:"
            " kd classifies"
        )
        remedy = (
            "Choose the column of the classes, or write a name for each range of"
            " numbers, such as low and high"
        )
        raise DataError(
            config_path, wrong, "Names of classes, or whole numbers", remedy
        )
    return raw._replace(texts=[WHOLE.sub(r"\1", text) for text in raw.texts])


def name_labels(raw: Repeated, names: Sequence[str]) -> tuple[Repeated, list[str]]:
    """Return the class name of each image and all classes in order, from labels as
    written; "": unlabelled.
    """
    # Integers are positions in `names`, the class names in order; if `names` is empty,
    # they are names themselves.
    raw = as_classes(
        raw._replace(texts=[nfc(text) for text in raw.texts]), "data.label_key"
    )
    names, distinct = [nfc(name) for name in names], {*raw.texts} - {""}
    integers = {
        text: int(text) for text in distinct if re.fullmatch(r"-?[0-9]{1,18}", text)
    }
    if names:
        name_of = {
            text: names[value]
            for text, value in integers.items()
            if 0 <= value < len(names)
        }
        order = list(names)
    elif len(integers) == len(distinct):
        name_of = {text: str(value) for text, value in integers.items()}
        most = max(integers.values(), default=-1)
        if most >= MOST_CLASSES:
            wrong, allowed = (
                f"an image has the label {most}",
                f"Numbers below {MOST_CLASSES}: each is a class",
            )
            raise DataError(
                "data.label_key",
                wrong,
                allowed,
                "Write names, or choose the key that holds the class",
            )
        order = [str(value) for value in range(most + 1)]
    else:
        name_of, order = {}, class_order(distinct)
    return raw._replace(texts=[name_of.get(text, text) for text in raw.texts]), order


def require_labels(
    column: Repeated, config_path: str, subject: Callable[[int], str]
) -> None:
    """Refuse an image without a label; `subject` names the image of a row."""
    for place, value in enumerate(column.texts):
        if value is None or value == "":
            row = int(np.flatnonzero(column.of == place)[0])
            empty = (
                " (an empty list would say that it shows no class)"
                if value is None
                else ""
            )
            remedy = "Add it, or set data.labels=some"
            raise DataError(
                config_path,
                f"{subject(row)} has no label{empty}",
                "A label for each image",
                remedy,
            )


def number_classes(
    column: Repeated,
    own: Sequence[str] | None,
    classes: Sequence[str] | None,
    config_path: str,
    split: str,
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class order and the label of each image, int32 [N]; -1: unlabelled.

    `own`: this split's classes in order; None: those that occur. Training's `classes`
    are used instead; None for the training split itself.
    """
    column = column._replace(texts=[nfc(name or "") for name in column.texts])
    labelled = {*column.texts} - {""}
    if not labelled:
        remedy = "Label some, or set data.labels=none"
        raise DataError(
            config_path,
            f"the split '{split}' has no labelled image",
            "data.labels=some",
            remedy,
        )
    own = class_order(labelled) if own is None else [name for name in own if name]
    order = tuple(own if classes is None else classes)
    if len(order) < 2:
        wrong = f"the split '{split}' has only one class, '{next(iter(order), '')}'"
        remedy = "Point it at the folder or table that holds all classes"
        raise DataError(
            config_path, wrong, "A classifier needs at least two classes", remedy
        )
    position = {name: i for i, name in enumerate(order)}
    unknown = sorted(labelled - set(position))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        whose = "listed" if classes is None else "of training"
        wrong = (
            f"the split '{split}' has the class '{unknown[0]}'{more}, which is not"
            f" among the {len(order)} classes "
        )
        remedy = did_you_mean(unknown[0], order) or "Rename or remove it"
        raise DataError(
            config_path, wrong + whose, f"Allowed: {first_few(order)}", remedy
        )
    return (
        order,
        np.array([position.get(name, -1) for name in column.texts], np.int32)[
            column.of
        ],
    )


def number_sets(
    column: Repeated,
    own: Sequence[str] | None,
    classes: Sequence[str] | None,
    config_path: str,
    subject: Callable[[int], str],
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class order and the sets, int8 [N, C] of 0 and 1; -1: an image without
    a label.

    The values of `column` are sets of class names, or None. See `number_classes`.
    """
    texts = [
        names if names is None else {nfc(name) for name in names}
        for names in column.texts
    ]
    column = column._replace(texts=texts)
    own = (
        class_order({name for names in texts for name in names or ()})
        if own is None
        else own
    )
    order = tuple(own if classes is None else classes)
    position = {name: i for i, name in enumerate(order)}
    sets = np.zeros((len(column.texts), len(order)), np.int8)
    for place, names in enumerate(column.texts):
        if unknown := sorted({*(names or ())} - {*position}):
            row = int(np.flatnonzero(column.of == place)[0])
            wrong = (
                f"{subject(row)} has the label '{unknown[0]}', which no training"
                " image has"
            )
            remedy = did_you_mean(unknown[0], order) or "Rename it"
            raise DataError(config_path, wrong, f"Allowed: {first_few(order)}", remedy)
        sets[place] = -(names is None)
        sets[place, [position[name] for name in names or ()]] = 1
    return order, sets[column.of]
