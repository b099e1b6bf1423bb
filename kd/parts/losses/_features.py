"""What the losses on features share."""

from __future__ import annotations

from kd.core.errors import ModelError


def require_features(where: str, student: int, teacher: int) -> None:
    """Require that both models have the features that a loss needs.

    Args:
        where: config path of the loss.
        student: width of the student's features; 0: it has none.
        teacher: the same of the teacher.

    Raises:
        ModelError: one of the models has none.
    """
    for model, width in (("student", student), ("teacher", teacher)):
        if width < 1:
            raise ModelError(
                where,
                f"the {model} has no features",
                "Both models must give the features that a loss needs",
                "Choose a model that has them, or a loss on logits, such as kl",
            )
