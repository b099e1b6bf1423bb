"""Compute the numbers of a run's report, of its export's card and of --check again,
with numpy alone.

Run: python tools/recount.py RUN [EXPORT] [--check FILE]

RUN is a run folder, EXPORT what `kd-export` wrote, FILE what `kd-train CONFIG --check`
printed before the run. Nothing of kd is imported: scores come from the bits of
scored.json and from answers.json, times and lengths from metrics.jsonl, the rest from
the files. Every line of report.md and README.md that holds a number is compared, or
listed as not recounted, with the reason. The exit code is 1 where a number is another.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Z = 1.959964
COPIED = "a score of logits, which no run stores: compared with scored.json alone"
REASONS = {  # of lines that are not recounted, by a pattern
    r"^#|^```|timm\.create_model|^kd-|^curl|^network\.load|^tags:|^- Weights|^Next:|^`\w+` with": (
        "names, and commands"
    ),
    r"licence": "a licence",
    r"Centre crop|uint8|content hash|^- Data|^- \d+ classes": (
        "a key of the configuration"
    ),
    r"preprocessing": "needs the teacher's weights and its library",
    r"The scores above use|threshold|sure from|passes ": (
        "needs the logits of the images: `kd verify` has them"
    ),
    r"CPU time|took .* ms|p50": (
        "a time of another moment: `kd verify` measures it again"
    ),
    r"compared:|^graph |^calibrated |^student  run|^teacher|^outputs": (
        "hashes of tensors and graphs: `kd verify`"
    ),
    r"^\| model\.|^\| openvino": "needs the graphs: `kd verify` asks them again",
}


# --------------------------------------------------------------------------------
# what files hold


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
    """Count a student's parameters in the head of a checkpoint: without statistics of
    batch norm.
    """
    head = tensors(folder / f"checkpoints/step_{step:08d}/tensors.safetensors")
    own = {name: one for name, one in head.items() if name.startswith("model.student.")}
    left = ("running_mean", "running_var", "num_batches_tracked", "mean", "std")
    return sum(
        math.prod(one["shape"])
        for name, one in own.items()
        if not name.rpartition(".")[2].startswith(left)
    )


def tensors(file: Path) -> Row:
    """Return the head of a file of safetensors: name, type and shape of each."""
    with file.open("rb") as opened:
        size = struct.unpack("<Q", opened.read(8))[0]
        return json.loads(opened.read(size))


def whole_records(folder: Path) -> int:
    """Count the records of a cache by their own lengths and checksums; all have one
    length.
    """

    def is_whole(content: bytes, view: str, at: int) -> int:
        crc, size = struct.unpack_from("<II", content, at)
        body, id = content[at + 8 : at + 8 + size], at // (8 + size)
        seed = zlib.crc32(f"{view}:{id}:{size}".encode())
        return (
            size
            if at % (8 + size) == 0
            and size == len(body)
            and zlib.crc32(body, seed) == crc
            else 0
        )

    count = 0
    for file in folder.glob("view_*"):
        content, view = file.read_bytes(), str(int(file.stem.partition("_")[2]))
        size = next(
            (
                size
                for at in range(len(content) - 8)
                if (size := is_whole(content, view, at))
            ),
            0,
        )
        starts = range(0, len(content) - 8, 8 + size) if size else ()
        count += sum(is_whole(content, view, at) == size for at in starts)
    return count


# --------------------------------------------------------------------------------
# statistics, written anew


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval: where (p - share)^2 = Z^2 p (1 - p) / n."""
    roots = np.roots([1 + Z * Z / n, -2 * share - Z * Z / n, share * share]).real
    return max(0.0, float(min(roots))), min(1.0, float(max(roots)))


