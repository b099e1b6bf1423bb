"""The commands from the first to the last, on a tiny image folder: teach, train,
evaluate, export.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from pieces import centre, slow, tiny
from PIL import Image
from safetensors.torch import load_file

import kd
from kd import config
from kd.cli.__main__ import COMMANDS, main
from kd.config.explain import explain
from kd.config.schema import Config
from kd.core.text import format_seconds


@pytest.fixture
def fitted(settings, photos, tmp_path):
    """The settings with a teacher that must be fitted first."""
    fit = {"epochs": 2, "lr": 3e-3, "folder": str(tmp_path / "teachers")}
    settings["teacher"] = {**tiny(2, 48), "precision": "fp32", "fit": fit}
    return settings


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def table_of(text: str) -> dict[str, list[str]]:
    """Return the rows of the printed table by their model; others may follow it."""
    lines = text[text.index("| model") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows[2:]}


def last_row(folder: Path) -> dict[str, Any]:
    """Return the last row of training of a run."""
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if row["kind"] == "train"][-1]


def test_teach_train_evaluate_and_export_go_together(
    fitted, written, command, tmp_path
):
    path = written(run={"baseline": True})
    taught = command("teach", path)
    assert taught.code == 0, taught
    teacher = Path(taught.out.splitlines()[-1])
    assert timm.create_model(f"local-dir:{teacher}", pretrained=True).num_classes == 3

    trained = command("train", path)
    assert trained.code == 0, trained
    assert f"teacher: reusing '{teacher}'" in trained.out
    rows = table_of(trained.out)
    assert list(rows) == ["teacher", "student, distilled", "student, labels only"]
    assert all(
        re.fullmatch(r"\d+\.\d % \(\d+\.\d to \d+\.\d\)", row[0])
        for row in rows.values()
    )
    assert float(rows["teacher"][0].split()[0]) > 60
    assert "Next: `kd-export" in trained.out
    assert "--trust" not in trained.out

    run = tmp_path / "runs" / "tiny"
    rows = [last_row(folder) for folder in (teacher.parent, run, run / "labels_only")]
    fit, distilled, alone = (
        f"{format_seconds(row['cpu_seconds'])} ({format_seconds(row['seconds'])})"
        for row in rows
    )
    times = (
        f"the teacher's fit {fit}, the student with new outputs {distilled}, labels alone"
        f" {alone}."
    )
    (verdict,) = (
        line
        for line in trained.out.splitlines()
        if "Training in CPU time (wall-clock): " in line
    )
    assert verdict.endswith(f"Training in CPU time (wall-clock): {times}")
    assert (run / "report.md").read_text().strip() in trained.out
    names = set(files(run))
    assert {
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "report.md",
        "labels_only/metrics.jsonl",
    } <= names
    assert not [
        name for name in names if name.endswith((".tmp", ".pt", ".pth", ".pkl"))
    ]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["classes"] == ["apple", "fig", "pear"]
    assert manifest["modes"] == {"teacher": "fp32+unfused", "student": "fp32+unfused"}
    assert (manifest["threads"], manifest["workers"]) == (1, 0)

    evaluated = command("evaluate", run)
    assert evaluated.code == 0, evaluated
    values = {
        line.split()[0]: float(line.split()[1])
        for line in evaluated.out.splitlines()
        if "reusing" not in line
    }
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if row["kind"] == "val"]
    highest = max(row["accuracy"] for row in rows)
    near = highest - math.sqrt(highest * (1 - highest) / 13)
    best = [row for row in rows if row["accuracy"] >= near][-1]
    assert values.pop("images") == 13
    assert values == pytest.approx(
        {name: best[name] for name in values}, abs=6e-5
    )  # four digits are printed
    assert {
        "accuracy",
        "top5",
        "nll",
        "ece",
        "teacher_accuracy",
        "kl",
        "agreement",
    } <= values.keys()

    exported = command("export", run, "--to", tmp_path / "student")
    assert exported.code == 0, exported
    student = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True)
    assert student.pretrained_cfg["label_names"] == ["apple", "fig", "pear"]
    facts = json.loads((tmp_path / "student" / "kd.json").read_text())
    assert facts["metrics"]["accuracy"] == best["accuracy"]


def test_the_averaged_weights_are_exported_and_score_what_the_run_scored(
    written, command, tmp_path, photos
):
    """With plain timm and Pillow, nothing of ours in between."""
    from kd.files.run_dir import RunDir

    assert command("train", written(optimizer={"ema": 0.5})).code == 0
    assert command("export", tmp_path / "runs" / "tiny", "--no-onnx").code == 0
    folder = tmp_path / "runs" / "tiny" / "export"
    tensors = RunDir(tmp_path / "runs" / "tiny").best()[1]
    exported = load_file(folder / "model.safetensors")
    assert exported
    assert all(
        torch.equal(tensors["average.network." + name], tensor)
        for name, tensor in exported.items()
    )
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    names = model.pretrained_cfg["label_names"]
    pictures = sorted((photos / "val").rglob("*.jpg"))
    mean, std = (
        torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std")
    )
    pixels = torch.from_numpy(np.stack([centre(path) for path in pictures])) / 255
    with torch.no_grad():
        answers = model((pixels - mean) / std).argmax(1)
    hits = sum(
        names[answer] == path.parent.name
        for answer, path in zip(answers, pictures, strict=True)
    )
    facts = json.loads((folder / "kd.json").read_text())
    assert hits / len(pictures) == pytest.approx(facts["metrics"]["accuracy"])


def test_the_resolved_config_is_an_input(written, command, tmp_path):
    path = written(run={"epochs": 1})
    assert command("train", path, "optimizer.lr=0.003").code == 0
    stored = tmp_path / "runs" / "tiny" / "config.yaml"
    loaded = config.load(stored)
    assert isinstance(loaded, Config)
    assert loaded.optimizer.lr == 0.003
    again = command("train", stored)
    assert again.code == 0
    assert "| step" not in again.out  # it is the same run
    weights = "checkpoints/step_00000004/tensors.safetensors"
    assert command("train", stored, "run.name=copy").code == 0
    first, second = (
        (tmp_path / "runs" / name / weights).read_bytes() for name in ("tiny", "copy")
    )
    assert first == second


@pytest.mark.parametrize(
    "fit", [pytest.param(True, id="teacher"), slow(False, id="student")]
)
def test_a_run_killed_right_after_its_best_checkpoint_goes_on(
    written, command, monkeypatch, tmp_path, fit
):
    """Of the fit of a teacher every later start exited with 2; a student was the best
    it had been before, or none.
    """
    from kd.files import checkpoint

    section = {"epochs": 1, "lr": 3e-3, "folder": str(tmp_path / "teachers")}
    taught = {**tiny(2, 48), "fit": section, "min_accuracy": 0.0}
    path = written(run={"epochs": 1}, **({"teacher": taught} if fit else {}))
    write = checkpoint.write

    def killed(*args, **options):
        write(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write", killed)
        assert command("train", path).code == 130
    again = command("train", path)
    assert again.code == 0, again
    assert command("export", tmp_path / "runs" / "tiny", "--no-onnx").code == 0
    rows = [
        json.loads(row)
        for row in (
            (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
        )
    ]
    exported = json.loads(
        (tmp_path / "runs" / "tiny" / "export" / "kd.json").read_text()
    )
    assert exported["metrics"]["accuracy"] == max(
        row["accuracy"] for row in rows if row["kind"] == "val"
    )


def test_an_interrupted_run_goes_on(written, command, tmp_path, monkeypatch):
    """Ctrl-C in the second epoch; the same command then ends with the same bits."""
    from kd.files.run_dir import RunDir

    path = written(run={"name": "whole"})
    assert command("train", path).code == 0
    log = RunDir.log

    def interrupted(self, kind, state, values):
        if state.step == 6:
            raise KeyboardInterrupt
        log(self, kind, state, values)

    path = written(run={"name": "broken"})
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "log", interrupted)
        stopped = command("train", path)
    assert stopped.code == 130
    assert stopped.err == "interrupted; the same command resumes\n"
    assert command("train", path).code == 0
    weights = "checkpoints/step_00000008/tensors.safetensors"
    assert (
        files(tmp_path / "runs" / "broken")[weights]
        == files(tmp_path / "runs" / "whole")[weights]
    )


def test_a_teacher_is_reused_by_content_and_fitted_anew_for_other_data(
    fitted, written, command, tmp_path, photos
):
    data = tmp_path / "photos"
    shutil.copytree(photos, data)
    path = written(data={"root": str(data)})
    first, second = (command("teach", path).out.splitlines()[-1] for _ in range(2))
    assert first == second
    assert (
        command(
            "teach", path, "run.name=other", "student.args.depth=3", "data.views=2"
        ).out.splitlines()[-1]
        == first
    )  # the student is no part of the teacher, and neither are the views that it will see
    Image.new("RGB", (20, 20)).save(data / "train" / "fig" / "99.jpg")
    assert command("teach", path).out.splitlines()[-1] != first
    other_length = command("teach", path, "teacher.fit.epochs=1").out.splitlines()[-1]
    assert len(list((tmp_path / "teachers").iterdir())) == 3
    assert Path(other_length).parent.parent == tmp_path / "teachers"


def test_a_baseline_gives_a_verdict_of_equal_cost_and_a_named_length_stays(
    fitted, written, command, refused, tmp_path
):
    """The student is not trained again, and its teacher's fit counts though it was
    found.
    """
    path = written(
        run={"baseline": True},
        data={"labels": "some", "labels_per_class": 8, "store": "views"},
        teacher={"cache": {"views": 1}},
    )
    first = command("train", path)
    assert first.code == 0, first
    run = tmp_path / "runs" / "tiny"
    distilled = last_row(run)
    alone = last_row(run / "labels_only")
    recorded = json.loads((run / "manifest.json").read_text())["labels_only"]
    assert distilled["step"] == 8
    assert alone["step"] == recorded["steps"] > 8  # the fit costs several steps
    verdict = next(
        line
        for line in first.out.splitlines()
        if "Training in CPU time (wall-clock): " in line
    )
    # a few steps of milliseconds: on a busy machine the labels' may have cost less than
    # estimated
    assert (" of CPU time against " in verdict) == ("No verdict" not in verdict)
    assert f"labels alone {format_seconds(alone['cpu_seconds'])} (" in verdict
    assert "| total CPU time |" in first.out
    assert (
        "Whether the student was still learning is not known: 2 evaluations"
        in first.out
    )
    page = command("report", run)
    assert page.code == 0, page
    assert verdict.partition(":")[0] in (run / "report.html").read_text()
    manifest = json.loads((run / "labels_only" / "manifest.json").read_text())
    assert manifest["images"] == 24  # those with a label alone
    few = ("data.labels_per_class=2", "teacher.fit.batch_size=4", "--check")
    assert refused("train", path, *few).startswith(
        "data.batch_size: is 8, but the training split has 6 labelled images"
    )
    assert (
        command("report", run / "labels_only").code == 0
    )  # a baseline's own configuration can be read
    again = command("train", path, "run.baseline_steps=4")
    assert again.code == 0, again
    assert last_row(run) == distilled
    short = last_row(run / "labels_only_4")
    assert short["step"] == 4
    assert "No verdict" in again.out
    assert "`run.baseline_steps=" in again.out
    stored = config.load(str(run / "config.yaml"))
    assert stored.run.baseline_steps == 4


def test_a_resumed_baseline_keeps_its_length(fitted, written, command, tmp_path):
    """A stopwatch sets it: another start would measure another one, and so be refused
    in its folder.
    """
    path = written(run={"baseline": True})
    first = command("train", path)
    assert first.code == 0, first
    run = tmp_path / "runs" / "tiny"
    before = last_row(run / "labels_only")
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    slower = [
        row | {"cpu_seconds": 9 * row["cpu_seconds"]} if "cpu_seconds" in row else row
        for row in rows
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in slower)
    )
    *_, newest = sorted((run / "labels_only").glob("checkpoints/step_*"))
    shutil.rmtree(newest)
    again = command("train", path)
    assert again.code == 0, again
    assert last_row(run / "labels_only")["step"] == before["step"]


def test_a_baseline_of_an_earlier_kd_goes_on(fitted, written, command, tmp_path):
    """It was as long as its run, and no manifest held a length."""
    path = written()
    first = command("train", path, "run.baseline=true", "run.baseline_steps=8")
    assert first.code == 0, first
    run = tmp_path / "runs" / "tiny"
    (run / "labels_only_8").rename(run / "labels_only")
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["labels_only"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    again = command("train", path, "run.baseline=true")
    assert again.code == 0, again
    assert last_row(run / "labels_only")["step"] == 8


def test_the_table_of_time_comes_once_and_a_resumed_run_says_from_where(
    written, command, tmp_path
):
    """Three tables (teacher, student, labels only) with rows of 0.0 %; a resumed run
    said nothing.
    """
    path = written(run={"epochs": 2})
    first = command("train", path, "run.baseline=true")
    assert first.code == 0, first
    table = [
        line
        for line in first.out.splitlines()
        if " s " in line and line.startswith("  ")
    ]
    assert first.out.count("where the time of") == 1
    assert table
    assert not any(" 0.0 %" in line for line in table)
    assert "resumes from" not in first.out
    newest, *_ = sorted((tmp_path / "runs").glob("*/checkpoints/step_*"), reverse=True)
    step = int(newest.name.removeprefix("step_"))
    shutil.rmtree(newest)
    again = command("train", path, "run.baseline=true")
    assert again.code == 0, again
    assert f"resumes from step {step // 2}" in again.out


# --------------------------------------------------------------------------------
# without training


@pytest.mark.parametrize("fit", [True, False])
def test_check_prints_and_writes_nothing(
    fitted, settings, written, command, tmp_path, teacher, inside, fit
):
    path = (
        written()
        if fit
        else written(teacher={"model": str(teacher), "args": {}, "fit": {"epochs": 0}})
    )
    before = files(tmp_path)
    answer = command("train", path, "--check")
    assert answer.code == 0, answer
    assert files(tmp_path) == before
    sections = {
        line.split()[0]: line
        for line in answer.out.splitlines()
        if not line.startswith(" ")
    }
    rows = (
        "config data student teacher losses batch length recipe plan backend memory"
        " images repeats time speed"
    )
    assert list(sections) == rows.split()
    assert "36 training and 13 validation images, 3 classes, 16 px" in sections["data"]
    assert sections["batch"].endswith(" 8 images")
    assert "8 steps of 8 images (2 epochs)" in sections["length"]
    assert (
        "fitted for 2 epochs if not found" if fit else "weights and classes fit;"
    ) in sections["teacher"]
    assert "all 49: none is damaged" in sections["images"]


def test_check_names_classes_without_validation(written, photos, command, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    shutil.rmtree(tmp_path / "photos" / "val" / "fig")
    answer = command(
        "train", written(data={"root": str(tmp_path / "photos")}), "--check"
    )
    assert answer.code == 0, answer
    assert (
        "no validation image: 1 of 3 classes, which accuracy does not cover: fig\n"
        in answer.out
    )


@pytest.mark.parametrize("name", ["train", "teach"])
def test_help_explains_every_key(command, name):
    answer = command(name, "--help-keys")
    assert answer.code == 0
    for key, _, _, meaning in explain():
        assert f"\n  {key}  (" in f"\n{answer.out}"
        meaning = re.sub(r"^\[kind: \w+\] ", "", meaning)
        assert " ".join(meaning.split())[:40] in " ".join(answer.out.split())


def test_help_explains_the_kinds_that_a_configuration_uses(command, tmp_path):
    answer = command("train", "--help-keys", "vit_food_scratch", "run.steps=1")
    assert answer.code == 0, answer
    kinds = re.findall(r"^kind: (\w+)$", answer.out, re.MULTILINE)
    assert kinds[0] == "food_mini"
    assert not {"csv", "history", "transformers", "dkd"} & {*kinds}
    assert "  run.steps  (" in answer.out
    answer = command("train", tmp_path / "none.yaml", "--help-keys")
    assert answer.code == 2, answer


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_screen(command, name):
    answer = command(name, "-h")
    assert answer.code == 0
    assert f"usage: kd-{name}" in answer.out
    assert "example: kd-" in answer.out
    assert len(answer.out.splitlines()) <= 60
    with_config = name in ("train", "teach", "cache", "sweep", "launch")
    assert ("kd help KEY" in answer.out) == ("--help-keys" in answer.out) == with_config


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"parts", "schema"}))
def test_a_bare_command_says_what_to_do_next(refused, name):
    line = refused(name)
    assert line.startswith(f"kd-{name}: ")
    assert f"For example: kd-{name} " in line
    assert "key=value" not in line
    assert f"kd-{name} --help" in line


def test_the_installed_commands_are_those_of_the_module(capfd):
    """`kd-train` and `python -m kd.cli train` are the same function."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    installed = dict(
        re.findall(r'^kd-(\w+) = "(kd\.cli\.\w+:\w+)"$', text, re.MULTILINE)
    )
    assert installed == {
        name: f"{function.__module__}:{function.__name__}"
        for name, function in COMMANDS.items()
    }
    assert '\nkd = "kd.cli.__main__:main"\n' in text
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.endswith("Did you mean 'train'?\n")


