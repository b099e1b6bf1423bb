"""A run as Markdown for report.md and terminals: a table of scores, and findings."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kd.core.intervals import Samples
from kd.core.scores import TITLES, Scored, Scores, skipped_text
from kd.core.text import clock, printed, table
from kd.files.manifest import DIGITS, served_first
from kd.setup.open_cache import CHECKED
from kd.study.report.record import RunRecord, on_cpu, total
from kd.study.sifting import sifted

ALONE = "student, labels only"
DIFFERENCES_NOTE = "In brackets: 95 % intervals, of the difference on the same images where two models are compared."


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
    sizes = [(size.get("teacher", 0) if one else 0, 0.0, run.fitting_spent if one else None)] * len(teachers)
    sizes.append((size.get("student", 0), run.images_per_second, own))
    if baseline is not None and baseline.best:
        models[ALONE] = baseline.counted
        samples |= samples_of(baseline.scored, (), ALONE)
        sizes.append((size.get("student", 0), baseline.images_per_second, baseline.spent))
    rows = [
        {
            **cells,
            "parameters": f"{parameters / 1e6:.2f} M" if parameters else "-",
            "training images/s": f"{speed:.0f}" if speed else "-",
            f"training, {clock_of(run)}": clock(spent) if spent else "-",
        }
        for cells, (parameters, speed, spent) in zip(scores.table(models, samples), sizes, strict=True)
    ]
    on = [f"On {scored.images:,} {scored.title} images:", ""] if scored is not None else []
    lines = [*stands, *on, table(rows), "", *differences(scores, row, samples, student)]
    lines += [comparison, ""] if comparison else []
    for of, one in (("", run), ("Labels only: ", baseline)):
        lines += [of + skipped_text(one.skipped, one.steps), ""] if one is not None and one.skipped else []
    lines += [
        f"{where[0].upper()}{where[1:]}: {one['text']}.\n"
        for where, one in run.manifest.get("teacher_home", {}).items()
    ]
    lines += [text] if (text := sifted(run.epochs, run.train, run.manifest)) else []
    lines += [scored.note, ""] if scored is not None else []
    lines += [leaks, ""] if run.answers is not None and (leaks := run.answers.without_leaks()) else []
    column, seed = run.selection_metric, run.keys.get("run.seed", 0)
    best = (
        f"Chosen from the evaluations on the validation split by {column.with_title(run.best[column.key])}; seed {seed}"
    )
    lines += [f"{best}; {clock(run.seconds)} of training.", ""]
    return lines + ([text, ""] if (text := verdict(run)) else [])


def samples_of(scored: Scored | None, teachers: Iterable[str], student: str) -> dict[str, Mapping[str, Samples]]:
    """Return the samples of a run's last scores by model name."""
    if scored is None:
        return {}
    return {**{name: scored.of(name) for name in teachers}, student: scored.samples}


def differences(
    scores: Scores, row: Mapping[str, float], samples: Mapping[str, Mapping[str, Samples]], student: str
) -> list[str]:
    """Compare the student with each other model by the selection metric; nothing without intervals."""
    column, own = scores.deciding(row), samples.get(student, {})
    lines = [
        f"- {student} against {name}: {column.title} {column.difference(own[column.key], other[column.key])}"
        for name, other in samples.items()
        if name != student and column.key in own and column.key in other
    ]
    return [*lines, "", DIFFERENCES_NOTE, ""] if lines else []


ENOUGH = 0.9  # smallest share of the cost that labels alone must have had: CPU times vary by a few percent


def clock_of(run: RunRecord) -> str:
    """Return the unit of costs: CPU time or accelerator time."""
    return "CPU time" if on_cpu(run.manifest) else "device time"


