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
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from re import Match

import numpy as np
from recount_statistics import (
    Row,
    Scores,
    cell_text,
    clock,
    difference_word,
    near,
    parameters,
    percent,
    read,
    rows_of,
    score_text,
    whole_records,
)

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
VERDICTS = {  # what the last sentence says by its first words
    "Pays from": "better",
    "Does not pay": "worse",
    "Not shown": "no difference shown",
}


class Recount:
    """A run folder, and what its texts say."""

    def __init__(self, run: Path, export: Path | None = None) -> None:
        self.run = run
        self.export = export
        self.manifest = read(run / "manifest.json")
        self.scored = read(run / "scored.json")
        self.train, self.val, self.epochs = (
            rows_of(run, kind) for kind in ("train", "val", "epoch")
        )
        self.alone = run / self.manifest.get("baseline", "labels_only")
        scores = self.manifest["scores"]
        self.columns = [*scores["own"], *scores["pair"]]
        self.config = (run / "config.yaml").read_text()
        labelled = self.columns[0]["key"] in self.val[0]
        self.selection_metric = self.columns[0] if labelled else scores["pair"][0]
        self.right: list[str] = []
        self.wrong: list[str] = []
        self.left: dict[str, str] = {}

    def model(self, name: str) -> Scores:
        if name.startswith("teacher"):
            number = name.partition(" ")[2]
            return Scores(self.scored, "teacher_", f"_{number}" if number else "")
        if "labels only" in name:
            return Scores(read(self.alone / "scored.json"))
        return Scores(self.scored)

    def record(self, line: str, differing: object) -> None:
        """Count a line as right, or as wrong with what was recounted."""
        if differing:
            self.wrong.append(f"{line}   [recounted: {differing}]")
        else:
            self.right.append(line)

    def check(self, line: str, *expected: str) -> None:
        """Compare a line with the texts that it must hold."""
        self.record(line, [text for text in expected if text not in line])

    def texts(self) -> None:
        """Compare each line with a number, or say why not."""
        files = [self.run / "report.md"]
        if self.export is not None:
            files.append(self.export / "README.md")
        for file in files:
            heads: list[str] = []
            for line in file.read_text().splitlines() if file.is_file() else ():
                cells = []
                if line.startswith("|"):
                    cells = [cell.strip() for cell in line.strip("|").split("|")]
                heads = (heads or cells) if cells else []
                if not re.search(r"\d", line) or (cells and cells == heads):
                    continue
                if cells and heads[0] == "model":
                    self.table(line, dict(zip(heads, cells, strict=True)))
                elif cells and heads[0] == "epoch":
                    self.epoch(line, dict(zip(heads, cells, strict=True)))
                elif cells and heads[0] == "total CPU time":
                    self.curves(line, cells)
                elif not self.sentence(line):
                    reasons = [
                        reason
                        for pattern, reason in REASONS.items()
                        if re.search(pattern, line)
                    ]
                    self.left[line] = reasons[0] if reasons else "no rule"

    def table(self, line: str, cells: Mapping[str, str]) -> None:
        name = cells["model"]
        folder = self.alone if "labels only" in name else self.run
        is_teacher = name.startswith("teacher")
        has_time = cells.get("training, CPU time", "-") != "-"
        scores = self.model(name)
        expected: dict[str, str] = {}
        for column in self.columns:
            title = column["title"]
            value = scores.value(column["key"])
            if title not in cells or value is None:
                continue
            interval = scores.interval(column["key"])
            if interval is None:
                self.left[f"{name}: {title} {cells[title]}"] = COPIED
            expected[title] = cell_text(value, interval, column["unit"])
        if "training images/s" in cells and not is_teacher:
            last = rows_of(folder, "train")[-1]
            expected["training images/s"] = f"{last['images'] / last['seconds']:.0f}"
            if has_time:
                expected["training, CPU time"] = clock(last["cpu_seconds"])
            expected["parameters"] = (
                f"{parameters(self.run, self.scored['step']) / 1e6:.2f} M"
            )
        elif has_time:
            self.left[f"{name}: {cells['training, CPU time']} of its fit"] = (
                "its folder is shared with other runs"
            )
        if is_teacher and cells.get("parameters", "-") != "-":
            self.left[f"{name}: {cells['parameters']} parameters"] = (
                "needs the teacher's weights"
            )
        self.cells(line, cells, expected)

    def cells(
        self, line: str, cells: Mapping[str, str], expected: Mapping[str, str]
    ) -> None:
        """Compare the cells of a row."""
        differing = {
            title: text for title, text in expected.items() if cells[title] != text
        }
        self.record(line, differing)

    @property
    def warm(self) -> Iterator[tuple[float, bool, bool]]:
        """Yield each epoch's seconds, whether it is full and whether warm."""
        seconds = [0.0, *(row["seconds"] for row in self.epochs)]
        steps = [0, *(row["step"] for row in self.epochs)]
        teacher_shares = []
        for epoch, (begin, end) in zip(
            self.epochs, itertools.pairwise(steps), strict=True
        ):
            images = sum(
                row["teacher_images"]
                for row in self.train
                if begin < row["step"] <= end
            )
            teacher_shares.append(images / epoch["trained"])
        batch_size = self.manifest["batch_size"]
        full_images = self.manifest["images"] // batch_size * batch_size
        for i, row in enumerate(self.epochs):
            yield (
                seconds[i + 1] - seconds[i],
                row["trained"] >= full_images,
                i > 0 and teacher_shares[i] <= min(teacher_shares) + 0.05,
            )

    def epoch(self, line: str, cells: Mapping[str, str]) -> None:
        number = int(cells["epoch"])
        seconds, _, is_warm = [*self.warm][number]
        row = self.epochs[number]
        effective = row["effective"] * row["trained"] / row["candidates"]
        expected = {
            "trained": f"{row['trained']:.0f}",
            "kept": percent(row["trained"] / self.manifest["images"]),
            "effective sample size": f"{effective:.0f}",
            "seconds": f"{seconds:.1f}{'' if is_warm else ' (cold)'}",
        }
        self.cells(line, cells, expected)

    def ratio(self) -> tuple[float, float] | None:
        """Return a sifted epoch's share of a full one's time, and the run in full ones."""
        epochs = [*self.warm]
        sifted_times, full_times = (
            [seconds for seconds, full, warm in epochs if warm and full is kind]
            for kind in (False, True)
        )
        if not (sifted_times and full_times):
            return None
        share = float(np.median(sifted_times) / np.median(full_times))
        full_count = sum(full for _, full, _ in epochs)
        return share, full_count + (len(epochs) - full_count) * share

    def sentence(self, line: str) -> bool:
        """Compare a sentence that is known; return whether it is."""
        sentences: dict[str, Callable[[str, Match], None]] = {
            r"- (.+?) against (.+?): (.+?) ([+-][\d.]+)": self.pair,
            r"Chosen from the evaluations": self.choice,
            r"(?:Chosen from \d|Scored (?:once, )?on|On) .*images": self.images,
            r"(?:  \| compared: )?Student against its teacher(?: on (\w+) images)?": (
                self.agreement
            ),
            r"(?i).*in brackets: 95 % intervals": lambda line, _: self.check(
                line, "95 %"
            ),
            r".*warm epochs \(": self.warm_epochs,
            r"outputs  (\d+) in the cache": self.outputs,
            r".*against labels alone": self.verdict,
            r"(?:The student|Whether the student) .*?(?:: |`)": self.learning,
        }
        for pattern, compare in sentences.items():
            if match := re.match(pattern, line):
                compare(line, match)
                return True
        return False

    def pair(self, line: str, match: Match) -> None:
        """Compare how much better a model is than another."""
        difference = self.difference(match[1], match[2])
        self.check(line, self.points(difference), difference_word(difference))

    def choice(self, line: str, _: Match) -> None:
        """Compare what is said of the checkpoint that was chosen."""
        metric = self.selection_metric
        seed = re.search(r"^  seed: (\d+)", self.config, re.M)
        self.check(
            line,
            f"{metric['title']} {score_text(self.best[metric['key']], metric)}",
            f"seed {seed[1] if seed else 0};",
            f"{clock(self.train[-1]['seconds'])} of training",
        )

    def images(self, line: str, _: Match) -> None:
        """Compare the number of images that were scored."""
        expected = [f"{self.scored['images']:,}"]
        if line.startswith("Chosen"):
            expected.append(f"Chosen from {len(self.val)} evaluations")
        self.check(line, *expected)

    def outputs(self, line: str, match: Match) -> None:
        """Compare the number of stored outputs."""
        folders = [path.parent for path in self.run.parent.rglob("view_0000.*")]
        counts = {str(whole_records(folder)) for folder in folders}
        if len(counts) != 1:  # of several caches one must have it
            counts = {match[1] if match[1] in counts else "another count"}
        self.check(line, *counts)

    @property
    def best(self) -> Row:
        """Return the last validation row of the step that was scored."""
        return [row for row in self.val if row["step"] == self.scored["step"]][-1]

    def difference(self, model: str, rival: str) -> tuple[float, float, float]:
        """Return how much better a model is than its rival, with the interval."""
        difference = self.model(model).minus(
            self.model(rival), self.selection_metric["key"]
        )
        assert difference is not None
        return difference

    def warm_epochs(self, line: str, _: Match) -> None:
        """Compare what sifting saves."""
        ratio = self.ratio()
        assert ratio is not None
        share, full_epochs = ratio
        if share > 1:
            self.check(line, f"takes {percent(share - 1)} longer")
        else:
            self.check(
                line,
                f"saves {percent(1 - share)}",
                f"as much as {full_epochs:.1f} full",
                f"run.epochs={max(1, round(full_epochs))}",
            )

    def points(self, difference: tuple[float, float, float]) -> str:
        of_percent = self.selection_metric["unit"] == "%"
        value, low, high = (
            f"{100 * x:+.1f}" if of_percent else f"{x:+.4f}" for x in difference
        )
        return f"{value}{' points' if of_percent else ''} ({low} to {high})"

    def agreement(self, line: str, match: Match) -> None:
        """Compare both models' agreement, and count the answers in answers.json."""
        row = self.best if match[1] == "validation" else self.scored["row"]
        self.check(
            line,
            *(
                f"{column['title']} {score_text(row[column['key']], column)}"
                for column in self.manifest["scores"]["pair"]
                if column["key"] in row
            ),
        )
        answers = read(self.run / "answers.json")
        if not answers or len(answers["label"]) != answers["of"]:
            return
        student = np.array(answers["student"])
        label = np.array(answers["label"])
        expected = {"accuracy": (student == label).mean()}
        if answers.get("teacher"):
            teacher = np.array(answers["teacher"])
            expected |= {
                "teacher_accuracy": (teacher == label).mean(),
                "agreement": (student == teacher).mean(),
            }
        for key, value in expected.items():
            if key in self.best:
                self.check(f"answers.json: {key} {self.best[key]:.6f}", f"{value:.6f}")

    def verdict(self, line: str, _: Match) -> None:
        """Compare the last sentence: the difference, and the times that are known."""
        difference = self.difference("student", "labels only")
        expected = [self.points(difference)]
        alone = rows_of(self.alone, "train")[-1]
        last = self.train[-1]
        if "cpu_seconds" in alone and "CPU time" in line:
            alone_time = clock(alone["cpu_seconds"])
            expected += [
                f"labels alone {alone_time} ({clock(alone['seconds'])})",
                f"{clock(last['cpu_seconds'])} ({clock(last['seconds'])})",
            ]
            if "the teacher's fit" not in line:
                cost = clock(last["cpu_seconds"] + self.cpu_seconds_at_hand)
                equal = f"for {cost} of CPU time against {alone_time}"
                less = f"they had {alone_time} of {cost}"
                expected.append(less if "No verdict" in line else equal)
        if line.startswith("Pays from") and "the teacher's fit" not in line:
            best = max(score for _, score in self.curve(self.alone))
            curve = self.curve(self.run)
            worse = [i for i, (_, score) in enumerate(curve) if score <= best]
            start = curve[min(max([-1, *worse]) + 1, len(curve) - 1)][0]
            expected.append(f"Pays from {clock(start)} of CPU time on")
        word = difference_word(difference)
        written = word
        for start, meaning in VERDICTS.items():
            if line.startswith(start):
                written = meaning
        self.check(f"{line} [{written}]", *expected, f"[{word}]")
        if "the teacher's fit" in line:
            self.left["the teacher's fit in the verdict"] = (
                "its folder is shared with other runs: metrics.jsonl there"
            )

    @property
    def cpu_seconds_at_hand(self) -> float:
        """Return the CPU seconds of stored outputs that the run found."""
        return self.manifest.get("at_hand", {}).get("cpu_seconds", 0.0)

    def curve(self, folder: Path) -> list[tuple[float, float]]:
        """Return CPU seconds with stored outputs, and score, of an arm's evaluations."""
        start = self.cpu_seconds_at_hand if folder == self.run else 0.0
        spent = {row["step"]: row["cpu_seconds"] for row in rows_of(folder, "train")}
        return [
            (start + spent[row["step"]], row[self.selection_metric["key"]])
            for row in rows_of(folder, "val")
        ]

    def curves(self, line: str, cells: Sequence[str]) -> None:
        """Compare a row of both arms; each time that is written like its time counts."""
        if " the teacher's fit " in (self.run / "report.md").read_text():
            self.left["the table of both arms"] = (
                "its teacher's fit is in a folder that other runs share"
            )
            return
        curves = [self.curve(folder) for folder in (self.run, self.alone)]
        end = max(at for curve in curves for at, _ in curve)
        candidates = []
        for number in range(1, 7):
            time = end * number / 6
            if clock(time) == cells[0]:
                scores = [
                    [score for at, score in curve if at <= time * (1 + 1e-12)]
                    for curve in curves
                ]
                candidates.append(
                    [percent(max(values)) if values else "-" for values in scores]
                )
        self.record(line, [] if list(cells[1:]) in candidates else str(candidates))

    def learning(self, line: str, _: Match) -> None:
        """Compare the growth of the student's scores, or its number of evaluations."""
        if "evaluations are too few" in line:
            self.check(line, f"{len(self.val)} evaluations")
            return
        steps = self.train[-1]["step"]
        key = self.selection_metric["key"]
        early, late = (
            np.mean(
                [row[key] for row in self.val if low <= row["step"] / steps <= high]
            )
            for low, high in ((0.2, 0.5), (0.6, 0.75))
        )
        self.check(line, f"{100 * float(late - early):+.1f} points")

    def files(self) -> None:
        """Compare what the export's manifest.json says of files and of images."""
        if self.export is None:
            return
        facts = read(self.export / "manifest.json")
        for name, file in facts["files"].items():
            content = (self.export / name).read_bytes()
            self.check(
                f"{name}: {file['bytes']} bytes, {file['sha256']}",
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
                    *(f"{count} images" for count in counted),
                )
            if validation and "right" in validation:
                self.check(
                    f"{name}: right {validation['right']};",
                    f"right {graph['correct']};",
                )

    def forecast(self, text: str) -> None:
        """Compare --check with what came; memory may be off by 15 %, sifting by 10 %."""
        steps = re.search(r"length    (\d+) steps", text)
        if steps:
            self.check(f"--check: {steps[1]} steps", f" {self.train[-1]['step']} steps")
        data = re.search(r"data .*: (\d+) training", text)
        if data:
            self.check(
                f"--check: {data[1]} training images",
                f" {self.manifest['images']} training",
            )
        ratio = self.ratio() if self.epochs else None
        saving = re.search(r"sifted epoch saves ([\d.]+) %", text)
        if ratio is not None and saving is not None:
            share = 1 - float(saving[1]) / 100
            self.check(
                f"--check: a sifted epoch takes {share:.3f} {near(share, ratio[0], 0.1)}",
                "near",
            )
        memory = re.search(r"memory    (\d+) MiB", text)
        peak = self.manifest.get("peak_mib")
        if memory is not None and peak:
            self.check(
                f"--check: memory {memory[1]}, came {peak}"
                f" {near(float(memory[1]), peak, 0.15)}",
                "near",
            )
        self.left["--check: time, speed and cost"] = (
            "another load of the machine changes them: benchmarks/forecast.py"
        )


def recounted(run: Path, export: Path | None = None, check: str = "") -> Recount:
    """Return all that was compared and all that was not."""
    recount = Recount(run, export)
    recount.texts()
    recount.files()
    if check:
        recount.forecast(check)
    return recount


def main() -> int:
    """Print what is wrong, and what is not recounted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("export", type=Path, nargs="?")
    parser.add_argument("--check", type=Path)
    args = parser.parse_args()
    recount = recounted(
        args.run, args.export, args.check.read_text() if args.check else ""
    )
    for line in recount.wrong:
        print(f"WRONG  {line}")
    print(
        f"{len(recount.right)} lines are right, {len(recount.wrong)} wrong."
        " Not recounted:"
    )
    for line, reason in recount.left.items():
        print(f"  {line[:90]}: {reason}")
    return int(bool(recount.wrong))


if __name__ == "__main__":
    sys.exit(main())
