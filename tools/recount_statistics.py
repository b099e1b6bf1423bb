"""Read a run's files and compute its statistics anew for recount.py, with numpy alone."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Z = 1.959964


def rows_of(folder: Path, kind: str) -> list[Row]:
    """Return the rows of metrics.jsonl of a kind."""
    file = folder / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        if file.is_file()
        else []
    )
    return [row for row in rows if row["kind"] == kind]


def read(file: Path) -> Row:
    """Return a JSON file; empty without it."""
    return json.loads(file.read_text()) if file.is_file() else {}


def parameters(folder: Path, step: int) -> int:
    """Count a student's parameters in a checkpoint, without batch norm's statistics."""
    head = tensors(folder / f"checkpoints/step_{step:08d}/tensors.safetensors")
    statistics = ("running_mean", "running_var", "num_batches_tracked", "mean", "std")
    return sum(
        math.prod(tensor["shape"])
        for name, tensor in head.items()
        if name.startswith("model.student.")
        and not name.rpartition(".")[2].startswith(statistics)
    )


def tensors(file: Path) -> Row:
    """Return the head of a file of safetensors: name, type and shape of each."""
    with file.open("rb") as opened:
        size = struct.unpack("<Q", opened.read(8))[0]
        return json.loads(opened.read(size))


def whole_records(folder: Path) -> int:
    """Count a cache's records of one length by their own lengths and checksums."""

    def record_size(content: bytes, view: int, at: int) -> int:
        """Return the size of the record that begins here; 0: none does."""
        crc, size = struct.unpack_from("<II", content, at)
        body = content[at + 8 : at + 8 + size]
        if at % (8 + size) or len(body) != size:
            return 0
        seed = zlib.crc32(f"{view}:{at // (8 + size)}:{size}".encode())
        return size if zlib.crc32(body, seed) == crc else 0

    count = 0
    for file in folder.glob("view_*"):
        content = file.read_bytes()
        view = int(file.stem.partition("_")[2])
        sizes = (record_size(content, view, at) for at in range(len(content) - 8))
        size = next(filter(None, sizes), 0)
        starts = range(0, len(content) - 8, 8 + size) if size else ()
        count += sum(record_size(content, view, at) == size for at in starts)
    return count


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval: where (p - share)^2 = Z^2 p (1 - p) / n."""
    roots = np.roots([1 + Z * Z / n, -2 * share - Z * Z / n, share * share]).real
    return max(0.0, float(min(roots))), min(1.0, float(max(roots)))


def paired(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Return Bonett and Price's interval of a difference on the same images."""
    difference = mine.astype(float) - theirs
    # an image more that each of the two wins
    padded = np.concatenate([difference, [1.0, -1.0]])
    half = Z * padded.std() / math.sqrt(len(padded))
    return max(-1.0, padded.mean() - half), min(1.0, padded.mean() + half)


def around(value: float, drawn: np.ndarray, images: int) -> tuple[float, float]:
    """Return the bootstrap's interval, wider for few images."""
    half = Z * drawn.std(ddof=1) * (1 + (18 / images if images else 0))
    return 2 * value - drawn.mean() - half, 2 * value - drawn.mean() + half


class Scores:
    """The scores of one model, from what scored.json keeps."""

    def __init__(self, scored: Row, prefix: str = "", suffix: str = "") -> None:
        self.row = scored.get("row", {})
        self.samples = scored.get("samples", {})
        self.prefix = prefix
        self.suffix = suffix

    def key(self, key: str) -> str:
        return f"{self.prefix}{key}{self.suffix}"

    def bits(self, key: str) -> np.ndarray | None:
        sample = self.samples.get(self.key(key), {})
        if "right" not in sample:
            return None
        packed = np.frombuffer(bytes.fromhex(sample["right"]), np.uint8)
        return np.unpackbits(packed)[: sample["images"]].astype(bool)

    def value(self, key: str) -> float | None:
        bits = self.bits(key)
        return self.row.get(self.key(key)) if bits is None else float(bits.mean())

    def interval(self, key: str) -> tuple[float, float] | None:
        bits = self.bits(key)
        if bits is not None:
            return wilson(float(bits.mean()), len(bits))
        sample = self.samples.get(self.key(key))
        if sample is None:
            return None
        replicates = np.array(sample["replicates"])
        return around(sample["value"], replicates, sample["images"])

    def minus(self, rival: Scores, key: str) -> tuple[float, float, float] | None:
        mine = self.bits(key)
        theirs = rival.bits(key)
        if mine is not None and theirs is not None:
            return float(mine.mean() - theirs.mean()), *paired(mine, theirs)
        a = self.samples.get(self.key(key))
        b = rival.samples.get(rival.key(key))
        if a is None or b is None:
            return None
        difference = a["value"] - b["value"]
        drawn = np.array(a["replicates"]) - np.array(b["replicates"])
        return difference, *around(difference, drawn, a["images"])


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f} %"


def clock(seconds: float) -> str:
    """Return seconds as kd writes them."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def score_text(value: float, column: Row) -> str:
    """Return a score in its unit, without the unit's name if it is not percent."""
    return percent(value) if column["unit"] == "%" else f"{value:.4f}"


def cell_text(value: float, interval: tuple[float, float] | None, unit: str) -> str:
    """Return a score and its interval as a cell has them."""
    if unit != "%":
        text = f"{value:.4f} {unit}".strip()
        if interval is not None:
            text += f" ({interval[0]:.4f} to {interval[1]:.4f})"
        return text
    text = percent(value)
    if interval is not None:
        low, high = (percent(min(1.0, max(0.0, end)))[:-2] for end in interval)
        text += f" ({low} to {high})"
    return text


def near(forecast: float, measured: float, limit: float) -> str:
    """Say whether a forecast is within a share of what was measured."""
    difference = forecast / measured - 1
    return "near" if abs(difference) <= limit else f"off by {100 * difference:+.0f} %"


def difference_word(difference: tuple[float, float, float]) -> str:
    """Return what an interval says."""
    _, low, high = difference
    if low > 0:
        return "better"
    return "worse" if high < 0 else "no difference shown"