def test_one_epoch_is_one_and_an_hour_has_its_price(written, command):
    prices = ("price.per_hour=36", "price.instance=ml.p4d.24xlarge")
    answer = command("train", written(run={"epochs": 1}), "--check", *prices)
    assert "(1 epoch)" in answer.out
    assert "USD 36 an hour" in answer.out
    ms = float(re.search(r"loading ([\d.]+) ms per image", answer.out)[1])
    (line,) = (
        line for line in answer.out.splitlines() if " with 48 cores load " in line
    )
    assert float(
        re.search(r"load ([\d,]+) images/s", line)[1].replace(",", "")
    ) == pytest.approx(6000 / ms, rel=0.05)


def test_one_command_starts_the_others(capfd):
    assert main([]) == 2
    usage = capfd.readouterr().err
    assert all(
        re.search(f"^  {name} +[A-Z]?", usage, re.MULTILINE) for name in COMMANDS
    )
    assert "kd train vit_food" in usage
    for words in (["-h"], ["--help"], ["help"]):
        assert (main(words), capfd.readouterr().out) == (0, usage)
    assert (main(["--version"]), capfd.readouterr().out) == (
        0,
        f"kd {kd.__version__}\n",
    )
    assert main(["parts", "losses"]) == 0
    assert capfd.readouterr().out.startswith("losses:\n")


