"""Each benchmark behind a number runs at its smallest, and writes the columns that
docs/results.md shows.

What it measures means nothing. Not here: `proof`, `make_run`, `full_labels`,
`frontier`, `init_sweep`, `variants`, `sweep_pruned`, `tokens`, `views` and
tools/compare.py, whose shortest runs take minutes or need other checkouts
(test_benchmarks.py and test_compare.py check their configurations), and `gpu` with
`mfu` (test_gpu_rehearsal.py); `audit_peers` and `audit_labels_peers`, which need
libraries that kd does not.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from pieces import base, teacher_at
from PIL import Image
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "tools"))

from _record import hardware
from kd import config
from kd.jobs.train import train

ROOT = Path(__file__).parents[2]
PICTURES = [
    "data.train_images=4",
    "data.val_images=3",
    "data.image_size=32",
    "data.micro_batch=0",
]
"""Of each of twelve dishes."""
SHORT = [
    *PICTURES,
    "run.every.evaluate=0",
    "teacher.fit.evaluate=0",
    "teacher.min_accuracy=0",
]
Ran = Callable[..., list[dict[str, str]]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # of scripts that end with their files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def header(path: Path) -> dict[str, str]:
    from_results = importlib.import_module("results")
    return from_results.read(path)[0]


def columns(theme: str) -> set[str]:
    """Return the columns of a committed file that results.md shows."""
    theme = {"defer": "defer_seeds"}.get(theme, theme)  # which part of it a name says
    (path,) = (
        file
        for maker in ("amd", "intel")
        for file in ROOT.glob(f"benchmarks/results/*/{theme}_{maker}-*.csv")
    )
    listed, _, only = header(path)["show"].partition(" | ")
    names = {name.strip("+:") for name in listed.split()} - {"all"}
    return names | ({only.partition("=")[0]} if only else set())


@pytest.fixture
def ran(tmp_path, monkeypatch) -> Ran:
    """Run a benchmark's main in an empty folder; return the rows of what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()

    def run(
        name: str, *argv: Any, theme: str = "", committed: bool = True, **patches: Any
    ) -> list[dict[str, str]]:
        module = importlib.import_module(name)
        for attribute, value in patches.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *map(str, argv)])
        module.main()
        (path,) = tmp_path.rglob(f"{theme or name}_{hardware()}_20*.csv")
        lines = [
            line for line in path.read_text().splitlines() if not line.startswith("#")
        ]
        rows = list(csv.DictReader(lines))
        assert rows, path
        assert not committed or columns(theme or name) <= rows[0].keys()
        return rows

    return run


def test_audit_runs(ran, photos):
    words = [
        "leaks",
        "--data",
        photos,
        "--splits",
        "train",
        "val",
        "--name",
        "food_mini",
    ]
    (row,) = ran("audit", *words, theme="audit_food_mini")
    assert row["images"] == str(
        sum(len(list(photos.glob(f"{split}/*/*"))) for split in ("train", "val"))
    )