def verdict(run: RunRecord) -> str:
    """Report whether distillation paid, against labels alone on the same images at the same training cost.

    The cost includes the fit of a fitted teacher, but only the outputs of an existing one. If labels alone had less,
    the difference is given without a verdict. "": a score has no samples.
    """
    alone, column = run.baseline, run.selection_metric
    own, other = run.samples.get(column.key), alone.samples.get(column.key) if alone is not None else None
    if alone is None or own is None or other is None:
        return ""
    points, _, found = column.difference(own, other).rpartition(": ")
    hard = any(key.startswith("losses.") and key.endswith(".hard") and value is True for key, value in run.keys.items())
    taught = " from the teacher's class (hard)" if hard else ""
    text = f"{column.title} {points}{taught} against labels alone"
    steps = "at equal steps" if alone.steps == run.steps else f"which made {alone.steps:,} steps"
    cost, had, clocked = run.spent_in_all, alone.spent, clock_of(run)
    if cost is None or not had:
        return f"No verdict, since what each part took is not recorded: {text}, {steps}, with one seed."
    parts = {"the teacher's fit": (run.fitting_spent, run.fitting), "outputs at hand": (run.at_hand, 0.0)}
    parts |= {"the student with new outputs": (run.spent, run.seconds), "labels alone": (had, alone.seconds)}
    shown = [
        f"{name} {clock(spent)}" + (f" ({clock(wall)})" if wall else "")
        for name, (spent, wall) in parts.items()
        if spent
    ]
    training = f"Training in {clocked} (wall-clock): {', '.join(shown)}."
    if had < ENOUGH * cost:
        more = f"`run.baseline_steps={math.ceil(alone.steps * cost / had)}` gives a verdict at equal cost"
        return f"No verdict: {text}, {steps}; they had {clock(had)} of {clock(cost)}. {more}. {training}"
    paid = {"better": "Distillation paid", "worse": "Distillation did not pay"}.get(found, "Not shown to have paid")
    text += f" for the same {clocked} ({clock(cost)} against {clock(had)}), with one seed"
    if column.key in run.equal_steps:
        text += f"; at equal steps {column.difference(own, run.equal_steps[column.key]).rpartition(': ')[0]}"
    return f"{paid}: {text}. {training}"


def chain_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return an export's chain of provenance as a tree, with the comparison at each arrow; [] without a chain."""
    chain, lines = facts.get("chain", {}), list[str]()
    if teacher := chain.get("teacher"):
        answers = chain["answers"]
        for where, one in teacher["members"].items():
            lines += [f"{where}  {one['name']} ({one['source']}), licence {facts['licences'].get(where, 'unknown')}"]
        lines[-1] += f", weights {_short(teacher['weights'])}" + (" of all" if len(lines) > 1 else "")
        if answers:
            lines += [f"  | compared: {CHECKED} stored outputs, computed again whenever a run opened them"]
            lines += [f"outputs  {answers.get('count', 'not counted')} in the cache {_short(answers['cache'])}"]
        else:
            lines += ["  | compared: nothing, since the teacher ran live", "outputs  not stored"]
        lines += [f"  | compared: {_against_teacher(facts) or 'no score against the teacher is recorded'}"]
    if own := chain.get("student"):
        lines += [f"{own['is']}  run {own['run']}, step {own['step']}, weights {_short(own['weights'])}"]
        if own["weights"] != own["exported"]:
            by = facts.get("calibration", {}).get("temperature", 0)
            lines += [
                f"  | compared: its logits, divided by {by:.3g}",
                f"calibrated  weights {_short(own['exported'])}",
            ]
    for name in served_first(facts) if chain else ():
        one = facts["parity"][name]
        same = f"the same prediction on {one['same_top1']} of " if "same_top1" in one else ""
        lines += [f"  | compared: {same}{one['images']} images, largest difference {one['max_difference']:.1e}"]
        lines += [f"graph  {name} {_short(chain['graphs'][name])}"]
    return [printed(line.replace("`", "'")) for line in lines]


def _against_teacher(facts: Mapping[str, Any]) -> str:
    told = facts["scores"]
    if "columns" not in told:  # of kd 0.3
        return facts["chain"]["against_teacher"]
    return Scores.read(told["columns"]).against_teacher(told["pair"], TITLES[told["split"]])


def _short(digest: str) -> str:
    return digest[:DIGITS] or "unknown"