def paired(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return Bonett and Price's interval of a difference on the same images."""
    n, difference = len(one), one.astype(float) - other
    padded = np.concatenate(
        [difference, [1.0, -1.0]]
    )  # an image more that each of the two wins
    half = Z * padded.std() / math.sqrt(n + 2)
    return max(-1.0, padded.mean() - half), min(1.0, padded.mean() + half)


def around(value: float, drawn: np.ndarray, images: int) -> tuple[float, float]:
    """Return the bootstrap's interval, wider for few images."""
    half = Z * drawn.std(ddof=1) * (1 + (18 / images if images else 0))
    return 2 * value - drawn.mean() - half, 2 * value - drawn.mean() + half


class Scores:
    """The scores of one model, from what scored.json keeps."""

    def __init__(self, scored: Row, prefix: str = "", suffix: str = "") -> None:
        self.row, self.samples = scored.get("row", {}), scored.get("samples", {})
        self.key: Callable[[str], str] = lambda key: f"{prefix}{key}{suffix}"

    def bits(self, key: str) -> np.ndarray | None:
        one = self.samples.get(self.key(key), {})
        if "right" not in one:
            return None
        return np.unpackbits(np.frombuffer(bytes.fromhex(one["right"]), np.uint8))[
            : one["images"]
        ].astype(bool)

    def value(self, key: str) -> float | None:
        bits = self.bits(key)
        return self.row.get(self.key(key)) if bits is None else float(bits.mean())

    def interval(self, key: str) -> tuple[float, float] | None:
        bits, one = self.bits(key), self.samples.get(self.key(key))
        if bits is not None:
            return wilson(float(bits.mean()), len(bits))
        return (
            None
            if one is None
            else around(one["value"], np.array(one["replicates"]), one["images"])
        )

    def minus(self, other: Scores, key: str) -> tuple[float, float, float] | None:
        mine, its = self.bits(key), other.bits(key)
        if mine is not None and its is not None:
            return float(mine.mean() - its.mean()), *paired(mine, its)
        a, b = self.samples.get(self.key(key)), other.samples.get(other.key(key))
        if a is None or b is None:
            return None
        difference, drawn = (
            a["value"] - b["value"],
            np.array(a["replicates"]) - np.array(b["replicates"]),
        )
        return difference, *around(difference, drawn, a["images"])


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f} %"