SMALLEST: dict[str, tuple[str, str, set[str]]] = {
    "cached_run": (
        "--seeds 0 --views 2 {short} run.epochs=3 teacher.fit.epochs=1",
        "run",
        {"fresh", "live", "ahead", "filling"},
    ),
    "charting": ("--rounds 1 --only 'Vega-Lite, SVG'", "scripts", {"no"}),
    "defer": ("{distilled} --wrong 0.5", "part", {"pair"}),
    "embedding": (
        "--seeds 0 --fit-epochs 1 {short} run.epochs=1",
        "student_knn",
        set(),
    ),
    "layout": (
        "--size 32 --batch 2 --only 'resnet10t, 24 channels'",
        "step_gain",
        set(),
    ),
    "loading": (
        "--data {photos} --size 32 --images 4 --rounds 1",
        "which",
        {"fill", "none", "disk", "ram"},
    ),
    "losses": (
        (
            "--work {work} --seeds 0 --epochs 1 --teacher-epochs 1 --losses kl --images"
            " {photos}"
        ),
        "loss",
        {"kl"},
    ),
    "multi_label": ("--seeds 0 --steps 2 --fit 2 {short}", "distilled_map", set()),
    "page_faults": (
        "--rounds 1 --teachers vit_tiny_patch16_224 --batch 2 --precision fp32",
        "way",
        {"glibc", "kd"},
    ),
    "rules": ("--rounds 1 --only no_workers", "case", {"no_workers"}),
    "same_data": (
        "--images 2000 --files 16",
        "part",
        {"listing", "equal", "search", "contents, 500 x 375"},
    ),
    "scale": (
        "--sizes 2000 --parts listing epoch history cache",
        "part",
        {"listing", "epoch", "history", "cache"},
    ),
    "shift": ("{exported} {photos}/val --streams 1 --images 9", "stream", {"0"}),
}
"""The arguments of a benchmark, a column, and what stands there; a number where nothing
is said.
"""


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_at_its_smallest(
    ran, name, photos, distilled, exported, tmp_path
):
    words, column, expected = SMALLEST[name]
    places = {
        "photos": photos,
        "distilled": distilled,
        "exported": exported,
        "work": tmp_path / "work",
    }
    rows = ran(name, *shlex.split(words.format(short=shlex.join(SHORT), **places)))
    values = {row[column] for row in rows}
    assert (
        expected <= values if expected else all(float(value) >= 0 for value in values)
    )
    if name == "cached_run":
        bits = {row["run"]: row["bits_of_live"] for row in rows}
        assert bits == {"fresh": "", "live": "", "ahead": "True", "filling": "False"}


def test_autocast_runs(ran, photos, tmp_path):
    weights = tmp_path / "weights.safetensors"
    words = ["--data", photos / "train", "--weights", weights, "--rounds", 1]
    patches = {"MODEL": "vit_tiny_patch16_224", "LABELLED": 8}
    network = timm.create_model(patches["MODEL"], img_size=32, num_classes=0)
    save_file(network.state_dict(), weights)
    rows = ran("autocast", *words, "--sizes", 32, **patches)
    by_way = {row["way"]: row for row in rows}
    assert [*by_way] == ["fp32", "bf16 weights", "autocast"]
    assert float(by_way["fp32"]["vectors_largest"]) == 0
    for way in ("bf16 weights", "autocast"):  # bfloat16 has eight bits
        assert 0 < float(by_way[way]["vectors_rms"]) < 0.1
    mib = {way: float(row["mib"]) for way, row in by_way.items()}
    assert mib["bf16 weights"] == pytest.approx(mib["autocast"] / 2, abs=0.1)


def test_without_labels_runs(ran, photos, tmp_path):
    data = tmp_path / "data"
    for split, source in (("train", "train"), ("test", "val")):
        shutil.copytree(photos / source, data / split)
    model = "vit_tiny_patch16_224"
    weights = tmp_path / "weights.safetensors"
    network = timm.create_model(model, img_size=32, num_classes=0)
    save_file(network.state_dict(), weights)
    words = ["--data", data, "--weights", weights, "--work", tmp_path / "work"]
    patches: dict[str, Any] = {"UNLABELLED": 8, "VALIDATION": 4, "TEST": 4}
    patches |= {"BATCH": 8, "PASSES": 1, "TUNING": 16, "SHARES": {"third": 0.3}}
    patches["TUNINGS"] = {"recipe": (16, 3e-3)}
    patches["TEACHER"] = {"model": model, "args": {"img_size": 32}}
    rows = ran(
        "without_labels",
        *words,
        "--seeds",
        0,
        "--labels",
        4,
        **patches,
    )
    by_arm = {row["arm"]: row for row in rows}
    assert {*by_arm} == {"labels only, third", "recipe"}
    gain = float(by_arm["recipe"]["gain"])
    scores = {arm: float(row["accuracy"]) for arm, row in by_arm.items()}
    difference = scores["recipe"] - scores["labels only, third"]
    assert gain == pytest.approx(difference, abs=0.01)
    ends = [float(by_arm["recipe"][end]) for end in ("low", "high")]
    assert ends[0] <= gain <= ends[1]


