"""Compare a configuration with the recommended one for `--check`."""

import math

from kd.config.reads import loss_facts
from kd.core import recommended
from kd.setup.auto import accelerated
from kd.setup.build_teacher import Teachers
from kd.setup.data import Data
from kd.setup.measured import (
    EXPECTED,
    Measured,
    Situation,
    comparable,
    comparison_text,
    contrast,
    contrast_text,
)
from kd.setup.recipe import Recipe

ENOUGH = 0.7
"""Share of a recommended number below which `--check` names it. Between the lengths and
the numbers of views of the study lie factors of three and more; what a smaller
difference gives was not measured.
"""


def recommendations(recipe: Recipe, teachers: Teachers, epochs: float) -> list[str]:
    """Return lines on what in a run of `epochs` is below the recommended.

    The last line is what labels alone and distilling reached in comparable runs.
    """
    data = teachers.data
    is_pretrained = recipe.student.init == "pretrained"
    situation = Situation(
        len(data.train),
        0 if recipe.data.labels == "none" else len(data.with_labels().train),
        max(1, len(data.classes)),
        is_pretrained,
        recipe.task.logits,
    )
    table = comparable(situation)
    length = recommended.length(
        len(data.train), accelerated(recipe.backend), is_pretrained
    ).epochs
    lines = [
        *_length_lines(data, epochs, length, table),
        *_view_lines(recipe, epochs, max(epochs, length), table),
        *_fit_lines(recipe, data),
        *_teacher_size_lines(recipe, teachers),
        *_network_lines(recipe, table),
        *_label_weight_lines(recipe, data),
    ]
    if not lines:
        lines = [f"length and views as recommended for {len(data.train):,} images"]
    first, *following = lines
    reached = comparison_text(table) or f"no comparable run was measured; {EXPECTED}"
    return [
        f"recipe    {first}",
        *(f"          {line}" for line in following),
        f"plan      {reached}",
    ]


def _length_lines(
    data: Data, epochs: float, better: int, table: list[Measured]
) -> list[str]:
    if epochs >= ENOUGH * better:
        return []
    evidence = contrast_text(contrast(table, "epochs", epochs, better), "epochs")
    return [
        f"{epochs:.3g} epochs of {len(data.train):,} images, recommended"
        f" run.epochs={better}: {evidence}"
    ]


def _view_lines(
    recipe: Recipe, epochs: float, longer: float, table: list[Measured]
) -> list[str]:
    """Compare the stored views with the recommended number for `longer` epochs."""
    views = recipe.teacher.cache.num_views
    better = recommended.stored_views(longer)
    # a live teacher (0 views) predicts fresh views
    if not views or views >= ENOUGH * recommended.stored_views(epochs):
        return []
    evidence = contrast_text(contrast(table, "views", views, better), "views")
    key = "data.views" if recipe.config.data.views else "teacher.cache.views"
    return [
        f"{views} views in {epochs:.3g} epochs, recommended {key}={better}: {evidence}"
    ]


def _label_weight_lines(recipe: Recipe, data: Data) -> list[str]:
    """Compare the weight of the labels where few images have one."""
    if (
        recipe.data.labels != "some"
        or len(data.with_labels().train) > len(data.train) / 2
    ):
        return []
    losses = recipe.losses
    lines = []
    for i, (term, facts) in enumerate(zip(losses, loss_facts(losses), strict=True)):
        on_labels_alone = facts.labels and not facts.teacher
        if on_labels_alone and term.weight > recommended.MOST_LABEL_WEIGHT:
            lines.append(
                f"losses[{i}].weight is {term.weight:g}, recommended"
                f" {recommended.LABEL_WEIGHT:g}: {recommended.WEIGHED} (ten classes of"
                " Tiny ImageNet, 15 labels each, one seed)"
            )
    return lines


def _fit_lines(recipe: Recipe, data: Data) -> list[str]:
    lines = []
    for config_path, fit in recipe.fits.items():
        if fit.student.init != "pretrained":
            continue
        labelled = len(data.with_labels().train)
        visits = fit.run.steps * fit.data.batch_size or int(fit.run.epochs) * labelled
        better = recommended.fit_visits(labelled)
        if visits < ENOUGH * better:
            steps = math.ceil(better / fit.data.batch_size)
            lines.append(
                f"{visits:,} image visits fit the teacher, recommended"
                f" {config_path}.fit.steps={steps}: {recommended.FITTED}"
            )
    return lines


def _teacher_size_lines(recipe: Recipe, teachers: Teachers) -> list[str]:
    """Compare the input size of a fitted, pretrained teacher."""
    lines = []
    fits = recipe.fits
    for config_path, member in zip(recipe.members, teachers.members, strict=False):
        fit = fits.get(config_path)
        if fit is None or fit.student.init != "pretrained":
            continue
        side = getattr(member, "input_size", 0)
        if 0 < side < recommended.TEACHER_SIDE:
            lines.append(
                f"{config_path} sees images of {side} px, recommended"
                f" {recommended.TEACHER_SIDE}: {recommended.ENLARGED}"
            )
    return lines


def _network_lines(recipe: Recipe, table: list[Measured]) -> list[str]:
    """Compare the student with the most accurate one of the same measured runs."""
    name = recipe.student.model
    for better in sorted({row.student for row in table} - {name}):
        pair = contrast(table, "student", name, better)
        if pair is not None and pair[1].accuracy > pair[0].accuracy:
            return [f"student.model is {name}: {contrast_text(pair, 'student')}"]
    return []
