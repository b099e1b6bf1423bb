"""The section on answers: accuracy by class, confusion, photographs on which student and teacher differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kd.core.text import percent
from kd.study.report.pair import pair
from kd.study.report.record import FEWEST, Predictions, RunRecord
from kd.study.report.sections import card, section, table
from kd.study.report.svg import esc, legend

MOST_CLASSES = 24  # classes of a confusion matrix that fits a page; of more, the most frequent confusions are listed
MOST_CONFUSIONS, MOST_LETTERS = 20, 24  # of that list, a screen long; of a class name, half the width of a card


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
            section(
                f"Answers{who}",
                one.without_leaks(),
                f'<div class="grid two">{"".join(cards)}</div>',
                pair(one),
                _photographs(one),
            )
        )
    return "".join(sections)


def _dumbbells(one: Predictions) -> str:
    """Draw each class's accuracy: the student's, and the teacher's where there is one; largest loss first."""
    student = one.accuracy(one.student)
    teacher = one.accuracy(one.teacher) if one.teacher else student
    classes = [i for i, value in enumerate(student) if not math.isnan(value)]
    order = sorted(classes, key=lambda i: (student[i] - teacher[i], student[i]))
    rows, names, hint, images = [], short_names(one.classes), "", one.images()
    if len(order) > MOST_CLASSES:
        worst = MOST_CLASSES - 6
        hint = f"{MOST_CLASSES} of {len(order)} classes are drawn: the {worst} worst ones and the 6 best ones."
        order = [*order[:worst], *order[-6:]]
    for i in order:
        low, high = sorted((student[i], teacher[i]))
        dots = _dot("student", student[i], "background:var(--c1)")
        if one.teacher:
            dots = _dot("teacher", teacher[i], "background:var(--card);border:3px solid var(--teacher)") + dots
        gap = f"{100 * (student[i] - teacher[i]):+.0f} points" if one.teacher else percent(student[i])
        if images[i] < FEWEST:  # of three images a percentage says more than is known
            gap = f"{round(student[i] * images[i])} of {images[i]}"
        rail = f'<u style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></u>{dots}'
        few = " *" if images[i] < FEWEST else ""
        title = esc(f"{one.classes[i]}: {images[i]} images")
        rows.append(
            f'<div class="dumb"><span class="name" title="{title}">{esc(names[i])}{few}</span>'
            f'<span class="rail">{rail}</span><span class="gap">{gap}</span></div>'
        )
    ends = '<span class="ends"><span>0 %</span><span>100 %</span></span>'
    rows.append(f'<div class="dumb"><span></span>{ends}<span></span></div>')
    entries = [("student", "--c1"), ("teacher", "--teacher")] if one.teacher else [("student", "--c1")]
    hints = [hint, *_doubts(one, [names[i] for i in range(len(names)) if not images[i]])]
    return "".join(f'<p class="hint">{esc(line)}</p>' for line in hints if line) + "".join(rows) + legend(entries)


def _doubts(one: Predictions, absent: Sequence[str]) -> list[str]:
    """Say which classes have so few images, or none, that their accuracy says little or nothing."""
    few, total = sum(0 < count < FEWEST for count in one.images()), len(one.label)
    lines = [f"* {few} of {len(one.classes)} classes have fewer than {FEWEST} images: a few answers more or less."]
    shown = ", ".join(absent[:6]) + (", ..." if len(absent) > 6 else "")
    text = (
        f"{len(absent)} of {len(one.classes)} classes have no image among the {total:,} images asked, "
        f"which says nothing of them: {shown}."
    )
    return [*(lines if few else []), *([text] if absent else [])]


def short_names(names: Sequence[str], most: int = MOST_LETTERS) -> list[str]:
    """Shorten names to their shortest unique suffix, in at most so many letters."""
    ends = [[name.split("/", cut)[-1] for cut in range(name.count("/"), -1, -1)] for name in names]
    counts = Counter(end for one in ends for end in one)
    own = [next((end for end in one if counts[end] == 1), one[-1]) for one in ends]
    head, tail = most * 2 // 5, most - most * 2 // 5 - 1
    cut = [end if len(end) <= most else f"{end[:head]}…{end[-tail:]}" for end in own]
    counts = Counter(cut)
    return [
        short if counts[short] == 1 else f"…{end[1 - most :]}" if len(end) > most else end
        for short, end in zip(cut, own, strict=True)
    ]


def _dot(who: str, share: float, style: str) -> str:
    return f'<i style="left:{100 * share:.1f}%;{style}" title="{who} {percent(share)}"></i>'


def _confusion(one: Predictions) -> str:
    counts, names = one.confusion(), short_names(one.classes)
    if len(one.classes) > MOST_CLASSES:
        pairs = [
            (counts[i][j], i, j) for i in range(len(counts)) for j in range(len(counts)) if i != j and counts[i][j]
        ]
        rows = [
            {"label": names[i], "student's answer": names[j], "images": count}
            for count, i, j in sorted(pairs, reverse=True)[:MOST_CONFUSIONS]
        ]
        hint = f'<p class="hint">The {len(rows)} most frequent of {len(pairs)} confusions.</p>' if rows else ""
        return hint + table(rows, ("label", "student's answer"))
    heads, lines = "", []
    for i, row in enumerate(counts):
        full, name = esc(one.classes[i]), esc(names[i])
        heads += f'<th class="top" title="{full}">{name}</th>'
        total = sum(row) or 1
        cells = "".join(_cell(count, total, i == j) for j, count in enumerate(row))
        lines.append(f'<tr><th scope="row" title="{full}">{name}</th>{cells}</tr>')
    hint = '<p class="hint" style="margin:10px 0 0">Row: label. Column: the student\'s answer. Number of images.</p>'
    return f'<table class="confusion"><tr><th></th>{heads}</tr>{"".join(lines)}</table>{hint}'


def _cell(count: int, total: int, right: bool) -> str:
    share = count / total
    tint = "--good" if right else "--bad"
    mix = f"background:color-mix(in oklab, var({tint}) {round(8 + 72 * share) if count else 0}%, transparent)"
    strong = ";color:var(--paper)" if share > 0.6 else ""
    return f'<td style="{mix}{strong}">{count or ""}</td>'


def _photographs(one: Predictions) -> str:
    if not one.pictures:
        return ""
    figures, names = [], dict(zip(one.classes, short_names(one.classes), strict=True))
    for picture in one.pictures:
        captions = []
        for who, answer, share in (
            ("teacher", picture.teacher, picture.teacher_share),
            ("student", picture.student, picture.student_share),
        ):
            kind = "right" if answer == picture.truth else "wrong"
            captions.append(f'{who}: <span class="{kind}">{esc(names[answer])}</span> {100 * share:.0f} %')
        figures.append(
            f'<figure><img alt="{esc(picture.name)}" title="{esc(picture.name)}" src="{picture.data}">'
            f"<figcaption><b>{esc(names[picture.truth])}</b><br>{'<br>'.join(captions)}</figcaption></figure>"
        )
    title = "Photographs on which teacher and student differ, the surest teacher first"
    return card(title, f'<div class="photos">{"".join(figures)}</div>')
