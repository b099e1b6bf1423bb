"""Shared by the losses on features."""

from kd.core.errors import ModelError


def require_features(config_path: str, student: int, teacher: int) -> None:
    """Refuse a model without features, given the widths of both models' features.

    Raises:
        ModelError: a width is 0.
    """
    for model, width in (("student", student), ("teacher", teacher)):
        if width < 1:
            allowed = "Both models must give the features that a loss needs"
            remedy = "Choose a model that has them, or a loss on logits, such as kl"
            raise ModelError(
                config_path, f"the {model} has no features", allowed, remedy
            )
