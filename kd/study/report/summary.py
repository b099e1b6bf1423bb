"""A run as Markdown for report.md and terminals: a table of scores, and findings."""

import math
from collections.abc import Mapping

from kd.core.intervals import Samples
from kd.core.scores import DIFFERENCES_NOTE, Scores, samples_of, skipped_text
from kd.core.text import format_seconds, markdown_table
from kd.study.learning import LONGER
from kd.study.paying import ENOUGH, Arms, cost_of_step, has_stopped, learned
from kd.study.report.record import RunRecord, on_cpu, total
from kd.study.sifting import sifted

ALONE = "student, labels only"


def described(run: RunRecord) -> list[str]:
    """Return the scores of a run with notes as lines of Markdown."""
    stands = [f"**{line}**", ""] if (line := run.unfinished_text) else []
    if not run.best:
        return [*stands, "Not evaluated yet.", ""]
    scores, scored, row, baseline = run.scores, run.scored, run.counted, run.baseline
    teachers, comparison = scores.of_teachers(row), scores.against_teacher(row)
    student = "student, distilled" if comparison else "student"
    models, samples = {**teachers, student: row}, samples_of(scored, teachers, student)
    size = run.manifest.get("parameters", {})
    one, own = len(teachers) == 1, total((run.spent, run.at_hand))
    sizes = [
        (size.get("teacher", 0) if one else 0, 0.0, run.fitting_spent if one else None)
    ] * len(teachers)
    sizes.append((size.get("student", 0), run.images_per_second, own))
    if baseline is not None and baseline.best:
        models[ALONE] = baseline.counted
        samples |= samples_of(baseline.scored, (), ALONE)
        sizes.append(
            (size.get("student", 0), baseline.images_per_second, baseline.spent)
        )
    rows = [
        {
            **cells,
            "parameters": f"{parameters / 1e6:.2f} M" if parameters else "-",
            "training images/s": f"{speed:.0f}" if speed else "-",
            f"training, {clock_of(run)}": format_seconds(spent) if spent else "-",
        }
        for cells, (parameters, speed, spent) in zip(
            scores.table(models, samples), sizes, strict=True
        )
    ]
    on = (
        [f"On {scored.images:,} {scored.title} images:", ""]
        if scored is not None
        else []
    )
    lines = [
        *stands,
        *on,
        markdown_table(rows),
        "",
        *differences(scores, row, samples, student),
    ]
    lines += [comparison, ""] if comparison else []
    for of, one in (("", run), ("Labels only: ", baseline)):
        lines += (
            [of + skipped_text(one.skipped, one.steps), ""]
            if one is not None and one.skipped
            else []
        )
    lines += [
        f"{config_path[0].upper()}{config_path[1:]}: {one['text']}.\n"
        for config_path, one in run.manifest.get("teacher_home", {}).items()
    ]
    lines += [text] if (text := sifted(run.epochs, run.train, run.manifest)) else []
    lines += [scored.note, ""] if scored is not None else []
    lines += (
        [leaks, ""]
        if run.answers is not None and (leaks := run.answers.without_leaks())
        else []
    )
    column, seed = run.selection_metric, run.keys.get("run.seed", 0)
    best = (
        "Chosen from the evaluations on the validation split by"
        f" {column.with_title(run.best[column.key])}; seed {seed}"
    )
    lines += [f"{best}; {format_seconds(run.seconds)} of training.", ""]
    if text := verdict(run):
        lines += [text, "", *curves_table(run)]
    return lines + ([learning_text(run), ""] if scored is not None else [])


def differences(
    scores: Scores,
    row: Mapping[str, float],
    samples: Mapping[str, Mapping[str, Samples]],
    student: str,
) -> list[str]:
    """Compare the student with each other model by the selection metric; nothing
    without intervals.
    """
    column, own = scores.deciding(row), samples.get(student, {})
    lines = [
        f"- {student} against {name}: {column.title}"
        f" {column.difference(own[column.key], other[column.key])}"
        for name, other in samples.items()
        if name != student and column.key in own and column.key in other
    ]
    return [*lines, "", DIFFERENCES_NOTE, ""] if lines else []


def clock_of(run: RunRecord) -> str:
    """Return the unit of costs: CPU time or accelerator time."""
    return "CPU time" if on_cpu(run.manifest) else "device time"