def test_from_folder_runs(ran, photos, tmp_path):
    data = tmp_path / "data"
    files = [tmp_path / f"efficientnet-lite{number}.pth" for number in (2, 0)]
    for split in ("train", "val"):
        shutil.copytree(photos / split, data / split)
    shutil.copytree(photos / "val", data / "test")
    for path in data.glob(
        "test/*/*"
    ):  # one picture in two splits is said, and is not what this is about
        Image.open(path).rotate(90).save(path)
    for file in files:
        tensors = timm.create_model(f"tf_{file.stem.replace('-', '_')}").state_dict()
        torch.save(
            {f"other.{i}": tensor for i, tensor in enumerate(tensors.values())}, file
        )
    words = [
        "--sentence",
        "drop<=100",
        "run.steps=2",
        "teacher.fit.steps=2",
        "teacher.min_accuracy=0",
    ]
    words += ["teacher.cache.views=0", "run.every.evaluate=0"]
    (row,) = ran("from_folder", data, *files, "--work", tmp_path / "work", *words)
    assert (row["file"], row["wrong"]) == ("model.onnx", "0")
    assert float(row["file_right"]) == float(row["student"])


def test_compile_runs(monkeypatch):
    import compile as measured

    monkeypatch.setattr(measured, "NETWORKS", {"residual_24": ("examples", 2, 32)})
    with torch.compiler.set_stance("force_eager"):
        row = measured.measure("residual_24", torch.get_num_threads())
    assert len(row["speeds"]) == 2
    assert row["ratio"] > 0


def test_endpoint_runs(ran, exported, photos):
    rows = ran(
        "endpoint", exported, photos / "val", "--clients", "2", "--images", "6", WARM=2
    )
    assert all(float(row["images_per_second"]) > 0 for row in rows)


def test_intervals_runs(ran, photos, tmp_path):
    shutil.copytree(photos / "train", tmp_path / "images" / "train")
    shutil.copytree(photos / "val", tmp_path / "images" / "test")
    rows = ran(
        "intervals", "--data", tmp_path / "images", "--images", "8", "--samples", "3"
    )
    assert [row["samples"] for row in rows] == ["3"] * 4


def test_patience_runs(ran, tmp_path):
    import patience

    settings = yaml.safe_load(patience.CONFIG.read_text())
    settings["data"] |= {
        "train_images": 8,
        "val_images": 3,
        "image_size": 32,
        "batch_size": 1,
        "micro_batch": 1,
    }
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vit_food.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "runs").mkdir()
    words = ["--seeds", "0", "--epochs", "1", "--labels", "1", "--label-seeds", "0"]
    pins = [*patience.PINS, "teacher.min_accuracy=0"]
    rows = ran(
        "patience",
        *words,
        CONFIG=tmp_path / "configs" / "vit_food.yaml",
        PINS=pins,
        FIT_EPOCHS=1,
    )
    assert {row["student"] for row in rows} == {"distilled", "labels"}
    assert "var(" not in (tmp_path / "out" / "patience.svg").read_text()


@pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning"
)  # torchvision's own, a peer that is timed
def test_photographs_of_many_pixels_are_timed(ran, exported, photos):
    sides = {"as it is": None, "12 MP": (400, 300)}
    rows = ran(
        "photographs",
        exported,
        photos / "train",
        "--rounds",
        "1",
        "--compared",
        "1",
        SIDES=sides,
    )
    assert {row["what"] for row in rows} == {"request", "view"}
    options = ("--images", "4", "--large", "2", "--rounds", "1")
    rows = ran("loading_peers", photos / "train", *options, SIDES=sides)
    assert {row["which"] for row in rows} == {"kd", "timm", "torchvision v2"}


def test_photographs_over_http_are_timed(ran, exported, photos):
    words = ["--rounds", "1", "--seconds", "0.3"]
    rows = ran(
        "photographs_endpoint",
        exported,
        photos / "train",
        *words,
        SIDES={"as it is": None, "12 MP": (400, 300)},
        CASES=[("12 MP", 2)],
    )
    assert {float(row["margin"]) for row in rows} == {0.0, 1.5}
    assert all(float(row["per_second"]) > 0 for row in rows)


