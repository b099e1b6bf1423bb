"""The part of a run's report that shows what its sifter did."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kd.artifacts.run_dir import RunDir
from kd.contracts import Source
from kd.engine.run import Run
from kd.errors import DataError
from kd.report.sifting import describe, describe_images, extremes, sheet

SHEET = "sifting.jpg"


def report(run: Run, source: Source, folder: RunDir) -> str:
    """Return the sifting section of report.md and write the contact sheet; all ranks must call it.

    Empty where nothing was sifted. The images are shown where the sifter knows how often each was visited.
    """
    state = run.sifter.state_dict()
    epochs = folder.metrics("epoch") if run.backend.rank == 0 else []
    if all(row["trained"] > len(source) - run.length.batch_size for row in epochs):
        return ""
    text = describe(epochs, len(source), run.length.batch_size)
    if "visits" in state:
        labels = torch.tensor([source.label(id) for id in range(len(source))])
        text += "\n" + describe_images(state["visits"], state["mean"], labels, source.classes, source.name)
        text += f"\nBoth are pictured in `{write_sheet(folder.path / SHEET, state, source)}`, the former first.\n"
    return text


def write_sheet(path: Path, state: dict[str, Tensor], source: Source) -> Path:
    """Write the contact sheet; pictures that cannot be decoded are left out."""
    groups = []
    for ids in extremes(state["visits"], state["mean"]):
        pictures = []
        for id in ids:
            try:
                pictures.append(source.decode(id))
            except DataError:
                continue
        groups.append(pictures)
    sheet([group for group in groups if group]).save(path, quality=85)
    return path
