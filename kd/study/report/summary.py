"""Write a run as Markdown for report.md and terminals: scores, and findings."""

import math
from collections.abc import Mapping

from kd.core.intervals import Samples
from kd.core.scores import DIFFERENCES_NOTE, Column, samples_of, skipped_text
from kd.core.text import format_seconds, markdown_table
from kd.study.learning import LONGER
from kd.study.paying import ENOUGH, Arms, cost_of_step, has_stopped, judge_run
from kd.study.report.record import RunRecord, on_cpu, total
from kd.study.sifting import sifting_table

ALONE = "student, labels only"


def summary_lines(run: RunRecord) -> list[str]:
    """Return the scores of a run with notes as lines of Markdown."""
    lines = []
    if progress := run.unfinished_text:
        lines += [f"**{progress}**", ""]
    if not run.best:
        return [*lines, "Not evaluated yet.", ""]
    scored = run.scored
    if scored is not None:
        lines += [f"On {scored.images:,} {scored.title} images:", ""]
    lines += _score_lines(run)
    lines += _note_lines(run)
    column = run.selection_metric
    best = (
        "Chosen from the evaluations on the validation split by"
        f" {column.with_title(run.best[column.key])}"
    )
    seed = run.keys.get("run.seed", 0)
    lines += [f"{best}; seed {seed}; {format_seconds(run.seconds)} of training.", ""]
    if text := paying_verdict(run):
        lines += [text, "", *curves_table(run)]
    if scored is not None:
        lines += [learning_text(run), ""]
    return lines


def _score_lines(run: RunRecord) -> list[str]:
    """Return the table of models, and the student's differences from the others."""
    teachers = run.scores.of_teachers(run.counted)
    comparison = run.scores.against_teacher(run.counted)
    student = "student, distilled" if comparison else "student"
    models = {**teachers, student: run.counted}
    samples = samples_of(run.scored, teachers, student)
    parameters = run.manifest.get("parameters", {})
    cells = dict.fromkeys(models, _cost_cells(run, 0, 0.0, None))
    if len(teachers) == 1:
        (teacher,) = teachers
        cells[teacher] = _cost_cells(
            run, parameters.get("teacher", 0), 0.0, run.fitting_spent
        )
    size = parameters.get("student", 0)
    cost = total((run.spent, run.at_hand))
    cells[student] = _cost_cells(run, size, run.images_per_second, cost)
    baseline = run.baseline
    if baseline is not None and baseline.best:
        models[ALONE] = baseline.counted
        samples |= samples_of(baseline.scored, (), ALONE)
        speed = baseline.images_per_second
        cells[ALONE] = _cost_cells(run, size, speed, baseline.spent)
    rows = [
        {**row, **cells[name]}
        for name, row in zip(models, run.scores.table(models, samples), strict=True)
    ]
    column = run.scores.deciding(run.counted)
    lines = [markdown_table(rows), "", *_difference_lines(column, samples, student)]
    return [*lines, comparison, ""] if comparison else lines


def _cost_cells(
    run: RunRecord, parameters: int, speed: float, cost: float | None
) -> dict[str, str]:
    return {
        "parameters": f"{parameters / 1e6:.2f} M" if parameters else "-",
        "training images/s": f"{speed:.0f}" if speed else "-",
        f"training, {clock_of(run)}": format_seconds(cost) if cost else "-",
    }


def _difference_lines(
    column: Column, samples: Mapping[str, Mapping[str, Samples]], student: str
) -> list[str]:
    """Compare the student with each other model; [] without intervals."""
    key = column.key
    student_samples = samples.get(student, {})
    lines = [
        f"- {student} against {name}: {column.title}"
        f" {column.difference(student_samples[key], model_samples[key])}"
        for name, model_samples in samples.items()
        if name != student and key in student_samples and key in model_samples
    ]
    return [*lines, "", DIFFERENCES_NOTE, ""] if lines else []


def _note_lines(run: RunRecord) -> list[str]:
    """Return what else is known about the scores, as lines of Markdown."""
    lines = []
    if run.skipped:
        lines += [skipped_text(run.skipped, run.steps), ""]
    baseline = run.baseline
    if baseline is not None and baseline.skipped:
        text = skipped_text(baseline.skipped, baseline.steps)
        lines += [f"Labels only: {text}", ""]
    for config_path, home in run.manifest.get("teacher_home", {}).items():
        lines.append(f"{config_path[0].upper()}{config_path[1:]}: {home['text']}.\n")
    if text := sifting_table(run.epochs, run.train, run.manifest):
        lines.append(text)
    if run.scored is not None:
        lines += [run.scored.note, ""]
    if run.answers is not None and (text := run.answers.without_leaks()):
        lines += [text, ""]
    return lines