def test_precision_runs(ran):
    rows = ran(
        "precision",
        "--rounds",
        "1",
        "--threads",
        "1",
        NETWORKS={"residual 16": ("", {}, 32, 2)},
    )
    assert {(row["what"], row["precision"]) for row in rows} == set(
        itertools.product(["step", "forward"], ["fp32", "bf16"])
    )
    assert all(float(row["cpu_ms"]) > 0 and row["convolved"] == "1.000" for row in rows)


def test_recipe_runs(ran, photos, tmp_path):
    for number, file in enumerate(sorted((photos / "train").glob("*/*"))[:20]):
        to = tmp_path / "data" / "train" / f"{number % 2}" / f"{number}.png"
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.open(file).resize((32, 32)).save(to)
    (tmp_path / "work").mkdir()
    (
        tmp_path / "work" / "recipe.jsonl"
    ).touch()  # else the rows of the committed CSV are the first ones
    words = [
        "--data",
        tmp_path / "data",
        "--work",
        tmp_path / "work",
        "--seeds",
        "0",
        "--epochs",
        "2",
    ]
    rows = ran("recipe", *words, BATCH=4)
    assert {row["arm"] for row in rows} == {*importlib.import_module("recipe").ARMS}


def test_regimes_runs(ran, tmp_path):
    words = [
        "--work",
        tmp_path / "work",
        "--regimes",
        "even",
        "--seeds",
        "0",
        "--epochs",
        "1",
        "--budgets",
        "1.0",
    ]
    few = {"train_images": 4, "val_images": 3}
    rows = ran(
        "regimes", *words, "--arms", "everything", REGIMES={"even": few}, FITTED=few
    )
    assert [row["arm"] for row in rows] == ["everything"]


