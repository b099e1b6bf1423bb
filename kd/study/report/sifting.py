"""Report of a sifted run: epochs, time saved, classes, and the images kept and left out most.

Legend: N images of the training split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from kd.core.contracts import Source
from kd.core.errors import DataError
from kd.core.text import percent, table

SHOWN = 24  # images of each kind on the sheet: two rows of twelve
MARGIN = 6  # pixels between two images


def report(
    epochs: Sequence[Mapping[str, float]],
    state: Mapping[str, Tensor],
    source: Source,
    labels: Callable[[], Tensor],
    batch_size: int,
    file: Path,
) -> str:
    """Return the section of report.md on a sifted run, and write the contact sheet where visits are counted."""
    text = describe(epochs, len(source), batch_size)
    if "visits" not in state:
        return text
    text += "\n" + describe_images(state["visits"], state["mean"], labels(), source.classes, source.name)
    groups = [[], []]
    for pictures, ids in zip(groups, extremes(state["visits"], state["mean"]), strict=True):
        for id in ids:
            with suppress(DataError):  # what cannot be decoded is left out
                pictures.append(source.decode(id).image)
    if not any(groups):
        return text
    sheet([group for group in groups if group]).save(file, quality=85)
    return text + f"\nBoth are pictured in `{file}`, the former first.\n"


def describe(epochs: Sequence[Mapping[str, float]], num_images: int, batch_size: int) -> str:
    """Return a table of the epochs and the time saved, as Markdown.

    The baseline is the run's own epochs that visited all images. Not separated: the time that a cache saves in the
    same epochs. In the rows of `epochs`, oldest first, `seconds` counts from the start of the run.
    """
    rows, spent = [], 0.0
    full, sifted = [], []
    for number, row in enumerate(epochs):
        seconds, spent = row["seconds"] - spent, row["seconds"]
        (full if row["trained"] > num_images - batch_size else sifted).append(seconds)
        rows.append(
            {
                "epoch": number,
                "considered": f"{num_images}",
                "trained": f"{row['trained']:.0f}",
                "kept": percent(row["trained"] / num_images),
                "effective sample size": f"{row['effective'] * row['trained'] / row['candidates']:.0f}",
                "seconds": f"{seconds:.1f}",
            }
        )
    if not rows:
        return ""
    text = f"## Sifting\n\n{table(rows)}\n"
    if full and sifted:
        mean_full, mean_sifted = sum(full) / len(full), sum(sifted) / len(sifted)
        text += (
            f"\nA sifted epoch took {percent(1 - mean_sifted / mean_full)} less time than this run's own full ones "
            f"({mean_sifted:.1f} against {mean_full:.1f} s); the run as much as {spent / mean_full:.1f} full ones. "
            "Fewer epochs save time too: sifting has paid only if this run is better than one with sifter.kind=none "
            f"and run.epochs={max(1, round(spent / mean_full))}.\n"
        )
    return text


def saving_text(epochs: Sequence[Mapping[str, float]], manifest: Mapping[str, Any]) -> str:
    """Return in one sentence how many images a sifter left out; empty if none, or if the manifest lacks the counts."""
    images, batch = manifest.get("images", 0), int(manifest.get("batch_size", 0))
    trained = sum(row["trained"] for row in epochs)
    if not isinstance(images, int) or not images or all(row["trained"] > images - batch for row in epochs):
        return ""
    return (
        f"{trained:,.0f} of {images * len(epochs):,} images were trained: "
        f"{percent(1 - trained / (images * len(epochs)))} were left out. Everything in "
        f"{max(1, round(trained / images))} epochs trains as many: compare with that."
    )


def describe_images(
    visits_N: Tensor, loss_N: Tensor, labels: Tensor, classes: Sequence[str], name: Callable[[int], str]
) -> str:
    """Return kept shares of classes and the images kept and left out most; `labels` [N], or [N, C] sets."""
    share_N = visits_N / visits_N.max().clamp(min=1)
    own_NC = labels > 0 if labels.ndim == 2 else labels[:, None] == torch.arange(len(classes))
    owns = {kind: own_NC[:, number] for number, kind in enumerate(classes) if own_NC[:, number].any()}
    if (unknown_N := (labels.view(len(labels), -1) < 0).all(1)).any():
        owns["without a label"] = unknown_N
    rows = [
        {
            "class": kind,
            "images": int(own.sum()),
            "visits, of the maximum": percent(float(share_N[own].mean())),
            "mean loss": f"{float(loss_N[own].nanmean()):.3f}",
        }
        for kind, own in sorted(owns.items(), key=lambda pair: float(share_N[pair[1]].mean()))
    ]
    always, seldom = extremes(visits_N, loss_N)
    listed = rows if len(rows) <= 2 * 6 else [*rows[:6], *rows[-6:]]
    highest, most = (", ".join(map(name, ids[:8])) for ids in (always, seldom))
    never = f"Never left out, highest loss (often label errors): {highest}."
    return f"{table(listed)}\n\n{never}\nLeft out most: {most}.\n"


def extremes(visits_N: Tensor, loss_N: Tensor) -> tuple[list[int], list[int]]:
    """Return the ids visited most with the highest mean loss, and those visited least with the lowest."""
    hardness = loss_N.nan_to_num(nan=0.0).double()
    spread = (hardness.max() - hardness.min()).clamp(min=1e-12)
    key = visits_N.double() + (hardness - hardness.min()) / spread * 0.5  # by visits, then by loss
    order = key.argsort(descending=True)
    return order[:SHOWN].tolist(), order.flip(0)[:SHOWN].tolist()


def sheet(groups: Sequence[Sequence[Image.Image]], side: int = 64, columns: int = 12) -> Image.Image:
    """Arrange images in rows, one group below the other with a margin between."""
    heights = [-(-len(group) // columns) * side for group in groups]
    canvas = Image.new("RGB", (columns * side, sum(heights) + MARGIN * (len(groups) - 1)), "white")
    top = 0
    for group, height in zip(groups, heights, strict=True):
        for i, image in enumerate(group):
            canvas.paste(image.resize((side, side)), (i % columns * side, top + i // columns * side))
        top += height + MARGIN
    return canvas
