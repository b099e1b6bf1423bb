"""Report what sifting saves, from the rows of a run; only warm epochs are compared."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kd.core.text import markdown_table, percent

Row = Mapping[str, Any]
# an epoch is cold if its share of teacher-predicted images exceeds others' by this
COLD_SHARE = 0.05


def sifting_text(ratio: float, full: float, sifted: float) -> str:
    """Report the saving of a sifted epoch, and the run's cost in full epochs.

    `ratio`: its time relative to a full one; `full`, `sifted`: numbers of epochs.
    """
    if ratio > 1:
        return (
            f"a sifted epoch takes {percent(ratio - 1)} longer than a full one. Set"
            " sifter.kind=none"
        )
    cost = full + ratio * sifted
    return (
        f"a sifted epoch saves {percent(1 - ratio)} of a full epoch's time, and the run"
        f" takes as much as {cost:.1f} full ones. Fewer epochs save time too: sifting"
        " pays only if this run is better than one with sifter.kind=none and"
        f" run.epochs={max(1, round(cost))}"
    )


def sifting_table(
    epochs: Sequence[Row], train: Sequence[Row], manifest: Mapping[str, Any]
) -> str:
    """Return a table of a sifted run's epochs and the time saved, as Markdown.

    It is "" without sifting. The rows are those of metrics.jsonl, oldest first. Times
    exclude cold epochs: see `warm_epochs`.
    """
    num_images = manifest.get("images")
    if not num_images:
        return ""
    full_epoch = num_images - int(manifest.get("batch_size", 0))
    num_full = sum(row["trained"] > full_epoch for row in epochs)
    if num_full == len(epochs):
        return ""
    rows = []
    full_seconds = []
    sifted_seconds = []
    start = 0.0
    for number, (row, is_warm) in enumerate(
        zip(epochs, warm_epochs(epochs, train), strict=True)
    ):
        seconds = row["seconds"] - start
        start = row["seconds"]
        if is_warm and row["trained"] > full_epoch:
            full_seconds.append(seconds)
        elif is_warm:
            sifted_seconds.append(seconds)
        effective = row["effective"] * row["trained"] / row["candidates"]
        rows.append(
            {
                "epoch": number,
                "considered": f"{num_images}",
                "trained": f"{row['trained']:.0f}",
                "kept": percent(row["trained"] / num_images),
                "effective sample size": f"{effective:.0f}",
                "seconds": f"{seconds:.1f}" + ("" if is_warm else " (cold)"),
            }
        )
    text = f"## Sifting\n\n{markdown_table(rows)}\n"
    if not (full_seconds and sifted_seconds):
        missing = "sifted" if full_seconds else "full"
        return f"{text}\nNot measured: no warm epoch was {missing}.\n"
    full = statistics.median(full_seconds)
    sifted = statistics.median(sifted_seconds)
    saving = sifting_text(sifted / full, num_full, len(epochs) - num_full)
    return (
        f"{text}\nBy the medians of warm epochs ({sifted:.1f} against {full:.1f} s)"
        f" {saving}.\n"
    )


def work_cells(
    epochs: Sequence[Row], train: Sequence[Row], images: int
) -> dict[str, str]:
    """Return table cells of a sifted run: images trained on, and CPU seconds."""
    if not epochs or not train or not images:
        return {"images trained": "-", "training, CPU s": "-"}
    share = sum(row["trained"] for row in epochs) / (len(epochs) * images)
    return {
        "images trained": percent(share),
        "training, CPU s": f"{train[-1]['cpu_seconds']:.0f}",
    }


def warm_epochs(epochs: Sequence[Row], train: Sequence[Row]) -> list[bool]:
    """Return which epochs are warm.

    Those are not the first one, nor those in which the teacher predicted extra images.
    """
    shares = []
    start = 0
    for epoch in epochs:
        predicted = sum(
            row.get("teacher_images", 0.0)
            for row in train
            if start < row["step"] <= epoch["step"]
        )
        shares.append(predicted / epoch["trained"])
        start = epoch["step"]
    return [
        number > 0 and share <= min(shares) + COLD_SHARE
        for number, share in enumerate(shares)
    ]