def clock(seconds: float) -> str:
    """Return seconds as kd writes them."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60:02d} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    )


# --------------------------------------------------------------------------------
# the recount


class Recount:
    """A run folder, and what its texts say."""

    def __init__(self, run: Path, export: Path | None = None) -> None:
        self.run, self.export = run, export
        self.manifest, self.scored = (
            read(run / "manifest.json"),
            read(run / "scored.json"),
        )
        self.train, self.val, self.epochs = (
            rows_of(run, kind) for kind in ("train", "val", "epoch")
        )
        self.alone = run / self.manifest.get("baseline", "labels_only")
        self.columns = [
            *self.manifest["scores"]["own"],
            *self.manifest["scores"]["pair"],
        ]
        self.config = (run / "config.yaml").read_text()
        labelled = self.columns[0]["key"] in self.val[0]
        self.selection_metric = (
            self.columns[0] if labelled else self.manifest["scores"]["pair"][0]
        )
        self.right: list[str] = []
        self.wrong: list[str] = []
        self.left: dict[str, str] = {}

    def model(self, name: str) -> Scores:
        if name.startswith("teacher"):
            number = name.partition(" ")[2]
            return Scores(self.scored, "teacher_", f"_{number}" if number else "")
        return Scores(
            read(self.alone / "scored.json") if "labels only" in name else self.scored
        )

    def check(self, line: str, *expected: str) -> None:
        missing = [one for one in expected if one not in line]
        (self.wrong if missing else self.right).append(
            f"{line}" + (f"   [recounted: {missing}]" if missing else "")
        )

    def texts(self) -> None:
        """Compare each line with a number, or say why not."""
        files = [
            self.run / "report.md",
            *([self.export / "README.md"] if self.export is not None else []),
        ]
        for file in files:
            heads: list[str] = []
            for line in file.read_text().splitlines() if file.is_file() else ():
                cells = (
                    [cell.strip() for cell in line.strip("|").split("|")]
                    if line.startswith("|")
                    else []
                )
                heads = cells if cells and not heads else heads if cells else []
                if not re.search(r"\d", line) or (cells and cells == heads):
                    continue
                if cells and heads[0] == "model":
                    self.table(line, dict(zip(heads, cells, strict=True)))
                elif cells and heads[0] == "epoch":
                    self.epoch(line, dict(zip(heads, cells, strict=True)))
                elif cells and heads[0] == "total CPU time":
                    self.curves(line, cells)
                elif not self.sentence(line):
                    reason = next(
                        (
                            why
                            for pattern, why in REASONS.items()
                            if re.search(pattern, line)
                        ),
                        "no rule",
                    )
                    self.left[line] = reason

    def table(self, line: str, cells: Mapping[str, str]) -> None:
        name, folder = (
            cells["model"],
            (self.alone if "labels only" in cells["model"] else self.run),
        )
        expected, scores = dict[str, str](), self.model(name)
        for column in self.columns:
            value = scores.value(column["key"])
            if column["title"] not in cells or value is None:
                continue
            if scores.interval(column["key"]) is None:
                self.left[f"{name}: {column['title']} {cells[column['title']]}"] = (
                    COPIED
                )
            text, ends = (
                (
                    percent(value)
                    if column["unit"] == "%"
                    else f"{value:.4f} {column['unit']}".strip()
                ),
                "",
            )
            if (interval := scores.interval(column["key"])) is not None:
                clipped = (
                    [min(1.0, max(0.0, end)) for end in interval]
                    if column["unit"] == "%"
                    else interval
                )
                ends = " ({} to {})".format(
                    *(
                        percent(end)[:-2] if column["unit"] == "%" else f"{end:.4f}"
                        for end in clipped
                    )
                )
            expected[column["title"]] = text + ends
        if "training images/s" in cells and not name.startswith("teacher"):
            last = rows_of(folder, "train")[-1]
            expected["training images/s"] = f"{last['images'] / last['seconds']:.0f}"
            if cells.get("training, CPU time", "-") != "-":
                expected["training, CPU time"] = clock(last["cpu_seconds"])
            expected["parameters"] = (
                f"{parameters(self.run, self.scored['step']) / 1e6:.2f} M"
            )
        elif cells.get("training, CPU time", "-") != "-":
            self.left[f"{name}: {cells['training, CPU time']} of its fit"] = (
                "its folder is shared with other runs"
            )
        if name.startswith("teacher") and cells.get("parameters", "-") != "-":
            self.left[f"{name}: {cells['parameters']} parameters"] = (
                "needs the teacher's weights"
            )
        self.cells(line, cells, expected)

    def cells(
        self, line: str, cells: Mapping[str, str], expected: Mapping[str, str]
    ) -> None:
        """Compare the cells of a row."""
        other = {
            title: text for title, text in expected.items() if cells[title] != text
        }
        (self.wrong if other else self.right).append(
            f"{line}   [recounted: {other}]" if other else line
        )

    @property
    def warm(self) -> Iterator[tuple[int, float, bool, bool]]:
        """Yield number, seconds, whether it is full and whether it is warm, of each
        epoch.
        """
        ends, steps = (
            [0.0, *(row["seconds"] for row in self.epochs)],
            [
                0,
                *(row["step"] for row in self.epochs),
            ],
        )
        asked = [
            sum(
                row["teacher_images"]
                for row in self.train
                if begin < row["step"] <= end
            )
            / self.epochs[i]["trained"]
            for i, (begin, end) in enumerate(itertools.pairwise(steps))
        ]
        most = (
            self.manifest["images"]
            // self.manifest["batch_size"]
            * self.manifest["batch_size"]
        )
        for i, row in enumerate(self.epochs):
            yield (
                i,
                ends[i + 1] - ends[i],
                row["trained"] >= most,
                i > 0 and asked[i] <= min(asked) + 0.05,
            )

    def epoch(self, line: str, cells: Mapping[str, str]) -> None:
        number, seconds, _, is_warm = [*self.warm][int(cells["epoch"])]
        row = self.epochs[number]
        kept, effective = (
            row["trained"] / self.manifest["images"],
            row["effective"] * row["trained"] / row["candidates"],
        )
        expected = {
            "trained": f"{row['trained']:.0f}",
            "kept": percent(kept),
            "effective sample size": f"{effective:.0f}",
        }
        self.cells(
            line,
            cells,
            expected | {"seconds": f"{seconds:.1f}{'' if is_warm else ' (cold)'}"},
        )

    def ratio(self) -> tuple[float, float] | None:
        """Return the time of a warm sifted epoch as a share of a warm full one's, and
        the run in full epochs.
        """
        found = [*self.warm]
        times = [
            [seconds for _, seconds, full, warm in found if warm and full is kind]
            for kind in (False, True)
        ]
        if not (times[0] and times[1]):
            return None
        share, full = (
            float(np.median(times[0]) / np.median(times[1])),
            sum(one[2] for one in found),
        )
        return share, full + (len(found) - full) * share

    def sentence(self, line: str) -> bool:
        key, decides = self.selection_metric["key"], self.selection_metric
        best = next(
            row for row in reversed(self.val) if row["step"] == self.scored["step"]
        )
        if found := re.match(r"- (.+?) against (.+?): (.+?) ([+-][\d.]+)", line):
            difference = self.model(found[1]).minus(self.model(found[2]), key)
            assert difference is not None
            self.check(line, self.points(difference), difference_word(difference))
        elif re.match(r"Chosen from the evaluations", line):
            value = percent(best[key]) if decides["unit"] == "%" else f"{best[key]:.4f}"
            seed = re.search(r"^  seed: (\d+)", self.config, re.M)
            self.check(
                line,
                f"{decides['title']} {value}",
                f"seed {seed[1] if seed else 0};",
                f"{clock(self.train[-1]['seconds'])} of training",
            )
        elif found := re.match(
            r"(?:Chosen from \d|Scored (?:once, )?on|On) .*images", line
        ):
            images = self.scored["images"]
            expected = [f"{images:,}"] + (
                [f"Chosen from {len(self.val)} evaluations"]
                if line.startswith("Chosen")
                else []
            )
            self.check(line, *expected)
        elif found := re.match(
            r"(?:  \| compared: )?Student against its teacher(?: on (\w+) images)?",
            line,
        ):
            row = best if found[1] == "validation" else self.scored["row"]
            pairs = [c for c in self.manifest["scores"]["pair"] if c["key"] in row]
            self.check(
                line,
                *(
                    f"{c['title']}"
                    f" {percent(row[c['key']]) if c['unit'] == '%' else format(row[c['key']], '.4f')}"
                    for c in pairs
                ),
            )
            self.agreement(best)
        elif "in brackets: 95 % intervals" in line.lower():
            self.check(line, "95 %")
        elif "warm epochs (" in line:
            ratio = self.ratio()
            assert ratio is not None
            saves = (
                f"saves {percent(1 - ratio[0])}"
                if ratio[0] <= 1
                else f"takes {percent(ratio[0] - 1)} longer"
            )
            self.check(
                line,
                saves,
                *(
                    [
                        f"as much as {ratio[1]:.1f} full",
                        f"run.epochs={max(1, round(ratio[1]))}",
                    ]
                    if ratio[0] <= 1
                    else []
                ),
            )
        elif found := re.match(r"outputs  (\d+) in the cache", line):
            folders = [path.parent for path in self.run.parent.rglob("view_0000.*")]
            counts = {str(whole_records(folder)) for folder in folders}
            self.check(
                line,
                *(
                    counts
                    if len(counts) == 1
                    else [found[1]]
                    if found[1] in counts
                    else ["another count"]
                ),
            )
        elif "against labels alone" in line:
            self.verdict(line)
        elif found := re.match(
            r"(?:The student|Whether the student) .*?(?:: |`)", line
        ):
            self.learning(line)
        else:
            return False
        return True

    def points(self, difference: tuple[float, float, float]) -> str:
        of_percent = self.selection_metric["unit"] == "%"
        one, low, high = (
            f"{100 * x:+.1f}" if of_percent else f"{x:+.4f}" for x in difference
        )
        return f"{one}{' points' if of_percent else ''} ({low} to {high})"

    def agreement(self, best: Row) -> None:
        """Count answers.json, which `kd-report` wrote: both models on validation
        images.
        """
        answers = read(self.run / "answers.json")
        if not answers or len(answers["label"]) != answers["of"]:
            return
        student, label = np.array(answers["student"]), np.array(answers["label"])
        expected = {"accuracy": (student == label).mean()}
        if answers.get("teacher"):
            teacher = np.array(answers["teacher"])
            expected |= {
                "teacher_accuracy": (teacher == label).mean(),
                "agreement": (student == teacher).mean(),
            }
        for key, value in expected.items():
            if key in best:
                self.check(f"answers.json: {key} {best[key]:.6f}", f"{value:.6f}")

    def verdict(self, line: str) -> None:
        """Compare the last sentence: the difference, and the time of each part where
        its rows are known.
        """
        difference = self.model("student").minus(
            self.model("labels only"), self.selection_metric["key"]
        )
        assert difference is not None
        alone, last, expected = (
            rows_of(self.alone, "train")[-1],
            self.train[-1],
            [self.points(difference)],
        )
        if "cpu_seconds" in alone and "CPU time" in line:
            had, own = alone["cpu_seconds"], last["cpu_seconds"]
            expected += [
                f"labels alone {clock(had)} ({clock(alone['seconds'])})",
                f"{clock(own)} ({clock(last['seconds'])})",
            ]
            if "the teacher's fit" not in line:
                cost = own + self.manifest.get("at_hand", {}).get("cpu_seconds", 0.0)
                equal = f"for {clock(cost)} of CPU time against {clock(had)}"
                less = f"they had {clock(had)} of {clock(cost)}"
                expected.append(less if "No verdict" in line else equal)
        if line.startswith("Pays from") and "the teacher's fit" not in line:
            best = max(score for _, score in self.curve(self.alone))
            costs = [at for at, _ in self.curve(self.run)]
            worse = [
                i for i, (_, score) in enumerate(self.curve(self.run)) if score <= best
            ]
            expected.append(
                f"Pays from {clock(costs[min(max([-1, *worse]) + 1, len(costs) - 1)])}"
                " of CPU time on"
            )
        word = {
            "Pays from": "better",
            "Does not pay": "worse",
            "Not shown": "no difference shown",
        }
        said = next(
            (one for start, one in word.items() if line.startswith(start)),
            difference_word(difference),
        )
        self.check(f"{line} [{said}]", *expected, f"[{difference_word(difference)}]")
        if "the teacher's fit" in line:
            self.left["the teacher's fit in the verdict"] = (
                "its folder is shared with other runs: metrics.jsonl there"
            )

    def curve(self, folder: Path) -> list[tuple[float, float]]:
        """Return (CPU seconds with stored outputs, validation score) of each evaluation
        of an arm.
        """
        hand = (
            self.manifest.get("at_hand", {}).get("cpu_seconds", 0.0)
            if folder == self.run
            else 0.0
        )
        spent = {row["step"]: row["cpu_seconds"] for row in rows_of(folder, "train")}
        return [
            (hand + spent[row["step"]], row[self.selection_metric["key"]])
            for row in rows_of(folder, "val")
        ]

    def curves(self, line: str, cells: Sequence[str]) -> None:
        """Compare a row of both arms: the time is rounded, so a score of any time that
        is written like it is right.
        """
        if " the teacher's fit " in (self.run / "report.md").read_text():
            self.left["the table of both arms"] = (
                "its teacher's fit is in a folder that other runs share"
            )
            return
        ends = [
            max(at for at, _ in self.curve(folder)) for folder in (self.run, self.alone)
        ]
        times = [max(ends) * number / 6 for number in range(1, 7)]
        found = []
        for time in times:
            if clock(time) == cells[0]:
                scores = [
                    [
                        score
                        for at, score in self.curve(folder)
                        if at <= time * (1 + 1e-12)
                    ]
                    for folder in (self.run, self.alone)
                ]
                found.append(
                    [percent(max(values)) if values else "-" for values in scores]
                )
        (self.right if list(cells[1:]) in found else self.wrong).append(
            f"{line}   [recounted: {found}]"
        )

    def learning(self, line: str) -> None:
        """Compare what is said about the student: the growth of its scores, or how many
        evaluations it had.
        """
        if "evaluations are too few" in line:
            self.check(line, f"{len(self.val)} evaluations")
            return
        steps, key = self.train[-1]["step"], self.selection_metric["key"]
        parts = [
            np.mean(
                [row[key] for row in self.val if low <= row["step"] / steps <= high]
            )
            for low, high in ((0.2, 0.5), (0.6, 0.75))
        ]
        self.check(line, f"{100 * float(parts[1] - parts[0]):+.1f} points")

    def files(self) -> None:
        """Compare what manifest.json of the export says of files and of validation
        images.
        """
        if self.export is None:
            return
        facts = read(self.export / "manifest.json")
        for name, one in facts["files"].items():
            content = (self.export / name).read_bytes()
            self.check(
                f"{name}: {one['bytes']} bytes, {one['sha256']}",
                f" {len(content)} bytes",
                hashlib.sha256(content).hexdigest(),
            )
        for name, graph in facts["parity"].items():
            if "correct" in graph and "accuracy" in graph:
                self.check(
                    f"{name}: accuracy {graph['accuracy']:.6f}",
                    f"{graph['correct'] / graph['images']:.6f}",
                )
            validation = facts["validation"].get(name)
            if validation and validation["numbers"]:
                counted = {
                    sum(
                        int(pair.split(":")[1])
                        for text in number["counts"].values()
                        for pair in text.split()
                    )
                    for number in validation["numbers"].values()
                }
                self.check(
                    f"{name}: {validation['images']} images counted",
                    *(f"{one} images" for one in counted),
                )
            if validation and "right" in validation:
                self.check(
                    f"{name}: right {validation['right']};",
                    f"right {graph['correct']};",
                )

    def forecast(self, text: str) -> None:
        """Compare what --check said with what came; times may be off by half, memory by
        15 %, sifting by 10 %.
        """
        steps = re.search(r"length    (\d+) steps", text)
        if steps:
            self.check(f"--check: {steps[1]} steps", f" {self.train[-1]['step']} steps")
        data = re.search(r"data .*: (\d+) training", text)
        if data:
            self.check(
                f"--check: {data[1]} training images",
                f" {self.manifest['images']} training",
            )
        ratio, told = (
            self.ratio() if self.epochs else None,
            re.search(r"sifted epoch saves ([\d.]+) %", text),
        )
        pairs = {
            "memory": (
                re.search(r"memory    (\d+) MiB", text),
                self.manifest.get("peak_mib"),
                0.15,
            )
        }
        if ratio is not None and told is not None:
            share, said = 1 - float(told[1]) / 100, ratio[0]
            self.check(
                f"--check: a sifted epoch takes {share:.3f} {near(share, said, 0.1)}",
                "near",
            )
        for what, (found, came, most) in pairs.items():
            if found is not None and came:
                self.check(
                    f"--check: {what} {found[1]}, came {came}"
                    f" {near(float(found[1]), came, most)}",
                    "near",
                )
        self.left["--check: time, speed and cost"] = (
            "another load of the machine changes them: benchmarks/forecast.py"
        )


def near(told: float, came: float, most: float) -> str:
    """Say whether a forecast is within a share of what came."""
    return (
        "near"
        if abs(told / came - 1) <= most
        else f"off by {100 * (told / came - 1):+.0f} %"
    )


def difference_word(difference: tuple[float, float, float]) -> str:
    """Return what an interval says."""
    return (
        "better"
        if difference[1] > 0
        else "worse"
        if difference[2] < 0
        else "no difference shown"
    )


def recounted(run: Path, export: Path | None = None, check: str = "") -> Recount:
    """Return all that was compared and all that was not."""
    made = Recount(run, export)
    made.texts()
    made.files()
    if check:
        made.forecast(check)
    return made


def main() -> int:
    """Print what is wrong, and what is not recounted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("export", type=Path, nargs="?")
    parser.add_argument("--check", type=Path)
    args = parser.parse_args()
    made = recounted(
        args.run, args.export, args.check.read_text() if args.check else ""
    )
    for line in made.wrong:
        print(f"WRONG  {line}")
    print(f"{len(made.right)} lines are right, {len(made.wrong)} wrong. Not recounted:")
    for line, why in made.left.items():
        print(f"  {line[:90]}: {why}")
    return int(bool(made.wrong))


if __name__ == "__main__":
    sys.exit(main())
