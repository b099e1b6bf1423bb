"""Measured and estimated savings of sifting, from the rows of a run; only warm epochs
are compared.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.text import markdown_table, percent

Row = Mapping[str, Any]
# an epoch is cold if its share of teacher-predicted images exceeds other epochs' by
# this
ASKING = 0.05


def sifting_text(ratio: float, full: float, sifted: float) -> str:
    """Report the saving of a sifted epoch, given its time relative to a full one, and
    the run's cost in full epochs.
    """
    run, text = (
        full + ratio * sifted,
        f"saves {percent(1 - ratio)} of a full epoch's time",
    )
    if ratio > 1:
        return (
            f"a sifted epoch takes {percent(ratio - 1)} longer than a full one. Set"
            " sifter.kind=none"
        )
    return (
        f"a sifted epoch {text}, and the run takes as much as {run:.1f} full ones."
        " Fewer epochs save time too: sifting pays only if this run is better than one"
        f" with sifter.kind=none and run.epochs={max(1, round(run))}"
    )


def sifted(
    epochs: Sequence[Row], train: Sequence[Row], manifest: Mapping[str, Any]
) -> str:
    """Return a table of a sifted run's epochs and the time saved, as Markdown; ""
    without sifting.

    `rows`: of metrics.jsonl, oldest first. Times exclude cold epochs: see `warm`.
    """
    num_images, batch_size = manifest.get("images"), int(manifest.get("batch_size", 0))
    if not num_images or all(
        row["trained"] > num_images - batch_size for row in epochs
    ):
        return ""
    rows, spent, is_warm = [], 0.0, warm(epochs, train)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number, row in enumerate(epochs):
        seconds, spent, full = (
            row["seconds"] - spent,
            row["seconds"],
            row["trained"] > num_images - batch_size,
        )
        times[full] += [seconds] if is_warm[number] else []
        rows.append(
            {
                "epoch": number,
                "considered": f"{num_images}",
                "trained": f"{row['trained']:.0f}",
                "kept": percent(row["trained"] / num_images),
                "effective sample size": (
                    f"{row['effective'] * row['trained'] / row['candidates']:.0f}"
                ),
                "seconds": f"{seconds:.1f}" + ("" if is_warm[number] else " (cold)"),
            }
        )
    text = f"## Sifting\n\n{markdown_table(rows)}\n"
    if not (times[True] and times[False]):
        return (
            f"{text}\nNot measured: no warm epoch was"
            f" {'sifted' if times[True] else 'full'}.\n"
        )
    full, less = (statistics.median(times[kind]) for kind in (True, False))
    count = sum(row["trained"] > num_images - batch_size for row in epochs)
    told = sifting_text(less / full, count, len(epochs) - count)
    return (
        f"{text}\nBy the medians of warm epochs ({less:.1f} against {full:.1f} s)"
        f" {told}.\n"
    )


def work(epochs: Sequence[Row], train: Sequence[Row], images: int) -> dict[str, str]:
    """Return table cells of a sifted run: the share of its images trained on, and the
    CPU seconds of training.
    """
    if not epochs or not train or not images:
        return {"images trained": "-", "training, CPU s": "-"}
    share = sum(row["trained"] for row in epochs) / (len(epochs) * images)
    return {
        "images trained": percent(share),
        "training, CPU s": f"{train[-1]['cpu_seconds']:.0f}",
    }


def warm(epochs: Sequence[Row], train: Sequence[Row]) -> list[bool]:
    """Return which epochs are warm: not the first, and without extra images predicted
    by the teacher.
    """
    shares, done = [], 0
    for row in epochs:
        asked = sum(
            one.get("teacher_images", 0.0)
            for one in train
            if done < one["step"] <= row["step"]
        )
        shares.append(asked / row["trained"])
        done = row["step"]
    return [
        number > 0 and share <= min(shares) + ASKING
        for number, share in enumerate(shares)
    ]