def verdict(run: RunRecord) -> str:
    """Report from which cost on distillation pays, against labels alone on the same
    images.

    The cost includes the fit of a fitted teacher, but only the outputs of an existing
    one. Labels alone must have had as much or have stopped improving: their best is
    then held level. "": a score has no samples.
    """
    alone, column = run.baseline, run.selection_metric
    if alone is None or run.scored is None:
        return ""
    points, _, found = run.scored.against(alone.samples, column).rpartition(": ")
    if not points:
        return ""
    hard = any(
        value is True for key, value in run.keys.items() if key.endswith(".hard")
    )
    taught = " from the teacher's class (hard)" if hard else ""
    text = f"{column.title} {points}{taught} against labels alone"
    clocked, arms = clock_of(run), Arms.of(run)
    if arms is None:
        return (
            f"No verdict, since what each part took is not recorded: {text}, with one"
            " seed."
        )
    cost, had = max(arms.distilled), max(arms.alone)
    training = f"Training in {clocked} (wall-clock): {', '.join(costs_of(run, alone))}."
    ended, equal = has_stopped(arms.alone), had >= ENOUGH * cost
    if not (equal or ended):
        more = (
            f"`run.baseline_steps={math.ceil(alone.steps * cost / had)}` gives a"
            " verdict at equal cost"
        )
        return (
            f"No verdict: {text}, which still learned; they had {format_seconds(had)} of"
            f" {format_seconds(cost)}. {more}. {training}"
        )
    answer, paid = (
        learned(run).answer,
        ("Does not pay" if found == "worse" else "Not shown to pay"),
    )
    if found == "better":
        paid = f"Pays from {format_seconds(arms.pays_from)} of {clocked} on"
    elif answer == "learning":
        paid = "Not within this run: the student is still learning"
    else:
        stopped = f": {'both have' if ended else 'the student has'} stopped"
        paid += stopped if answer == "stopped" else " within this run"
    costs = f"{format_seconds(cost)} of {clocked} against {format_seconds(had)}"
    costs += "" if equal else ", in which they had stopped improving"
    return f"{paid}: {text} at the end, for {costs}, with one seed. {training}"


def costs_of(run: RunRecord, alone: RunRecord) -> list[str]:
    """Return the cost of each part of both arms, and its wall-clock time where one
    passed.
    """
    parts = (
        ("the teacher's fit", run.fitting_spent, run.fitting),
        ("outputs at hand", run.at_hand, 0.0),
        ("the student with new outputs", run.spent, run.seconds),
        ("labels alone", alone.spent, alone.seconds),
    )
    return [
        f"{name} {format_seconds(cost)}"
        + (f" ({format_seconds(wall)})" if wall else "")
        for name, cost, wall in parts
        if cost
    ]


def curves_table(run: RunRecord) -> list[str]:
    """Return the best scores of both arms over their total cost as lines of Markdown;
    [] without recorded costs.
    """
    arms, column = Arms.of(run), run.selection_metric
    if arms is None:
        return []

    def cell(score: float) -> str:
        return "-" if math.isnan(score) else column.text(score)

    rows = [
        {
            f"total {clock_of(run)}": format_seconds(cost),
            "distilled": cell(distilled),
            "labels alone": cell(alone),
        }
        for cost, distilled, alone in arms.table()
    ]
    teacher = (
        "the teacher's fit and outputs"
        if run.fitting_spent
        else "the outputs of a teacher that was given"
    )
    return [
        f"Best validation {column.title} so far; {clock_of(run)} with {teacher}:",
        "",
        markdown_table(rows),
        "",
    ]


def learning_text(run: RunRecord) -> str:
    """Report whether the student of a finished run had stopped learning, and what a
    longer run takes.
    """
    known, each = learned(run), cost_of_step(run)
    forms = {
        "learning": "The student was still learning",
        "stopped": "The student had stopped learning",
    }
    text = (
        forms.get(known.answer, "Whether the student was still learning is not known")
        + f": {known.reason}."
    )
    if known.answer != "learning" or not each:
        return text
    key = "steps" if run.keys.get("run.steps") else "epochs"
    outputs = "with the stored" if run.keys.get("teacher.cache.views") else "without"
    takes = (
        f"takes about {format_seconds(LONGER * each * run.steps)} of {clock_of(run)}"
    )
    return f"{text} `run.{key}={LONGER}x` {takes}, {outputs} outputs of the teacher."