def test_remote_runs(ran, photos, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'kd[ray]'")
    for source in photos.glob("*/*/*"):
        for number in range(4):
            copy = (
                tmp_path
                / "many"
                / source.relative_to(photos).with_stem(f"{source.stem}_{number}")
            )
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    rows = ran(
        "remote",
        "--data",
        tmp_path / "many",
        "--images",
        "128",
        "--rounds",
        "1",
        "--size",
        "32",
    )
    assert {"local", "ray"} <= {row["loader"] for row in rows}


def test_serve_runs(ran, exported):
    rows = ran(
        "serve", exported, "--part", "cold", "--seconds", "0.2", theme="serve_cold"
    )
    assert len(rows) > 1


def test_sifting_runs(photos, tmp_path, monkeypatch):
    import sifting

    small = sifting.Kind("cifar", 2, 4, 16)
    monkeypatch.setattr(sifting, "KINDS", {"cifar10": small, "teacher-cifar": small})
    monkeypatch.setattr(sifting, "EPOCHS", {"long": 4, "short": 2})
    monkeypatch.setattr(sifting, "BATCH", 4)
    (
        tmp_path / "rows.jsonl"
    ).touch()  # else the rows of the committed CSV are the first ones
    words = ["--cifar", str(photos), "--work", str(tmp_path)]
    monkeypatch.setattr(
        sys,
        "argv",
        ["benchmarks/sifting.py", *words, "--only", "cifar10-long-teacher loss-0"],
    )
    sifting.main()
    sifting.main()  # nothing is made twice
    (row,) = (
        json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    )
    assert row["images"] < 4 * 8
    assert row["cpu_seconds"] > 0


def test_what_you_save_runs(ran, exported, photos):
    rows = ran(
        "what_you_save",
        photos / "val",
        f"float32={exported}",
        "--turns",
        "1",
        "--seconds",
        "0.2",
        committed=False,
    )
    assert [row["system"] for row in rows] == ["float32"]
    manifest = json.loads((exported / "kd.json").read_text())
    assert float(rows[0]["accuracy"]) == pytest.approx(
        100 * manifest["metrics"]["accuracy"], abs=0.01
    )
    assert float(rows[0]["per_core"]) > 0
    assert float(rows[0]["mb"]) == round(
        (exported / "model.onnx").stat().st_size / 1e6, 2
    )


def test_small_first_runs(photos, tmp_path, monkeypatch):
    import small_first

    tensors = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save(
        {f"other.{i}": tensor for i, tensor in enumerate(tensors.values())},
        tmp_path / "lite0-0.pth",
    )
    overlay = {"pretrained_cfg_overlay": {"input_size": [3, 32, 32]}}
    sections = {
        "run": {"steps": 4},
        "data": {**small_first.PLAIN, "batch_size": 8, "eval_batch": 5},
        "student": {"args": {"classes": 2}},
        "teacher": {"args": overlay, "min_accuracy": 0},
    }
    monkeypatch.setattr(
        small_first,
        "KINDS",
        {"cifar10": small_first.Kind("few_labels", "cifar", 2, 8, "lite0", sections)},
    )
    monkeypatch.setattr(small_first, "FIT", {"steps": 1, "batch_size": 4})
    (
        tmp_path / "rows.jsonl"
    ).touch()  # else the rows of the committed CSV are the first ones
    words = [
        "--cifar",
        photos,
        "--weights",
        tmp_path,
        "--work",
        tmp_path,
        "--only",
        "cifar10-1/2 until 0.6-0",
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks/small_first.py", *map(str, words)])
    small_first.main()
    small_first.main()  # nothing is made twice
    (row,) = (
        json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()
    )
    assert (row["images"], row["steps"]) == (32, 4)
    assert row["cpu_seconds"] > 0
    rows = [
        {**row, "arm": arm, "cpu_seconds": seconds}
        for arm, seconds in (("start", 10.0), ("full", 50.0))
    ]
    half = {**row, "cpu_seconds": 30.0}
    fewer = small_first.keys_of(
        "fewer for 1/2 until 0.6", {"run": {"steps": 100}}, [*rows, half], "cifar10", 0
    )
    assert fewer == ["run.steps=50"]  # half of the time beside the start


def test_sweep_runs(ran, tmp_path):
    axes = {"losses.0.temperature": ("1", "2")}
    rows = ran(
        "sweep",
        "--epochs",
        "1",
        "--folder",
        tmp_path / "sweep",
        *SHORT,
        "teacher.fit.epochs=1",
        AXES=axes,
    )
    assert [row["way"] for row in rows].count("kd-sweep") == 1
    assert len(rows) == 3


def test_timm_distillation_links_photographs(photos, tmp_path):
    import timm_distillation

    folder, classes = timm_distillation.subset(photos, tmp_path, 6, 3)
    assert classes == 3
    assert sum(1 for path in folder.rglob("*") if path.is_file()) == 9
    assert Image.open(next(path for path in folder.rglob("*") if path.is_file())).size
    assert isinstance(timm_distillation.bf16_pays(), bool)


def test_choice_of_checkpoint_runs(ran, photos, teacher, tmp_path):
    settings = base(photos, tmp_path) | {"teacher": teacher_at(teacher)}
    run = {"epochs": 3, "keep": 9, "every": {"log": 2, "evaluate": 2, "checkpoint": 2}}
    settings["run"] |= run
    settings["data"]["test_fraction"] = 0.6
    folder = train(config.load(settings)).folder
    rows = ran("choice_of_checkpoint", folder, DRAWS=20, IMAGES=(2, 3))
    steps = sorted(
        int(item.name.partition("_")[2]) for item in (folder / "checkpoints").iterdir()
    )
    assert [
        int(item.partition(":")[0]) for item in rows[0]["test_by_step"].split()
    ] == steps
    assert [row["rule"] for row in rows[:3]] == [
        "highest",
        "newest within one standard error",
        "newest",
    ]


def test_the_simulated_rules_choose_as_said():
    module = importlib.import_module("choice_of_checkpoint")
    scores = np.array([0.56, 0.63, 0.58, 0.59, 0.61])
    chosen = {
        name: (rule(scores, 111), rule(scores, 10_000))
        for name, rule in module.RULES.items()
    }
    assert chosen == {
        "highest": (1, 1),
        "newest within one standard error": (4, 1),
        "newest": (4, 4),
    }
    right_KN = np.array([[True] * 40, [False] * 40])
    assert (module.accuracies(right_KN, 10, module.RULES["newest"]) == 0).all()
    assert (module.accuracies(right_KN, 10, module.RULES["highest"]) == 1).all()