def test_help_explains_one_key(capfd):
    assert main(["help", "teacher.fit.lr"]) == 0
    assert re.fullmatch(
        r"  teacher\.fit\.lr  \(.*\)\n( {6}\S.*\n)*", capfd.readouterr().out
    )
    assert main(["help", "losses"]) == 0
    assert "  losses[].temperature  (" in capfd.readouterr().out
    for key in (
        "losses.0.weight",
        "losses[0].weight",
    ):  # as keys are set, and as errors name them
        assert main(["help", key]) == 0
        assert "  losses[].weight  (" in capfd.readouterr().out
    assert main(["help", "epochs"]) == 0  # of two sections
    assert re.findall(r"^  (\S+)  \(", capfd.readouterr().out, re.MULTILINE) == [
        "run.epochs",
        "teacher.fit.epochs",
    ]
    assert main(["help", "data"]) == 0
    kinds = re.findall(r"^kind: (\w+)$", capfd.readouterr().out, re.MULTILINE)
    assert kinds == [
        "csv",
        "food_mini",
        "hf",
        "imagefolder",
        "multilabel",
        "webdataset",
    ]  # one heading each
    with pytest.raises(SystemExit, match="0"):
        main(["help", "serve"])
    assert "usage: kd-serve" in capfd.readouterr().out
    assert main(["help", "teacher.fti.lr"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("teacher.fti.lr: ")
    assert line.endswith("Did you mean 'teacher.fit.lr'?")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["kd", "--version"], 0, "kd "),
        slow(
            ["kd", "train", "vit_food", "student.model=vti", "data.workers=0"],
            2,
            "student.model",
        ),
    ],
)
def test_a_module_that_python_starts_prints_one_line(words, code, expected):
    """Nothing but that line: also torch and triton, where they were loaded, end without
    a word.
    """
    process = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=240
    )
    assert process.returncode == code
    (line,) = (process.stdout + process.stderr).splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("kd tea", ["teach"]),
        ("kd serve --dr", ["--drain"]),
        ("kd-export --op", ["--openvino"]),
    ],
)
def test_a_shell_completes_commands_and_options(line, completions, tmp_path):
    """As the line that register-python-argcomplete prints calls it."""
    pytest.importorskip(
        "argcomplete", reason="argcomplete is not installed: pip install 'kd[dev]'"
    )
    name = line.split()[0]
    length = str(len(line))
    start = "main()" if name == "kd" else f"COMMANDS['{name[3:]}']()"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
    }
    variables |= {"COMP_LINE": line, "COMP_POINT": length, "COMP_TYPE": "9"}
    run = [sys.executable, "-c", f"from kd.cli.__main__ import COMMANDS, main; {start}"]
    process = subprocess.run(run, env={**os.environ, **variables}, timeout=60)
    assert process.returncode == 0
    assert [
        word.strip() for word in (tmp_path / "found").read_text().splitlines()
    ] == completions


