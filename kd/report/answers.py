"""The section on answers: accuracy by class, confusion, photographs on which student and teacher differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kd.report.record import Answers, RunRecord
from kd.report.sections import card, section, table
from kd.report.svg import esc, legend
from kd.text import percent

MOST_CLASSES = 24
"""Classes of a confusion matrix; of more, the most frequent confusions are listed."""


def answers(runs: Sequence[RunRecord]) -> str:
    """Show what the student confuses, what it loses against the teacher, and the photographs on which they differ."""
    sections = []
    for run in runs:
        if run.answers is None or not run.answers.label:
            continue
        one, who = run.answers, f" of {run.name}" if len(runs) > 1 else ""
        part = f" ({len(one.label)} of {one.of} images)" if len(one.label) < one.of else ""
        cards = [card(f"Accuracy by class{part}", _dumbbells(one)), card("Confusion", _confusion(one))]
        sections.append(
            section(f"Answers{who}", "", f'<div class="grid two">{"".join(cards)}</div>', _photographs(one))
        )
    return "".join(sections)


def _dumbbells(one: Answers) -> str:
    """Draw each class's accuracy: the student's, and the teacher's where there is one; largest loss first."""
    student = one.accuracy(one.student)
    teacher = one.accuracy(one.teacher) if one.teacher else student
    classes = [i for i, value in enumerate(student) if not math.isnan(value)]
    order = sorted(classes, key=lambda i: (student[i] - teacher[i], student[i]))
    rows = []
    for i in order if len(order) <= MOST_CLASSES else [*order[: MOST_CLASSES - 6], *order[-6:]]:
        low, high = sorted((student[i], teacher[i]))
        dots = _dot("student", student[i], "background:var(--c1)")
        if one.teacher:
            dots = _dot("teacher", teacher[i], "background:var(--card);border:3px solid var(--teacher)") + dots
        gap = f"{100 * (student[i] - teacher[i]):+.0f} points" if one.teacher else percent(student[i])
        rail = f'<u style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></u>{dots}'
        rows.append(
            f'<div class="dumb"><span class="name">{esc(one.classes[i])}</span><span class="rail">{rail}</span>'
            f'<span class="gap">{gap}</span></div>'
        )
    ends = '<span class="ends"><span>0 %</span><span>100 %</span></span>'
    rows.append(f'<div class="dumb"><span></span>{ends}<span></span></div>')
    entries = [("student", "--c1"), ("teacher", "--teacher")] if one.teacher else [("student", "--c1")]
    return "".join(rows) + legend(entries)


def _dot(who: str, share: float, style: str) -> str:
    return f'<i style="left:{100 * share:.1f}%;{style}" title="{who} {percent(share)}"></i>'


def _confusion(one: Answers) -> str:
    counts = one.confusion()
    if len(one.classes) > MOST_CLASSES:
        pairs = [
            (counts[i][j], i, j) for i in range(len(counts)) for j in range(len(counts)) if i != j and counts[i][j]
        ]
        rows = [
            {"label": one.classes[i], "student's answer": one.classes[j], "images": count}
            for count, i, j in sorted(pairs, reverse=True)[:20]
        ]
        return table(rows, ("label", "student's answer"))
    heads = "".join(f'<th class="top">{esc(name)}</th>' for name in one.classes)
    lines = []
    for i, row in enumerate(counts):
        total = sum(row) or 1
        cells = "".join(_cell(count, total, i == j) for j, count in enumerate(row))
        lines.append(f'<tr><th scope="row">{esc(one.classes[i])}</th>{cells}</tr>')
    hint = '<p class="hint" style="margin:10px 0 0">Row: label. Column: the student\'s answer. Number of images.</p>'
    return f'<table class="confusion"><tr><th></th>{heads}</tr>{"".join(lines)}</table>{hint}'


def _cell(count: int, total: int, right: bool) -> str:
    share = count / total
    tint = "--good" if right else "--bad"
    mix = f"background:color-mix(in oklab, var({tint}) {round(8 + 72 * share) if count else 0}%, transparent)"
    strong = ";color:var(--paper)" if share > 0.6 else ""
    return f'<td style="{mix}{strong}">{count or ""}</td>'


def _photographs(one: Answers) -> str:
    if not one.pictures:
        return ""
    figures = []
    for picture in one.pictures:
        captions = []
        for who, answer, share in (
            ("teacher", picture.teacher, picture.teacher_share),
            ("student", picture.student, picture.student_share),
        ):
            kind = "right" if answer == picture.truth else "wrong"
            captions.append(f'{who}: <span class="{kind}">{esc(answer)}</span> {100 * share:.0f} %')
        figures.append(
            f'<figure><img alt="{esc(picture.name)}" title="{esc(picture.name)}" src="{picture.data}">'
            f"<figcaption><b>{esc(picture.truth)}</b><br>{'<br>'.join(captions)}</figcaption></figure>"
        )
    title = "Photographs on which teacher and student differ, the surest teacher first"
    return card(title, f'<div class="photos">{"".join(figures)}</div>')