def clock_of(run: RunRecord) -> str:
    """Return the unit of costs: CPU time or accelerator time."""
    return "CPU time" if on_cpu(run.manifest) else "device time"


def paying_verdict(run: RunRecord) -> str:
    """Report from which cost on distillation pays, against labels alone.

    Both are scored on the same images. The cost includes the fit of a fitted teacher,
    but only the outputs of an existing one. Labels alone must have had as much or have
    stopped improving: their best is then held level. "": a score has no samples.
    """
    alone = run.baseline
    column = run.selection_metric
    if alone is None or run.scored is None:
        return ""
    points, _, outcome = run.scored.against(alone.samples, column).rpartition(": ")
    if not points:
        return ""
    hard = any(
        value is True for key, value in run.keys.items() if key.endswith(".hard")
    )
    target = " from the teacher's class (hard)" if hard else ""
    text = f"{column.title} {points}{target} against labels alone"
    arms = Arms.of(run)
    if arms is None:
        return (
            f"No verdict, since what each part took is not recorded: {text}, with one"
            " seed."
        )
    unit = clock_of(run)
    training = f"Training in {unit} (wall-clock): {', '.join(costs_of(run, alone))}."
    cost = max(arms.distilled)
    alone_cost = max(arms.alone)
    stopped = has_stopped(arms.alone)
    equal = alone_cost >= ENOUGH * cost
    if not (equal or stopped):
        steps = math.ceil(alone.steps * cost / alone_cost)
        return (
            f"No verdict: {text}, which still learned; they had"
            f" {format_seconds(alone_cost)} of {format_seconds(cost)}."
            f" `run.baseline_steps={steps}` gives a verdict at equal cost. {training}"
        )
    costs = f"{format_seconds(cost)} of {unit} against {format_seconds(alone_cost)}"
    if not equal:
        costs += ", in which they had stopped improving"
    if outcome == "better":
        answer = f"Pays from {format_seconds(arms.pays_from)} of {unit} on"
    else:
        answer = _not_better(run, outcome, stopped)
    return f"{answer}: {text} at the end, for {costs}, with one seed. {training}"


def _not_better(run: RunRecord, outcome: str, alone_stopped: bool) -> str:
    """Report that a student was not better; whether it may become so."""
    answer = judge_run(run).answer
    if answer == "learning":
        return "Not within this run: the student is still learning"
    text = "Does not pay" if outcome == "worse" else "Not shown to pay"
    if answer != "stopped":
        return f"{text} within this run"
    return f"{text}: {'both have' if alone_stopped else 'the student has'} stopped"


def costs_of(run: RunRecord, alone: RunRecord) -> list[str]:
    """Return the costs of both arms by origin, with the wall-clock time of each."""
    texts = []
    for name, cost, seconds in (
        ("the teacher's fit", run.fitting_spent, run.fitting),
        ("outputs at hand", run.at_hand, 0.0),
        ("the student with new outputs", run.spent, run.seconds),
        ("labels alone", alone.spent, alone.seconds),
    ):
        if cost:
            wall_clock = f" ({format_seconds(seconds)})" if seconds else ""
            texts.append(f"{name} {format_seconds(cost)}{wall_clock}")
    return texts


def curves_table(run: RunRecord) -> list[str]:
    """Return the best scores of both arms over their total cost as Markdown.

    The list is empty without recorded costs.
    """
    arms = Arms.of(run)
    if arms is None:
        return []
    column = run.selection_metric
    titles = (f"total {clock_of(run)}", "distilled", "labels alone")
    rows = []
    for cost, *arm_scores in arms.table():
        cells = ["-" if math.isnan(best) else column.text(best) for best in arm_scores]
        rows.append(dict(zip(titles, [format_seconds(cost), *cells], strict=True)))
    teacher = "the outputs of a teacher that was given"
    if run.fitting_spent:
        teacher = "the teacher's fit and outputs"
    return [
        f"Best validation {column.title} so far; {clock_of(run)} with {teacher}:",
        "",
        markdown_table(rows),
        "",
    ]


def learning_text(run: RunRecord) -> str:
    """Report whether a finished run's student still learned, and what more costs."""
    answer, reason = judge_run(run)
    statements = {
        "learning": "The student was still learning",
        "stopped": "The student had stopped learning",
        "unknown": "Whether the student was still learning is not known",
    }
    text = f"{statements[answer]}: {reason}."
    step_cost = cost_of_step(run)
    if answer != "learning" or not step_cost:
        return text
    key = "steps" if run.keys.get("run.steps") else "epochs"
    outputs = "with the stored" if run.keys.get("teacher.cache.views") else "without"
    cost = f"{format_seconds(LONGER * step_cost * run.steps)} of {clock_of(run)}"
    return (
        f"{text} `run.{key}={LONGER}x` takes about {cost}, {outputs} outputs of the"
        " teacher."
    )