def test_help_ends_quietly_on_a_closed_pipe():
    argv = [sys.executable, "-m", "kd.cli", "train", "--help"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_parts_are_listed_with_a_sentence_each(command, refused):
    answer = command("parts")
    assert answer.code == 0
    for name in ("kl", "imagefolder", "none", "cpu"):
        assert re.search(rf"^  {name} +[A-Z].*\.$", answer.out, re.MULTILINE), name
    assert command("parts", "losses").out.splitlines()[0] == "losses:"
    assert refused("parts", "loses").endswith("Did you mean 'losses'?")

    assert command("export").code == 2


def test_a_bug_is_a_traceback_and_exit_code_1(written, command, monkeypatch):
    from kd.engine import loop

    monkeypatch.setattr(
        loop, "advance", int
    )  # without a frame of its own: the error is raised in kd's line
    answer = command("train", written())
    assert answer.code == 1
    assert "TypeError" in answer.err
    assert answer.err.endswith(
        "this is a bug in kd; please report it with the lines above\n"
    )


# --------------------------------------------------------------------------------
# trackers


def test_tensorboard_gets_every_row(written, command, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra track is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    answer = command(
        "train",
        written(run={"trackers": ["tensorboard"], "steps": 2}, optimizer={"lr": 1e-6}),
    )
    assert answer.code == 0, answer
    (file,) = (
        path
        for path in (tmp_path / "runs").rglob("events.out.tfevents*")
        if path.parent.name == "tiny"
    )
    events = EventAccumulator(str(file.parent)).Reload()
    rows = [
        json.loads(line)
        for line in (
            (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
        )
    ]
    for name in ("train/loss", "val/accuracy", "val/agreement"):
        kind, _, key = name.partition("/")
        expected = {row["step"]: row[key] for row in rows if row["kind"] == kind}
        assert {
            event.step: event.value for event in events.Scalars(name)
        } == pytest.approx(expected, rel=1e-6)


def test_an_unknown_tracker_is_refused(written, refused, tmp_path):
    message = refused("train", written(run={"trackers": ["tensorbord"]}))
    assert message.startswith("run.trackers: no tracker 'tensorbord'. Allowed: ")
    assert message.endswith("Did you mean 'tensorboard'?")


def test_a_tracker_that_is_not_installed_is_refused(written, refused):
    pytest.importorskip("accelerate")
    from accelerate import tracking

    absent = sorted(
        set(map(str, tracking.LOGGER_TYPE_TO_CLASS))
        - set(map(str, tracking.get_available_trackers()))
    )
    if not absent:
        pytest.skip("every tracker is installed here")
    message = refused("train", written(run={"trackers": [absent[0]]}))
    assert (
        message
        == f"run.trackers: '{absent[0]}' is not installed. pip install {absent[0]}."
    )


def test_no_secret_is_kept(written, command, photos, tmp_path, monkeypatch):
    secret = "s3cret-value-of-a-token"
    root = tmp_path / secret
    shutil.copytree(photos, root)
    monkeypatch.setenv("KD_TOKEN", secret)
    monkeypatch.setattr("sys.argv", ["kd-train", f"data.root={root}"])
    overrides = [
        f"data.root={tmp_path}/${{oc.env:KD_TOKEN}}",
        "run.epochs=1",
        "run.trackers=[tensorboard]",
    ]
    answer = command("train", written(), *overrides, "run.baseline=true")
    assert answer.code == 0, answer
    stored = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "manifest.json", "report.md"} <= {
        path.name for path in stored
    }
    assert [path.name for path in stored if secret.encode() in path.read_bytes()] == []


def test_check_names_classes_without_a_training_image(
    settings, photos, command, tmp_path
):
    """Labels 1, 2 and 5 in a shard are six classes."""
    with tarfile.open(tmp_path / "train.tar", "w") as shard:
        for number, photo in enumerate(sorted((photos / "train").rglob("*.*"))[:9]):
            for ending, data in (
                ("jpg", photo.read_bytes()),
                ("cls", str((1, 2, 5)[number % 3]).encode()),
            ):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    shutil.copy(tmp_path / "train.tar", tmp_path / "val.tar")
    shards = {
        "kind": "webdataset",
        "train": str(tmp_path / "train.tar"),
        "val": str(tmp_path / "val.tar"),
    }
    data = {**shards, "image_size": 16, "batch_size": 8}
    file = tmp_path / "shards.yaml"
    file.write_text(
        yaml.safe_dump(
            {**settings, "data": data, "losses": [{"kind": "ce"}], "teacher": {}}
        )
    )
    answer = command("train", file, "--check")
    assert (
        "no training image: 3 of 6 classes, which no label teaches: 0, 3, 4\n"
        in answer.out
    ), answer
